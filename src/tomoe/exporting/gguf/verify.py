"""The proof of a GGUF file: llama.cpp predicts what the converted model predicts in float32, and tokenizes as its tokenizer."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tomoe.exporting.agreement import BOUNDS, Agreement, Positions, judge, record, summarize
from tomoe.exporting.gguf.experts import merge_experts, read_routers
from tomoe.exporting.gguf.llama_cpp import LlamaCpp, binding
from tomoe.exporting.stock.routers import RouterForm
from tomoe.exporting.target import Precision
from tomoe.exporting.verify import Check, Proof, RouterCheck, parts_problems, use_all_experts_
from tomoe.model.generation import PROMPT, generate
from tomoe.model.hooks import hooked
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import stage_callback

NEXT_TOKENS = 8  # positions of a sequence at which llama.cpp predicts the next token
WRITTEN = 24  # tokens that both models write from one prompt
# Case, contractions, digits, spaces, line ends, letters of several bytes: each as short as a small context is.
RARE = ("The SEA", "don't  12345", "x\n\n\ty = 1", "naïve Über", "漢字🙂")


@dataclass(frozen=True)
class Comparison:
    """A file beside the converted model, which is in float32; context_length: tokens that llama.cpp may see."""

    file: Path
    precision: Precision
    moe: ToMoEForCausalLM
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    check: Check

    @property
    def how(self) -> str:
        return f"log-probs, {self.precision} in llama.cpp (xllamacpp {binding().__version__})"

    @property
    def text(self) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
        """Return the sequences, cut to the context, and which of their tokens are real."""
        sequences = self.check.text.sequences
        context = min(sequences.input_ids.shape[1], self.context_length - 1)
        return sequences.input_ids[:, :context], sequences.mask[:, :context]

    def open(self, file: Path) -> LlamaCpp:
        letter = self.tokenizer("a", add_special_tokens=False).input_ids[-1]
        return LlamaCpp(file, self.moe.config.vocab_size, self.text[0].shape[1] + WRITTEN, letter)

    def agree(self, llama: LlamaCpp, routers: RouterCheck | None = None) -> Agreement:
        """Compare log-probs at evenly spaced positions of every sequence and, with `routers`, the choices of experts."""
        ids, mask = self.text
        with nullcontext() if routers is None else hooked(routers.hooks(self.moe)):
            on_converted = stage_callback(self.check.on_progress, "running the converted")
            reference = record(self.moe, ids, mask, on_converted)
        on_sequence = stage_callback(self.check.on_progress, "running llama.cpp")

        def positions(b: int) -> list[Positions]:
            scored = (mask[b, :-1] & mask[b, 1:]).nonzero().squeeze(1)
            some = scored[torch.linspace(0, len(scored) - 1, min(NEXT_TOKENS, len(scored))).long()]
            predicted = torch.stack([llama.log_probs(ids[b, : n + 1].tolist()) for n in some.tolist()])
            on_sequence(b + 1, len(ids))
            return [(reference.logits(b, some).float().log_softmax(-1), predicted, ids[b, some + 1])]

        return summarize(positions(b) for b in range(len(ids)))

    def text_problem(self, llama: LlamaCpp) -> str | None:
        """Check that text predicts the same as its tokens, a passage and rare text (`RARE`), else llama.cpp splits text
        differently from the tokenizer."""
        ids = self.text[0]
        passage = str(self.tokenizer.decode(ids[0], skip_special_tokens=True))[: max(1, ids.shape[1] - 2)]
        for text in (passage, *RARE):
            tokens = self.tokenizer(text).input_ids
            if len(tokens) >= min(ids.shape[1] + WRITTEN, self.context_length):
                continue
            as_text, as_tokens = (llama.log_probs(prompt, fresh=True) for prompt in (text, tokens))
            if not torch.allclose(as_text, as_tokens, atol=1e-4):
                return f"llama.cpp reads {'text' if text is passage else repr(text)} as other tokens than the tokenizer does"
        return None

    def written(self, llama: LlamaCpp) -> dict[str, str] | None:
        """Return what both generate after one prompt; None if the context is too short, or if each token would read all layers
        from disk again."""
        if self.check.offload or len(self.tokenizer(PROMPT).input_ids) + WRITTEN >= self.context_length:
            return None
        converted = generate(self.moe, self.tokenizer, PROMPT, WRITTEN)
        return {"prompt": PROMPT, "converted": converted, "llama.cpp": llama.write(PROMPT, WRITTEN)}


def verify_file(comparison: Comparison, form: RouterForm | None) -> Proof:
    """Check that the file predicts what the converted model does. With routers of a form, these choose as the converted model's,
    and with all experts both predict the same."""
    file = comparison.file
    bounds = BOUNDS[comparison.precision]
    routers = RouterCheck(read_routers(file, form)) if form else None
    llama = comparison.open(file)
    agreement = comparison.agree(llama, routers)
    problem = comparison.text_problem(llama)
    written = comparison.written(llama)
    if routers is None:
        return Proof(agreement, judge(agreement, bounds) or problem, comparison.how, written)
    del llama
    use_all_experts_(comparison.moe)
    all_experts = None
    if shutil.disk_usage(file.parent).free > 1.1 * file.stat().st_size:
        with TemporaryDirectory(dir=file.parent) as place:
            all_experts = comparison.agree(comparison.open(merge_experts(file, Path(place) / file.name)))
    agreed = routers.found
    with_all, planned = parts_problems(agreement, all_experts, bounds)
    problem = problem or agreed.problem or with_all or planned
    return Proof(agreement, problem, comparison.how, written, routers=agreed, all_experts=all_experts)
