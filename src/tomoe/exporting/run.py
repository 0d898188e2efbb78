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

import tomoe
from tomoe import distributed
from tomoe.data.evaluation_text import EvaluationText, held_out_text, read_text
from tomoe.errors import UserError
from tomoe.evaluation.perplexity import sequences_sha256
from tomoe.evaluation.rows import read_rows
from tomoe.exporting.target import Options, Sizes
from tomoe.exporting.targets import Choice, choose, padding_notice, write_export
from tomoe.exporting.verification import Check, Proof
from tomoe.exporting.writing import check_place
from tomoe.files import atomic_write, basename, format_bytes
from tomoe.model.loading import load_tokenizer
from tomoe.moe.checkpoint import load_moe
from tomoe.plan import Plan
from tomoe.progress import ProgressCallback, StageCallback, no_progress
from tomoe.report.card import write_card
from tomoe.report.summary import recipe_of, shown_name

FORMAT = "tomoe-export-1"
PROOF_TOKENS = 4096
# Tokens of a sequence from a text file; held-out text comes in sequences of its own length.
CONTEXT = 512


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

    folder: what `convert` wrote. name: mixtral, qwen2_moe, qwen3_moe, glm4_moe, gguf or hf; auto takes the first stock
    architecture that holds the model, else hf. out: the folder to write; with `force` it replaces an earlier export there.
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
    if notice := padding_notice(moe, sizes):
        say(notice)
    write_export(choice, moe, tokenizer, out, options, _in_megabytes(on_progress))
    check = Check(proof_text, dtype, moe.dtype, device, on_progress)
    del moe
    proof = choice.target.verify(folder, out, options, check)
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
        outcome = proof.to_dict()
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
