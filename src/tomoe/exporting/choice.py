"""The targets of an export, and which of them can represent a model.

`target` is a key of the recipe and aims the conversion: it says what the experts must be like to fit a form. `--format` says
which form to write: `tomoe convert --format F` is `--set target=F`, and then `tomoe export --format F`. `auto` asks
for one: of a converted model, for the first stock class that holds it, else `hf` (`choose_target`); before the conversion, when
there are no experts to judge by, for the class of the dense model's own family, else for no aim (`of_family`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from tomoe.errors import UserError
from tomoe.exporting.dense import Dense
from tomoe.exporting.gguf.target import Gguf
from tomoe.exporting.stock.architecture import FamilyDecoder, StockArch
from tomoe.exporting.stock.table import STOCK_ARCHS
from tomoe.exporting.target import Job, Options, Sizes, Target
from tomoe.model.loading import load_config
from tomoe.moe.checkpoint import readable_weights
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.recipe.conversion import Recipe


class OwnForm(Target):
    """A folder as `tomoe convert` writes it, without plan and run: modeling code beside the weights. Supports every model."""

    name = "hf"

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        stored = sum(p.nbytes for p in moe.parameters())
        return Sizes(stored, "every neuron stored once, with the modelling code beside the weights")

    def write(self, job: Job, folder: Path) -> None:
        job.moe.save_pretrained(folder)
        readable_weights(folder)
        job.save_tokenizer(folder)

    def how_to_load(self, folder: Path, options: Options) -> str:
        return f'AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)'


# `auto` takes the first of these that holds the model.
KNOWN_CLASSES: tuple[Dense | StockArch, ...] = (Dense(), *STOCK_ARCHS)
TARGETS: dict[str, Target] = {target.name: target for target in (*KNOWN_CLASSES, Gguf(), OwnForm())}


@dataclass(frozen=True)
class ChosenTarget:
    """A target, and why it was chosen."""

    target: Target
    reason: str


def choose_target(moe: ToMoEForCausalLM, name: str) -> ChosenTarget:
    """Return the target of that name, or for `auto` the first stock architecture that represents the model exactly, else `hf`.
    Raises UserError, with the reason and the targets that fit, if the named one cannot represent it."""
    if name != "auto":
        if name not in TARGETS:
            raise UserError(f"there is no export target {name!r}; choose one of auto, {', '.join(TARGETS)}")
        problem = TARGETS[name].supports(moe)
        if problem:
            fitting = [other for other, target in TARGETS.items() if target.supports(moe) is None]
            raise UserError(f"{name} cannot represent this model exactly: {problem}; these can: {', '.join(fitting)}")
        return ChosenTarget(TARGETS[name], "as requested")
    problems = {}
    for target in KNOWN_CLASSES:
        problem = target.supports(moe)
        if problem is None:
            return ChosenTarget(target, f"{target.about} holds it {target.how_well}, and loads without code of its own")
        problems[target.name] = problem
    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    return ChosenTarget(TARGETS["hf"], f"no stock architecture can represent it exactly ({reasons})")


def check_target(recipe: Recipe, dense: PreTrainedModel) -> None:
    """Raise UserError if the recipe's target cannot represent any conversion of this dense model, judging by its parts."""
    # a layout for GPUs stays in tomoe's own form
    target = TARGETS["hf" if recipe.target == "gpu" else recipe.target]
    if reason := target.supports_dense(dense, recipe.experts.form):
        raise UserError(f"target {recipe.target} cannot represent the converted model: {reason}; choose another, or hf")


def of_family(model: str, form: str) -> str | None:
    """Return the target whose class has the attention of this dense model's family and supports experts of this form, if there is
    one. Raises UserError if the config cannot be read."""
    own = FamilyDecoder(load_config(model).get_text_config(decoder=True).model_type)
    return next((row.name for row in STOCK_ARCHS if row.decoder == own and row.form_problem(form) is None), None)
