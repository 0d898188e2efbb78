"""What every target of an export has: which models it can hold, what it will take, how it is written and verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.exporting.verify import Check, Proof, verify_exactly
from tomoe.moe.checkpoint import save_tokenizer
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.recipe.target_rules import Precision as Precision

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Options:
    """What the user may choose about the files. Raises UserError for a precision or a width that there is not."""

    width_multiple: int | None = None  # expert widths are multiples of this; None: what the target finds best
    precision: Precision = "f16"  # the type of the weights in a GGUF file

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or (self.width_multiple or 1) < 1:
            raise UserError(f"{self} has an unknown precision or width; precisions: {', '.join(PRECISIONS)}")


@dataclass(frozen=True)
class Job:
    """What is to be written."""

    moe: ToMoEForCausalLM
    tokenizer: PreTrainedTokenizerBase | None
    options: Options
    on_progress: StageCallback = no_stage_progress

    def save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, folder)


@dataclass(frozen=True)
class Sizes:
    """What an export will be; bytes: of the weights; words: their layout; copies: whether neurons that experts share are
    stored more than once, or experts are padded; zeros: experts of zeros in the layer with most of them."""

    bytes: int
    words: str
    copies: bool = False
    zeros: int = 0


class Target(ABC):
    """One form that a converted model can take; tried_with: older versions of transformers that computed the same."""

    name: str
    tried_with: tuple[str, ...] = ()

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        """Why this form cannot compute what the MoE computes, as half a sentence; None if it can."""
        return None

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        """Why no MoE of this dense model, with experts of this form, could take it, by the model's parts; None if one
        might."""
        return None

    @abstractmethod
    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        """What the export of this model will take."""

    @abstractmethod
    def write(self, job: Job, folder: Path) -> None:
        """Write the files into a folder that exists."""

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        """Compare what was written to `out` with the converted model in `folder`."""
        return verify_exactly(folder, out, check)

    def check_verifier(self) -> None:
        """Raises UserError if nothing is installed that could run what would be written."""
        return None

    def is_adjustable(self, moe: ToMoEForCausalLM) -> bool:
        """Whether another number of fine-grained experts can be asked for when this form is loaded."""
        return True

    def how_to_load(self, folder: Path, options: Options) -> str:
        """One line of code or shell."""
        return f'AutoModelForCausalLM.from_pretrained("{folder}")'
