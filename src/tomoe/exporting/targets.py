"""The targets of an export, which of them a model takes, and how their folders are written.

`target` is a key of the recipe and aims the conversion: it says what the experts must be like to fit a form. `--format` says
which form to write: `tomoe convert --format F` is `--set target=F`, and then `tomoe export --format F`. `auto` is no form, but
asks for one: of a converted model, for the first stock class that holds it, else `hf` (`choose`); before the conversion, when
there are no experts to judge by, for the class of the dense model's own family, else for no aim (`of_family`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.exporting.gguf.target import Gguf
from tomoe.exporting.hf import OwnForm
from tomoe.exporting.stock.carrier import empty_stock
from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.table import CARRIERS
from tomoe.exporting.target import Options, Sizes, Target
from tomoe.files import atomic_folder, format_bytes
from tomoe.folders import REPLACED
from tomoe.model.loading import load_config
from tomoe.model.trouble import writing
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.recipe.conversion import Recipe

# `auto` takes the first stock class that holds the model.
TARGETS: dict[str, Target] = {target.name: target for target in (*CARRIERS, Gguf(), OwnForm())}


@dataclass(frozen=True)
class Choice:
    """A target, and why it was chosen."""

    target: Target
    reason: str


def choose(moe: ToMoEForCausalLM, name: str) -> Choice:
    """The target of that name, or for `auto` the first stock architecture that holds the model exactly, else `hf`.

    Raises UserError, with the reason and the targets that fit, if the named target cannot hold the model.
    """
    if name != "auto":
        if name not in TARGETS:
            raise UserError(f"there is no export target {name!r}; choose one of auto, {', '.join(TARGETS)}")
        problem = TARGETS[name].supports(moe)
        if problem:
            fitting = [other for other, target in TARGETS.items() if target.supports(moe) is None]
            raise UserError(f"{name} cannot hold this model exactly: {problem}; these can: {', '.join(fitting)}")
        return Choice(TARGETS[name], "as requested")
    problems = {}
    for target in CARRIERS:
        problem = target.supports(moe)
        if problem is None:
            return Choice(target, f"{target.about} holds it {target.how_well}, and loads without code of its own")
        problems[target.name] = problem
    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    return Choice(TARGETS["hf"], f"no stock architecture holds it exactly ({reasons})")


def check_target(recipe: Recipe, dense: PreTrainedModel) -> None:
    """Raises UserError if the recipe's target can hold nothing that this dense model becomes, as far as its parts tell."""
    # a layout for GPUs stays in tomoe's own form
    target = TARGETS["hf" if recipe.target == "gpu" else recipe.target]
    if reason := target.supports_dense(dense, recipe.experts.form):
        raise UserError(f"target {recipe.target} cannot hold what this model becomes: {reason}; choose another, or hf")


def of_family(model: str, form: str) -> str | None:
    """The target whose class has the attention of this dense model's family, which its config tells, and a place for experts
    of this form; None if there is none.

    Raises UserError if the config cannot be read.
    """
    own = FamilyDecoder(load_config(model).get_text_config(decoder=True).model_type)
    return next((row.name for row in CARRIERS if row.decoder == own and row.form_problem(form) is None), None)


@contextmanager
def export_folder(out: Path) -> Iterator[Path]:
    """A folder whose files move to `out` at the end of the block, in place of the export that it may hold.

    If the block fails, `out` is as it was. Raises UserError if the files cannot be written.
    """
    with writing(f"the export to {out}"), atomic_folder(out, "config.json", REPLACED) as part:
        yield part


def write_export(
    choice: Choice,
    moe: ToMoEForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    out: Path,
    options: Options,
    on_progress: StageCallback = no_stage_progress,
) -> None:
    """Write the folder `out` and verify nothing. Raises UserError if it cannot be written."""
    with export_folder(out) as part:
        choice.target.write(moe, tokenizer, part, options, on_progress)


def padding_notice(moe: ToMoEForCausalLM, sizes: Sizes) -> str | None:
    """What an export with copies or zeros costs, in one or two sentences; None without."""
    if sizes.zeros:
        zeros = "one expert of zeros is" if sizes.zeros == 1 else f"up to {sizes.zeros} experts of zeros are"
        return (
            f"Layers differ in how many experts a token uses, but this form has one number: {zeros} always chosen, which takes "
            "space and time; `--set target=glm4_moe` (or gguf) at conversion needs none."
        )
    if not sizes.copies:
        return None
    dense = sum(p.numel() for p in empty_stock(moe.config.dense_config()).parameters()) * moe.dtype.itemsize
    return (
        f"Experts share neurons, but this form stores a copy for each and pads with zeros: {format_bytes(sizes.bytes)}, while "
        f"the dense model takes {format_bytes(dense)}. It is for loading elsewhere, not for speed; experts.form = fine at "
        "conversion has no copies."
    )
