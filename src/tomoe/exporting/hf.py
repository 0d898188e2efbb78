"""ToMoE's own form, with its modelling code beside the weights: it holds every converted model."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.exporting.target import Options, Sizes, Target
from tomoe.exporting.verify import Check, Proof, verify_exactly
from tomoe.moe.checkpoint import save_tokenizer
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import StageCallback


class OwnForm(Target):
    """A folder as `tomoe convert` writes it, without plan and run."""

    name = "hf"

    def supports(self, moe: ToMoEForCausalLM) -> None:
        return None

    def supports_dense(self, dense: PreTrainedModel, form: str) -> None:
        return None

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        stored = sum(p.nbytes for p in moe.parameters())
        return Sizes(stored, "every neuron stored once, with the modelling code beside the weights")

    def write(
        self,
        moe: ToMoEForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None,
        folder: Path,
        options: Options,
        on_progress: StageCallback,
    ) -> None:
        moe.save_pretrained(folder)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        return verify_exactly(folder, out, check)

    def how_to_load(self, folder: Path, options: Options) -> str:
        return f'AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)'
