"""`export`: write a converted folder as another architecture, then verify on real text that both predict the same.

OUT (a converted folder) -> DIR (weights of another architecture, export.json, a card)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tomoe import distributed
from tomoe.data.evaluation_text import EvaluationText, held_out_text, load_text
from tomoe.errors import Advice, UserError
from tomoe.evaluation.perplexity import sequences_sha256
from tomoe.evaluation.results import read_rows
from tomoe.exporting.choice import ChosenTarget, choose_target
from tomoe.exporting.stock.architecture import empty_stock
from tomoe.exporting.target import Job, Options, Sizes
from tomoe.exporting.verify import Check, Proof
from tomoe.exporting.writing import check_place
from tomoe.files import atomic_folder, basename, format_bytes
from tomoe.folders import REPLACED
from tomoe.model.compute_dtype import dtype_of
from tomoe.model.far_tokens import far_tokens
from tomoe.model.library_errors import writing
from tomoe.model.loading import load_config, load_tokenizer
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plans import Plan
from tomoe.progress import ProgressCallback, StageCallback, no_progress
from tomoe.report.card import write_card
from tomoe.report.summary import recipe_of, shown_name
from tomoe.version import __version__

FORMAT = "tomoe-export-1"
PROOF_TOKENS = 4096
# Tokens of a sequence from a text file; held-out text comes in sequences of its own length.
CONTEXT = 512
NOT_RUN = "not compared with the converted model, as asked"


@dataclass(frozen=True)
class Exported:
    """What was written, and its proof, if any; adjustable: whether it can be loaded with another number of experts."""

    folder: Path
    choice: ChosenTarget
    sizes: Sizes
    proof: Proof | None
    options: Options
    adjustable: bool


@distributed.locks_out("export")
def export(
    folder: str | Path,
    name: str,
    out: str | Path,
    *,
    text: str | None = None,
    tokens: int = PROOF_TOKENS,
    dtype: str = "float32",
    device: str = "auto",
    options: Options | None = None,
    force: bool = False,
    unverified: bool = False,
    offload: bool = False,
    say: Callable[[str], None] = lambda message: None,
    on_progress: ProgressCallback = no_progress,
) -> Exported:
    """Write a converted model in another form, and verify on real text, and on tokens beyond windows and the original context,
    that both predict the same.

    folder: what `convert` wrote. name: one of `choice.TARGETS`, or auto: the first stock architecture that holds the model,
    else hf. out: the folder to write; with `force` it replaces an earlier export. text: a file or source to verify on
    (default: what the conversion held out), at most `tokens` tokens of it, in `dtype` on `device`. options: width of experts,
    type of GGUF weights. unverified: compare nothing, and say so. offload: to compare, read one layer of each model at a time,
    which then need not fit into memory in `dtype`. say: called with each notice for the user before anything
    is written. Raises UserError, and leaves `out` as it was, if the target cannot hold the model, `out` is taken, the disk is
    too full, there is no text, no xllamacpp for a GGUF file, or if the export predicts otherwise.
    """
    folder, out = Path(folder), Path(out)
    options = options or Options()
    _check_asked(folder, tokens, dtype)
    # on a CPU weights are pages of their files, which the system takes back if need be
    moe = load_moe(folder, None, "cpu" if offload else device)
    tokenizer = load_tokenizer(str(folder))
    proof_text = None if unverified else _proof_text(folder, text, tokens)
    choice = choose_target(moe, name)
    sizes = choice.target.sizes(moe, options)
    if not unverified:
        choice.target.check_verifier()
    check_place(out, folder, sizes.bytes, force)
    for notice in _notices(choice, sizes, moe, basename(folder)):
        say(notice)
    adjustable = choice.target.is_adjustable(moe)
    with writing(f"the export to {out}"), atomic_folder(out, "config.json", REPLACED) as part:
        statistics = choice.target.statistics(folder, options, tokens, device, offload, on_progress)
        choice.target.write(Job(moe, tokenizer, options, _in_megabytes(on_progress), statistics), part)
        proof = None
        if proof_text is not None:
            check = Check(proof_text, dtype, moe.dtype, device, on_progress, far_tokens(moe), offload)
            del moe
            proof = choice.target.verify(folder, part, options, check)
            if proof.problem:
                raise UserError(
                    f"the export would not be the same model: {proof.problem}; nothing was written to {out}"
                )
        exported = Exported(out, choice, sizes, proof, options, adjustable)
        (part / "export.json").write_text(
            json.dumps(_metadata(exported, proof_text), indent=2) + "\n", encoding="utf-8"
        )
    _write_card(exported, folder, proof_text)
    return exported


def _check_asked(folder: Path, tokens: int, dtype: str) -> None:
    dtype_of(dtype)
    if tokens < 16:
        raise UserError(f"tokens is {tokens}, but it should be at least 16")
    if getattr(load_config(str(folder)), "chooses_inputs", False):
        raise UserError(
            f"{folder} uses sparse inputs, and no engine supports sparse inputs",
            Advice("method.name", "to convert the model to an MoE", "carve", here=False),
        )


def _notices(choice: ChosenTarget, sizes: Sizes, moe: ToMoEForCausalLM, name: str) -> Iterator[str]:
    stored = sum(p.nbytes for p in moe.parameters())
    yield f"{choice.target.name}: {choice.reason}."
    yield f"It takes {format_bytes(sizes.bytes)} ({sizes.words}); {name} takes {format_bytes(stored)}."
    if padding := padding_notice(moe, sizes):
        yield padding


def padding_notice(moe: ToMoEForCausalLM, sizes: Sizes) -> str | None:
    """Describe the cost of an export with copies or zeros, in one or two sentences; None without."""
    if sizes.zeros:
        zeros = "one expert of zeros is" if sizes.zeros == 1 else f"up to {sizes.zeros} experts of zeros are"
        return (
            f"Layers differ in how many experts a token uses, but this form has one number: {zeros} always chosen, which takes "
            "space and time; a model that was converted for target = glm4_moe (or gguf) needs none."
        )
    if not sizes.copies:
        return None
    if moe.config.tomoe_num_experts == 1:
        return (
            "Layers differ in width, and this form fills all up to the widest with zeros; `--set target=dense` at conversion "
            "gives them one width."
        )
    dense = sum(p.numel() for p in empty_stock(moe.config.dense_config()).parameters()) * moe.dtype.itemsize
    return (
        f"Experts share neurons, but this form stores a copy for each and pads with zeros: {format_bytes(sizes.bytes)}, while "
        f"the dense model takes {format_bytes(dense)}. It is for loading elsewhere, not for speed; experts.form = fine at "
        "conversion has no copies."
    )


def _in_megabytes(on_progress: ProgressCallback) -> StageCallback:
    return lambda done, total: on_progress("writing (MB)", done // 10**6, max(1, total // 10**6), {})


def _proof_text(folder: Path, text: str | None, tokens: int) -> EvaluationText:
    if text is not None:
        return load_text(text, load_tokenizer(str(folder)), CONTEXT, tokens)
    held_out = held_out_text([str(folder)])
    return replace(held_out, sequences=held_out.sequences.truncate(tokens))


def _metadata(exported: Exported, text: EvaluationText | None) -> dict[str, Any]:
    not_run = {"same": None, "problem": NOT_RUN}
    return {
        "format": FORMAT,
        "target": exported.choice.target.name,
        "reason": exported.choice.reason,
        "bytes": exported.sizes.bytes,
        "layout": exported.sizes.words,
        "options": asdict(exported.options),
        "proof": not_run if exported.proof is None else exported.proof.to_dict(),
        "text": None
        if text is None
        else {
            "name": text.name,
            "sha256": sequences_sha256(text.sequences.input_ids, text.sequences.mask),
            "context_length": text.sequences.input_ids.shape[1],
        },
        "versions": {m.__name__: str(m.__version__) for m in (torch, transformers)} | {"tomoe": __version__},
    }


def _write_card(exported: Exported, folder: Path, text: EvaluationText | None) -> None:
    """Write the card, if the converted folder has the plan that it describes."""
    if not (folder / "plan.json").is_file():
        return
    target = exported.choice.target
    proof = exported.proof
    sentence = f"Not verified: {NOT_RUN}."
    if proof is not None and text is not None:
        sentence = f"It predicts the same: {proof.result}, on {text.name}."
    if proof is not None and target.tried_with:
        versions = ", ".join((*target.tried_with, transformers.__version__))
        sentence += f" Folders of this architecture were loaded with transformers {versions}."
    plan = Plan.load(folder)
    recipe = recipe_of(plan)
    command = (
        f"tomoe convert {shown_name(recipe.model) if recipe else 'MODEL'} --recipe recipe.json -o {basename(folder)}\n"
        f"tomoe export {basename(folder)} --format {target.name} -o {basename(exported.folder)}"
    )
    write_card(
        exported.folder,
        plan,
        read_rows(folder),
        command=command,
        export=(target.name, exported.sizes.words, sentence),
        adjustable=exported.adjustable,
    )
