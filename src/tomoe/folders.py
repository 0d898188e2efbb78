"""Files that tomoe writes; others are never deleted or overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tomoe.errors import Advice, UserError

WEIGHTS = ("model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors.index.json")
CONFIGS = ("config.json", "generation_config.json", "modeling_tomoe.py", "SHA256SUMS")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
PLAN = ("plan.json", "plan.safetensors")
FIGURES = ("active", "layers", "throughput", "training")
MEASURED = (
    "README.md",
    "README.tomoe.md",
    "evaluation.json",
    "active.json",
    "benchmark.json",
    "report.json",
    "report.html",
    *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png")),
)
"""What is said of the weights, and goes with them."""
GGUF = tuple(f"model-{precision}.gguf" for precision in ("f32", "f16", "bf16", "q8_0", "q6_k", "q4_k", "q4_k_m"))
REPLACED = (*WEIGHTS, *GGUF, *CONFIGS, *TOKENIZER, *MEASURED)
"""What goes when a model is written where another one was. A kill in between leaves the plan, or export.json."""
MODEL = (*REPLACED, *PLAN, "export.json", "recipe.json", "run")
RUN = (
    "recipe.json",
    "origin.sha256",
    "method.py",
    "corpus.safetensors",
    "earlier-*corpus.safetensors",
    "metrics.jsonl",
    "best.safetensors",
    "cost.json",
    "no-model.txt",
    "plan",
    "masks",
    "weights",
    "repair",
)

# Files that only tomoe writes, and what is in them: what a kill leaves of a folder has at least one. Damaged files count.
_MARKS = {
    "plan.json": '"tomoe-plan-',
    "export.json": '"tomoe-export-',
    "config.json": '"tomoe_format"',
    "recipe.json": '"gradient_accumulation_steps"',
    "origin.sha256": "",
    "repair/layer-000.safetensors": "",
}
_BEGINNING = 2**24  # bytes of a file in which its mark is looked for
_NAMED = 4  # names that a sentence lists


def is_ours(folder: Path) -> bool:
    """Whether tomoe wrote a plan, model, run or export to the folder."""
    inside = folder.name == "run" and folder.parent != folder and is_ours(folder.parent)
    return inside or any(holds(folder / name, mark) for name, mark in _MARKS.items())


def holds(file: Path, mark: str) -> bool:
    """Whether a regular file is readable and contains this text."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return mark.encode() in opened.read(_BEGINNING)
    except OSError:
        return False


def refuse_foreign_files(folder: Path, force: bool, names: Sequence[str]) -> None:
    """Raise UserError if a folder to write to holds files that tomoe did not write. With `force` it may, unless one of `names`
    (patterns) would be overwritten. Hidden files and empty folders do not count."""
    if not folder.is_dir() or is_ours(folder):
        return
    visible = [path for path in folder.iterdir() if not path.name.startswith(".") and _has_files(path)]
    # a run comes before the model that becomes of it
    found = sorted(path.name for path in visible if not (path.name == "run" and is_ours(path)))
    overwritten = sorted({path.relative_to(folder).parts[0] for name in names for path in folder.glob(name)} & {*found})
    if overwritten:
        kind = "a model" if "config.json" in overwritten else "files"
        raise UserError(
            f"{folder} already holds {kind} that tomoe did not write and would overwrite ({listed(overwritten)}); choose "
            "another folder"
        )
    if found and not force:
        raise UserError(
            f"{folder} holds files that tomoe did not write ({listed(found)})",
            "choose another folder",
            Advice("force", "to write beside them"),
        )


def refuse_overwriting(out: Path, force: bool, dense: str = "", resume: bool = False) -> None:
    """Raise UserError if `out` holds a model or foreign files, or is the folder of the `dense` model. With `force`, or `resume`
    if there is a run to resume, a model that tomoe wrote may be replaced."""
    if dense and out.resolve() == Path(dense).expanduser().resolve():
        raise UserError(f"{out} holds the input model; choose another folder for the result")
    # an adapter beside a model is refused when the model is loaded
    replaces = force or (resume and (out / "run" / "recipe.json").exists())
    refuse_foreign_files(out, replaces, (*MODEL, "adapter_config.json"))
    if (out / "config.json").exists() and not replaces:
        raise UserError(f"{out} already holds a model", "choose another folder", Advice("force", "to replace it"))


def refuse_foreign_file(file: Path | None, mark: str) -> None:
    """Raise UserError if the file exists and was not written by tomoe, whose files contain the text `mark`."""
    if file is None:
        return
    if file.suffix != ".json" and file.name in MODEL and is_ours(file.parent):
        raise UserError(f"{file} belongs to the model in {file.parent}; choose another name")
    if not file.exists() or holds(file, mark) or (file.is_file() and not file.stat().st_size):
        return
    raise UserError(f"{file} exists, and tomoe did not write it; choose another name")


def _has_files(path: Path) -> bool:
    return not path.is_dir() or any(not inner.is_dir() for inner in path.rglob("*"))


def listed(names: Sequence[str]) -> str:
    """Join the first names, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
