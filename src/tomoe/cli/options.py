"""Arguments and options that several commands share, and the recipe made from them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer

from tomoe import folders, locks
from tomoe.errors import Advice, UserError
from tomoe.model import catalog, names
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe

PERCENT = re.compile(r"([0-9.]+)\s*%")


def fraction(text: str) -> float:
    """Parse `0.5` or `50%`. Raises ValueError for anything else."""
    percent = PERCENT.fullmatch(text.strip())
    try:
        return float(percent[1]) / 100 if percent else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a fraction such as 0.5 nor a percentage such as 50%") from None


def fractions(text: str) -> list[float]:
    """Parse `0.3,50%`. Raises ValueError for anything else."""
    return [fraction(part) for part in text.split(",")]


def with_fractions(setting: str) -> str:
    """Rewrite `active=50%,0.7` as `active=0.5,0.7`; settings of other keys are unchanged."""
    key, equals, values = setting.partition("=")
    if key.strip() != "active":
        return setting
    return key + equals + PERCENT.sub(lambda percent: str(fraction(percent[0])), values)


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file, or a known name such as smollm2-135m.")
]


def converted_folder(folder: Path) -> Path:
    """Return the folder. Raises UserError if it holds no model."""
    names.check_finished(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no converted model (no config.json); name a folder that `tomoe convert` wrote")
    return folder


Converted = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder written by `tomoe convert`.", callback=converted_folder)
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", metavar="OUT")]
Active = Annotated[
    float | None,
    typer.Option(
        "--active",
        help="Fraction of decoder parameters active per token: 0.5 or 50% (default 0.7).",
        parser=fraction,
        metavar="FRACTION",
    ),
]
RecipeName = Annotated[
    str | None, typer.Option("--recipe", help="Recipe file (.toml, .json) or preset.", metavar="FILE_OR_PRESET")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set any key of the recipe (repeatable).", metavar="SECTION.KEY=VALUE"),
]
Steps = Annotated[int | None, typer.Option("--steps", help="Training steps.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Calibration text: self (sampled from the model; the default for experts), python-docs (the default for inputs), "
        "wikitext, alpaca, a hub id or a file (repeatable).",
        metavar="SOURCE",
    ),
]
ActiveFractions = Annotated[
    Any,
    typer.Option(
        "--active",
        help="Measure at each of these active fractions: 0.5,0.7,1.",
        parser=fractions,
        metavar="FRACTION,...",
    ),
]
ActiveFraction = Annotated[
    float | None,
    typer.Option(
        "--active",
        help="Active fraction at run time: 0.4 or 40%.",
        parser=fraction,
        metavar="FRACTION",
    ),
]
Start = Annotated[
    Literal["carved", "random"] | None,
    typer.Option("--start", help="Initialize masks and routers from calibration statistics, or at random."),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Conversion method: a name that `tomoe methods` lists, or FILE.py:CLASS (default carve).",
        metavar="NAME",
    ),
]
Form = Annotated[Literal["fine", "overlapping", "inputs"] | None, typer.Option("--form", hidden=True)]
Attention = Annotated[
    Literal["off", "static", "per_token"] | None,
    typer.Option("--attention", help="Prune attention: not at all, equally for all tokens, or per token."),
]
Repair = Annotated[
    Literal["none", "full", "low_rank"] | None,
    typer.Option("--repair", help="Refit the down projections in closed form: full matrices, or low-rank changes."),
]
Dense = Annotated[
    str | None, typer.Option("--dense", help="Dense model (default: the one that the plan names).", metavar="MODEL")
]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="wikitext, c4, ptb, a hub id or a file (default: the conversion's held-out text).",
        metavar="FILE_OR_SOURCE",
    ),
]
Dtype = Literal["float32", "bfloat16", "float16"]
RunDtype = Annotated[Dtype, typer.Option("--dtype", help="Dtype of the weights at run time.")]
EvaluationDtype = Annotated[
    Literal["auto", Dtype],
    typer.Option(
        "--dtype",
        help="Dtype of the weights at run time; auto: as stored, but float32 products on processors without 16-bit "
        "instructions.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.", metavar="FILE")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Offload = Annotated[
    bool, typer.Option("--offload", help="Load one decoder layer at a time (for checkpoints larger than RAM).")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite earlier tomoe output in OUT.")]
SkipMemoryCheck = Annotated[bool, typer.Option("--skip-memory-check", help="Skip the memory check.")]


# the options that have another name than their key of the recipe
KEYS = {
    "data.sources": "data",
    "train.steps": "steps",
    "method.name": "method",
    "attention.pruning": "attention",
    "repair.mode": "repair",
}


def option_of(setting: Advice, command: click.Command | None) -> str | None:
    """Return the command-line option for a setting named in an error; None if the command that failed has none."""
    known = {option for parameter in command.params for option in parameter.opts} if command else set()
    option = "--task-dir" if setting.name == "folder" else f"--{KEYS.get(setting.name, setting.name).replace('_', '-')}"
    if option in known or (not setting.here and "." not in option):
        return option if setting.value == "True" else f"{option} {setting.value}"
    is_key = "." in setting.name or setting.name in Recipe.model_fields
    return f"--set {setting}" if is_key and ("--set" in known or not setting.here) else None


@dataclass(frozen=True)
class RecipeOptions:
    """The options of every command that makes a recipe; their names and help are the fields."""

    model: Model
    active: Active = None
    recipe: RecipeName = None
    changes: Changes = None
    steps: Steps = None
    seed: Seed = None
    data: Data = None
    method: Method = None
    form: Form = None
    start: Start = None
    attention: Attention = None
    repair: Repair = None

    def make(self, **more: object) -> Recipe:
        """Make the recipe from these options, the keys `more`, then `--set`. Raises UserError for a wrong key or value."""
        own = {"model": "model", "active": "active", "seed": "seed", "start": "start"} | KEYS
        named = {key: getattr(self, name) for key, name in own.items()} | {"data.sources": self.data or None, **more}
        # the older name of two settings
        alias = {"method.name": "inputs"} if self.form == "inputs" else {"experts.form": self.form}
        changes = [*overrides(alias), *overrides(named), *map(with_fractions, self.changes or [])]
        # mistakes in it are found before methods, and what they import, are loaded
        recipe = names.located(Recipe.load(self.recipe, changes))
        from tomoe.methods import registry

        return registry.resolve_method(recipe)[1]


def makes_recipe(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of `RecipeOptions` to a command, except those left out; it receives them as its first argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = [p for p in signature(RecipeOptions, eval_str=True).parameters.values() if p.name not in left_out]
        _, *own = signature(command, eval_str=True).parameters.values()

        def run(**values: Any) -> None:
            command(RecipeOptions(**{p.name: values.pop(p.name) for p in shared}), **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        # typer reads it; what is required comes first
        parameters = sorted([*shared, *own], key=lambda p: p.default is not Parameter.empty)
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def overrides(named: Mapping[str, object]) -> list[str]:
    """Return `section.key=value` for each option that was used."""
    return [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]


def check_model(name: str) -> None:
    """Raise UserError if there is no such model. Nothing is downloaded; hub ids are not checked."""
    if name not in catalog.MODELS:
        names.resolve(name)


def check_out(out: Path | None, run: Path, recipe: Recipe | FinetuneRecipe, resume: bool, force: bool) -> None:
    """Raise UserError, before a model is loaded, if the model folder `out` or the run folder `run` is in use."""
    from tomoe import distributed
    from tomoe.training import run_folder

    def check() -> None:
        folder = run if out is None else out
        # whoever writes there now is named first
        with locks.folder_lock(folder, "check") if folder.exists() else nullcontext():
            if out is not None:
                folders.refuse_overwriting(out, force, recipe.model, resume)
            run_folder.RunFolder(run).resumes(recipe, resume, force)

    # another rank may look when rank 0 has begun to write
    distributed.on_rank_zero(check)


def quoted(name: str | Path) -> str:
    """Quote a name for a shell, in commands to copy."""
    return shlex.quote(str(name))
