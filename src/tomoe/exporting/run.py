"""A converted folder becomes an export, and the export is proved: on real text it predicts what the folder predicts.

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
from tomoe.api import PROMPT, EvaluationText, generate, held_out_text, read_text
from tomoe.conversion import Listener, load_moe, pick_device, silent
from tomoe.errors import UserError
from tomoe.evaluation.compare import read_rows
from tomoe.evaluation.perplexity import blocks_sha256
from tomoe.exporting.engines import LlamaCpp, agree_on_next_tokens, binding
from tomoe.exporting.gguf import context_length
from tomoe.exporting.targets import Choice, Options, Sizes, check_place, choose, gguf_file, in_words, write_export
from tomoe.exporting.verify import Agreement, agree, record
from tomoe.files import own_name, write_whole
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.plan import Plan
from tomoe.report.card import write_card
from tomoe.report.summary import recipe_of, shown_name

FORMAT = "tomoe-export-1"
PROOF_TOKENS = 4096
CONTEXT = 512  # of a text file; held-out text comes in blocks of its own size
NEXT_TOKENS = 8  # positions of a block at which llama.cpp is asked
WRITTEN = 24  # tokens that the proof of a GGUF file lets both write


@dataclass(frozen=True)
class Bounds:
    """How far an export may be off before it counts as broken."""

    difference: float | None  # typical, as a share of the largest logit; None: rounding is too coarse to say
    kl: float  # nats, mean


# A wrong export is off by much more than this everywhere. A near tie of a router may fall the other way in one block.
BOUNDS = {
    "float32": Bounds(1e-4, 1e-4), "bfloat16": Bounds(None, 0.05), "float16": Bounds(None, 0.01),
    "f32": Bounds(1e-4, 1e-4), "f16": Bounds(None, 1e-3), "bf16": Bounds(None, 0.05), "q8_0": Bounds(None, 0.05),
}  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """What both models predicted, and what is wrong with that, in words; None where nothing is."""

    agreement: Agreement
    problem: str | None
    how: str  # "float32 in transformers"
    written: dict[str, str] | None = None  # how both go on from one prompt

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
    """What was written, and how well it was proved; `proof` is None where llama.cpp was needed and is not installed."""

    folder: Path
    choice: Choice
    sizes: Sizes
    proof: Proof | None
    options: Options


def export(
    folder: Path, name: str, out: Path, *, text: str | None = None, tokens: int = PROOF_TOKENS, dtype: str = "float32",
    device: str = "auto", options: Options | None = None, force: bool = False,
    say: Callable[[str], None] = lambda sentence: None, listen: Listener = silent,
) -> Exported:  # fmt: skip
    """Write the converted `folder` as target `name` to `out`, then prove it in `dtype` on text of at most `tokens` tokens.

    The text is what the conversion held out, or the file `text`. `say` gets what the user should know before anything is
    written. Raises UserError, before writing, where the target cannot hold the model, `out` is taken or the disk is too
    full, or no text is there; and after writing, where the proof fails: then all files stay.
    """
    options = options or Options()
    moe = load_moe(folder, None, device)
    tokenizer = load_tokenizer(str(folder))
    given = _proof_text(folder, text, tokens)
    choice = choose(moe, name)
    sizes = choice.target.sizes(moe, options)
    check_place(out, folder, sizes.bytes, force)
    own = sum(p.nbytes for p in moe.parameters())
    say(f"{choice.target.name}: {choice.reason}.")
    say(f"It takes {in_words(sizes.bytes)} ({sizes.words}); the weights of {own_name(folder)} take {in_words(own)}.")

    def heard(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: listen(stage, done, total, {})

    shown = -1

    def written(done: int, total: int) -> None:
        nonlocal shown
        if done // 10**6 > shown:  # many tensors are smaller than what is counted
            shown = done // 10**6
            heard("writing (MB)")(shown, max(1, total // 10**6))

    write_export(choice, moe, tokenizer, out, options, written)
    del moe
    if choice.target.name == "gguf":
        proof = prove_gguf(folder, gguf_file(out, options), given, options.precision, device, tokenizer, heard)
    else:
        proof = prove(folder, out, given, dtype, device, heard)
    done = Exported(out, choice, sizes, proof, options)
    _write_papers(done, folder, given)
    if proof is not None and proof.problem:
        raise UserError(
            f"the export in {out} is not the same model: {proof.problem}; nothing was deleted, see export.json"
        )
    return done


Heard = Callable[[str], Callable[[int, int], None]]


def prove(folder: Path, out: Path, given: EvaluationText, dtype: str, device: str, heard: Heard) -> Proof:
    """One model after the other on the same text, in `dtype`."""
    ids, mask = given.blocks.input_ids, given.blocks.mask
    meant = record(load_moe(folder, dtype, device), ids, mask, heard("running the converted"))
    exported = load_dense(str(out), getattr(torch, dtype), pick_device(device))
    found = record(exported, ids, mask, heard("running the export"))
    agreement = agree(meant, found, ids, mask)
    return Proof(agreement, judge(agreement, BOUNDS[dtype]), f"{dtype} in transformers {transformers.__version__}")


def prove_gguf(
    folder: Path, file: Path, given: EvaluationText, precision: str, device: str, tokenizer: PreTrainedTokenizerBase,
    heard: Heard,
) -> Proof | None:  # fmt: skip
    """The file in llama.cpp against the converted model in float32; None where llama.cpp is not installed."""
    try:
        version = binding().__version__
    except UserError:
        return None
    moe = load_moe(folder, "float32", device)
    context = min(given.blocks.input_ids.shape[1], context_length(moe) - 1)
    ids, mask = given.blocks.input_ids[:, :context], given.blocks.mask[:, :context]
    meant = record(moe, ids, mask, heard("running the converted"))
    letter = tokenizer("a", add_special_tokens=False).input_ids[-1]
    llama = LlamaCpp(file, moe.config.vocab_size, context + WRITTEN, letter)
    agreement = agree_on_next_tokens(meant, llama.log_probs, ids, mask, NEXT_TOKENS, heard("running llama.cpp"))
    problem = judge(agreement, BOUNDS[precision])
    # read as text and given as tokens it must predict the same, else llama.cpp splits text otherwise than the tokenizer
    passage = str(tokenizer.decode(ids[0], skip_special_tokens=True))[: max(1, context - 2)]
    spoken, split = (llama.log_probs(prompt, fresh=True) for prompt in (passage, tokenizer(passage).input_ids))
    if problem is None and not torch.allclose(spoken, split, atol=1e-4):
        problem = "llama.cpp reads text as other tokens than the tokenizer does"
    written = None
    if len(tokenizer(PROMPT).input_ids) + WRITTEN < context_length(moe):
        ours, theirs = generate(moe, tokenizer, PROMPT, WRITTEN), llama.write(PROMPT, WRITTEN)
        written = {"prompt": PROMPT, "converted": ours, "llama.cpp": theirs}
    return Proof(agreement, problem, f"log-probs, {precision} in llama.cpp (xllamacpp {version})", written)


def judge(a: Agreement, bounds: Bounds) -> str | None:
    """What is wrong, in words; None where nothing is."""
    allowed = None if bounds.difference is None else bounds.difference * max(1.0, a.largest_logit)
    if allowed is not None and not a.typical_difference <= allowed:
        return f"its predictions differ by {a.typical_difference:.2g} in a typical block, {allowed:.2g} were allowed"
    if not a.kl <= bounds.kl:
        return f"its predictions differ by a KL of {a.kl:.2g} nats, {bounds.kl:.2g} were allowed"
    return None


def _proof_text(folder: Path, text: str | None, tokens: int) -> EvaluationText:
    if text is not None:
        return read_text(text, load_tokenizer(str(folder)), CONTEXT, tokens)
    given = held_out_text([str(folder)])
    return replace(given, blocks=given.blocks.first(tokens))


def _write_papers(done: Exported, folder: Path, given: EvaluationText) -> None:
    """export.json and the card."""
    target, proof = done.choice.target, done.proof
    shown: dict[str, Any] = {"same": None, "problem": "not run: xllamacpp is not installed"}
    sentence = f"Not proved: {shown['problem']}."
    if proof is not None:
        shown = {"same": proof.problem is None, "problem": proof.problem, "how": proof.how, **proof.agreement.to_dict()}
        shown |= {"written": proof.written} if proof.written else {}
        verdict = "It predicts the same" if proof.problem is None else f"**It does not: {proof.problem}**"
        sentence = f"{verdict}: {proof.result}, on {given.name}."
    papers: dict[str, Any] = {
        "format": FORMAT,
        "target": target.name,
        "reason": done.choice.reason,
        "bytes": done.sizes.bytes,
        "layout": done.sizes.words,
        "options": asdict(done.options),
        "proof": shown,
        "text": {
            "name": given.name,
            "sha256": blocks_sha256(given.blocks.input_ids, given.blocks.mask),
            "context_length": given.blocks.input_ids.shape[1],
        },
        "versions": {m.__name__: str(m.__version__) for m in (torch, transformers, tomoe)},
    }
    write_whole(done.folder / "export.json", json.dumps(papers, indent=2) + "\n")
    if not (folder / "plan.json").is_file():
        return
    plan = Plan.load(folder)
    recipe = recipe_of(plan)
    command = (
        f"tomoe convert {shown_name(recipe.model) if recipe else 'MODEL'} --recipe recipe.json -o {own_name(folder)}\n"
        f"tomoe export {own_name(folder)} --format {target.name} -o {own_name(done.folder)}"
    )
    write_card(done.folder, plan, read_rows(folder), command=command, export=(target.name, done.sizes.words, sentence))
