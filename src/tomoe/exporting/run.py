"""`export`: write a converted folder in another form, then verify on real text that both predict the same.

OUT (a converted folder) -> DIR (weights of another architecture, export.json, a card)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

import tomoe
from tomoe import distributed
from tomoe.data.evaluation_text import EvaluationText, held_out_text, read_text
from tomoe.errors import UserError
from tomoe.evaluation.perplexity import sequences_sha256
from tomoe.evaluation.rows import read_rows
from tomoe.exporting.engines import LlamaCpp, agree_on_next_tokens, binding
from tomoe.exporting.gguf import context_length
from tomoe.exporting.targets import Choice, Options, Sizes, check_place, choose, copies_notice, gguf_file, write_export
from tomoe.exporting.verify import Agreement, agree, record
from tomoe.files import atomic_write, basename, format_bytes
from tomoe.model.generation import PROMPT, generate
from tomoe.model.loading import load_dense, load_tokenizer, pick_device
from tomoe.moe.checkpoint import load_moe
from tomoe.plan import Plan
from tomoe.progress import ProgressCallback, StageCallback, no_progress, stage_callback
from tomoe.report.card import write_card
from tomoe.report.summary import recipe_of, shown_name

FORMAT = "tomoe-export-1"
PROOF_TOKENS = 4096
# Tokens of a sequence from a text file; held-out text comes in sequences of its own length.
CONTEXT = 512
# Positions of a sequence at which llama.cpp predicts the next token.
NEXT_TOKENS = 8
# Tokens that both models write from one prompt when a GGUF file is verified.
WRITTEN = 24


@dataclass(frozen=True)
class Bounds:
    """How far an export may be off before it counts as broken.

    difference: in a typical sequence, as a share of the largest logit, or None if rounding is too coarse to say; kl: mean, in
    nats.
    """

    difference: float | None
    kl: float


# A wrong export is off by much more than this everywhere. A near tie of a router may fall the other way in one sequence.
BOUNDS = {
    "float32": Bounds(1e-4, 1e-4), "bfloat16": Bounds(None, 0.05), "float16": Bounds(None, 0.01),
    "f32": Bounds(1e-4, 1e-4), "f16": Bounds(None, 1e-3), "bf16": Bounds(None, 0.05), "q8_0": Bounds(None, 0.05),
}  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """How far the export's predictions are from the converted model's.

    problem: what is wrong with them, or None; how: "float32 in transformers"; written: what both write after one prompt.
    """

    agreement: Agreement
    problem: str | None
    how: str
    written: dict[str, str] | None = None

    @property
    def result(self) -> str:
        """One line of numbers."""
        a = self.agreement
        return (
            f"largest difference {a.largest_difference:.2g} (largest logit {a.largest_logit:.1f}), expected difference of a "
            f"log-prob {a.expected_difference:.2g}, KL {a.kl:.2g} nats, "
            f"same top-1 {a.top1_agreement:.2%}, perplexity {a.perplexity:.4f} (converted folder: "
            f"{a.reference_perplexity:.4f}), {a.positions:,} positions, {self.how}"
        )


@dataclass(frozen=True)
class Exported:
    """What was written, and its proof, which is None if llama.cpp was needed and is not installed."""

    folder: Path
    choice: Choice
    sizes: Sizes
    proof: Proof | None
    options: Options


@distributed.locks_out("export")
def export(
    folder: str | Path, name: str, out: str | Path, *, text: str | None = None, tokens: int = PROOF_TOKENS,
    dtype: str = "float32", device: str = "auto", options: Options | None = None, force: bool = False,
    say: Callable[[str], None] = lambda message: None, on_progress: ProgressCallback = no_progress,
) -> Exported:  # fmt: skip
    """Write a converted model in another form, and verify on real text that the two predict the same.

    folder: what `convert` wrote. name: mixtral, qwen2_moe, qwen3_moe, gguf or hf; auto takes the first stock architecture
    that holds the model exactly, else hf. out: the folder to write; with `force` it replaces an earlier export there.
    text: a text file or source to verify on (default: what the conversion held out), at most `tokens` tokens of it, run in
    `dtype` on `device`. options: width of experts, type of GGUF weights. say: called with each notice for the user before
    anything is written.

    Raises UserError before writing if the target cannot hold the model, `out` is taken, the disk is too full or there is no
    text; and after writing if the predictions differ: then all files stay.
    """
    folder, out, options = Path(folder), Path(out), options or Options()
    moe = load_moe(folder, None, device)
    tokenizer = load_tokenizer(str(folder))
    proof_text = _proof_text(folder, text, tokens)
    choice = choose(moe, name)
    sizes = choice.target.sizes(moe, options)
    check_place(out, folder, sizes.bytes, force)
    stored = sum(p.nbytes for p in moe.parameters())
    say(f"{choice.target.name}: {choice.reason}.")
    say(f"It takes {format_bytes(sizes.bytes)} ({sizes.words}); {basename(folder)} takes {format_bytes(stored)}.")
    if notice := copies_notice(moe, sizes):
        say(notice)
    write_export(choice, moe, tokenizer, out, options, _in_megabytes(on_progress))
    del moe
    if choice.target.name == "gguf":
        file = gguf_file(out, options)
        proof = verify_gguf(folder, file, proof_text, options.precision, device, tokenizer, on_progress)
    else:
        proof = verify(folder, out, proof_text, dtype, device, on_progress)
    exported = Exported(out, choice, sizes, proof, options)
    _write_metadata(exported, folder, proof_text)
    if proof is not None and proof.problem:
        raise UserError(
            f"the export in {out} is not the same model: {proof.problem}; nothing was deleted, see export.json"
        )
    return exported


def _in_megabytes(on_progress: ProgressCallback) -> StageCallback:
    """Report bytes as megabytes, and only when that number changes: many tensors are smaller."""
    reported = -1

    def on_bytes(done: int, total: int) -> None:
        nonlocal reported
        if done // 10**6 > reported:
            reported = done // 10**6
            on_progress("writing (MB)", reported, max(1, total // 10**6), {})

    return on_bytes


def verify(
    folder: Path, out: Path, text: EvaluationText, dtype: str, device: str, on_progress: ProgressCallback
) -> Proof:
    """Run the converted model, then the export, on the same text in `dtype`, and compare their predictions."""
    ids, mask = text.sequences.input_ids, text.sequences.mask
    reference = record(load_moe(folder, dtype, device), ids, mask, stage_callback(on_progress, "running the converted"))
    exported = load_dense(str(out), getattr(torch, dtype), pick_device(device))
    predicted = record(exported, ids, mask, stage_callback(on_progress, "running the export"))
    agreement = agree(reference, predicted, ids, mask)
    return Proof(agreement, judge(agreement, BOUNDS[dtype]), f"{dtype} in transformers {transformers.__version__}")


def verify_gguf(
    folder: Path, file: Path, text: EvaluationText, precision: str, device: str, tokenizer: PreTrainedTokenizerBase,
    on_progress: ProgressCallback,
) -> Proof | None:  # fmt: skip
    """Run the file in llama.cpp and compare it with the converted model in float32; None if llama.cpp is not installed."""
    try:
        version = binding().__version__
    except UserError:
        return None
    moe = load_moe(folder, "float32", device)
    context = min(text.sequences.input_ids.shape[1], context_length(moe) - 1)
    ids, mask = text.sequences.input_ids[:, :context], text.sequences.mask[:, :context]
    reference = record(moe, ids, mask, stage_callback(on_progress, "running the converted"))
    letter = tokenizer("a", add_special_tokens=False).input_ids[-1]
    llama = LlamaCpp(file, moe.config.vocab_size, context + WRITTEN, letter)
    on_sequence = stage_callback(on_progress, "running llama.cpp")
    agreement = agree_on_next_tokens(reference, llama.log_probs, ids, mask, NEXT_TOKENS, on_sequence)
    problem = judge(agreement, BOUNDS[precision])
    # A passage must predict the same as text and as tokens, else llama.cpp splits text otherwise than the tokenizer.
    passage = str(tokenizer.decode(ids[0], skip_special_tokens=True))[: max(1, context - 2)]
    as_text, as_tokens = (llama.log_probs(prompt, fresh=True) for prompt in (passage, tokenizer(passage).input_ids))
    if problem is None and not torch.allclose(as_text, as_tokens, atol=1e-4):
        problem = "llama.cpp reads text as other tokens than the tokenizer does"
    written = None
    if len(tokenizer(PROMPT).input_ids) + WRITTEN < context_length(moe):
        converted_text, llama_text = generate(moe, tokenizer, PROMPT, WRITTEN), llama.write(PROMPT, WRITTEN)
        written = {"prompt": PROMPT, "converted": converted_text, "llama.cpp": llama_text}
    return Proof(agreement, problem, f"log-probs, {precision} in llama.cpp (xllamacpp {version})", written)


def judge(a: Agreement, bounds: Bounds) -> str | None:
    """What is wrong with an agreement, as half a sentence; None if it is within the bounds."""
    allowed = None if bounds.difference is None else bounds.difference * max(1.0, a.largest_logit)
    if allowed is not None and not a.typical_difference <= allowed:
        return f"its predictions differ by {a.typical_difference:.2g} in a typical sequence, the limit is {allowed:.2g}"
    if not a.kl <= bounds.kl:
        return f"its predictions differ by a KL of {a.kl:.2g} nats, the limit is {bounds.kl:.2g}"
    return None


def _proof_text(folder: Path, text: str | None, tokens: int) -> EvaluationText:
    if text is not None:
        return read_text(text, load_tokenizer(str(folder)), CONTEXT, tokens)
    held_out = held_out_text([str(folder)])
    return replace(held_out, sequences=held_out.sequences.truncate(tokens))


def _write_metadata(exported: Exported, folder: Path, text: EvaluationText) -> None:
    """Write export.json and the card."""
    target, proof = exported.choice.target, exported.proof
    outcome: dict[str, Any] = {"same": None, "problem": "not run: xllamacpp is not installed"}
    sentence = f"Not verified: {outcome['problem']}."
    if proof is not None:
        outcome = {
            "same": proof.problem is None,
            "problem": proof.problem,
            "how": proof.how,
            **proof.agreement.to_dict(),
        }
        outcome |= {"written": proof.written} if proof.written else {}
        verdict = "It predicts the same" if proof.problem is None else f"**It does not: {proof.problem}**"
        sentence = f"{verdict}: {proof.result}, on {text.name}."
    metadata: dict[str, Any] = {
        "format": FORMAT,
        "target": target.name,
        "reason": exported.choice.reason,
        "bytes": exported.sizes.bytes,
        "layout": exported.sizes.words,
        "options": asdict(exported.options),
        "proof": outcome,
        "text": {
            "name": text.name,
            "sha256": sequences_sha256(text.sequences.input_ids, text.sequences.mask),
            "context_length": text.sequences.input_ids.shape[1],
        },
        "versions": {m.__name__: str(m.__version__) for m in (torch, transformers, tomoe)},
    }
    atomic_write(exported.folder / "export.json", json.dumps(metadata, indent=2) + "\n")
    if not (folder / "plan.json").is_file():
        return
    plan = Plan.load(folder)
    recipe = recipe_of(plan)
    command = (
        f"tomoe convert {shown_name(recipe.model) if recipe else 'MODEL'} --recipe recipe.json -o {basename(folder)}\n"
        f"tomoe export {basename(folder)} --format {target.name} -o {basename(exported.folder)}"
    )
    write_card(
        exported.folder, plan, read_rows(folder), command=command, export=(target.name, exported.sizes.words, sentence)
    )
