"""The interface of an export target: which models it supports, how large it is, how it is written and verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.exporting.verify import Check, Proof, verify_exactly
from tomoe.moe.checkpoint import save_tokenizer
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import ProgressCallback, StageCallback, no_stage_progress
from tomoe.recipe.target_rules import Precision as Precision

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Options:
    """File options set by the user. Raises UserError for an unsupported precision or width."""

    width_multiple: int | None = None  # expert widths are multiples of this; None: what the target finds best
    precision: Precision = "f16"  # the type of the weights in a GGUF file

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or (self.width_multiple or 1) < 1:
            raise UserError(f"{self} has an unknown precision or width; precisions: {', '.join(PRECISIONS)}")


@dataclass(frozen=True)
class Job:
    """What to write; statistics: what `Target.statistics` measured."""

    moe: ToMoEForCausalLM
    tokenizer: PreTrainedTokenizerBase | None
    options: Options
    on_progress: StageCallback = no_stage_progress
    statistics: Any = None

    def save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, folder)


@dataclass(frozen=True)
class Sizes:
    """The sizes of an export; bytes: of the weights; words: their layout; copies: whether shared neurons are stored more than
    once, or experts are padded; zeros: padding experts in the layer with most of them."""

    bytes: int
    words: str
    copies: bool = False
    zeros: int = 0


class Target(ABC):
    """One form in which a converted model can be written; tried_with: older versions of transformers that computed the same."""

    name: str
    tried_with: tuple[str, ...] = ()

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        """Say why this form cannot compute the MoE, as half a sentence; None if it can."""
        return None

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        """Say why it cannot represent any MoE of this dense model with experts of this form, judging by its parts; None if it
        may."""
        return None

    @abstractmethod
    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        """Return the size of this model's export."""

    def statistics(
        self, folder: Path, options: Options, tokens: int, device: str, offload: bool, on_progress: ProgressCallback
    ) -> Any:
        """What writing needs to know of the converted model in `folder` on at most `tokens` tokens of text; None: nothing."""
        return None

    @abstractmethod
    def write(self, job: Job, folder: Path) -> None:
        """Write the files into an existing folder."""

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        """Compare the export in `out` with the converted model in `folder`."""
        return verify_exactly(folder, out, check)

    def check_verifier(self) -> None:
        """Raise UserError if nothing is installed that can run the export."""
        return None

    def is_adjustable(self, moe: ToMoEForCausalLM) -> bool:
        """Whether this form can be loaded with another number of fine-grained experts."""
        return True

    def how_to_load(self, folder: Path, options: Options) -> str:
        """Return one line of code or shell."""
        return f'AutoModelForCausalLM.from_pretrained("{folder}")'
