"""Models compared, the dense one first: measured by the same code on the same sequences."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.data.corpus import Corpus, Sequences, joined
from tomoe.data.evaluation_text import EvaluationText
from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.perplexity import Predictions, measure, sliding
from tomoe.evaluation.results import Row, TaskScore
from tomoe.evaluation.tasks import TaskSet
from tomoe.evaluation.usage import ExpertCounter
from tomoe.files import basename
from tomoe.model.loading import load_tokenizer
from tomoe.moe.active_experts import is_fine
from tomoe.progress import ProgressCallback, no_progress, stage_callback


def compare(
    names: Sequence[str],
    models: Iterable[PreTrainedModel],
    text: EvaluationText,
    on_progress: ProgressCallback = no_progress,
    tasks: TaskSet | None = None,
) -> Iterator[Row]:
    """Measure models on the same text, one row after the other; the first, dense one, which runs once, is the reference of all
    others. `models` may load lazily: besides the reference only one is alive at a time. A name that is a path shows as its last
    part, or as many parts as are unique. Several processes divide the sequences; tasks run in process 0 alone. Raises UserError
    as `measure`."""
    shown = titles(names)
    input_ids, mask = text.sequences.input_ids, text.sequences.mask
    if text.stride is not None:
        input_ids, mask = sliding(input_ids[mask], input_ids.shape[1], text.stride)
    reference = None
    loaded = iter(models)
    for model_name in names:
        model = next(loaded)
        path = Path(model_name)
        name = shown[model_name]
        config: Any = model.config
        # the most fine-grained experts of a token in any layer
        number = getattr(config, config.top_k_key) if is_fine(config) else None
        if number is not None and number != config.planned_top_k:
            # else rows of one folder had one name
            name += f", {number} of {config.tomoe_num_experts} experts"
        if getattr(config, "tomoe_prompts", None) == "whole":
            # long passes, as those of an evaluation, are the dense model's
            name += ", whole prompts"
        counter = ExpertCounter(model)
        predictions = Predictions(model, keep=reference is None)
        with counter.watching():
            measured = measure(
                predictions,
                input_ids,
                mask,
                reference,
                stage_callback(on_progress, f"evaluating {name}"),
                counter=counter,
                stride=text.stride,
                name=name,
                data=text.name,
                seed=text.seed,
            )
            usage = counter.usage()
            scores = _scores(model_name, model, tasks, on_progress)
        facts = model_facts(model, path if path.exists() else None)
        overlap = training_overlap(model_name, text.sequences)
        yield Row(measured, facts, usage, overlap, scores, number)
        reference = reference or predictions
        del model, predictions, counter  # before the next one is loaded


def titles(names: Sequence[str]) -> dict[str, str]:
    """Name models for a table: by hub id or known name; folders and files by as many last parts of their paths as are unique."""
    paths = {name: Path(os.path.abspath(name)).parts for name in names if Path(name).exists()}
    shown = dict(zip(names, names, strict=True)) | {name: basename(name) for name in paths}
    for length in range(2, max(map(len, paths.values()), default=0) + 1):
        alike = Counter(shown.values())
        shown |= {name: os.path.join(*parts[-length:]) for name, parts in paths.items() if alike[shown[name]] > 1}
    return shown


def _scores(
    name: str, model: PreTrainedModel, tasks: TaskSet | None, on_progress: ProgressCallback
) -> tuple[TaskScore, ...]:
    if tasks is None or distributed.rank():
        return ()
    title = basename(name)
    return tasks.run(model, load_tokenizer(name), lambda task, *progress: on_progress(f"{task} of {title}", *progress))


def training_overlap(name: str, text: Sequences) -> float | None:
    """Share of the text's tokens that occur in the text that a converted folder was fitted on and kept; None without one."""
    corpora = kept_corpora(Path(name))
    if not corpora:
        return None
    fitted = [part for corpus in corpora for part in (corpus.train, corpus.calibration)]
    return shared_share(text, joined(fitted))


NGRAM = 13  # tokens in a row that are no chance; as in the decontamination of GPT-3 (Brown et al. 2020, appendix C)


def kept_corpora(folder: Path) -> list[Corpus]:
    """Return the text that a converted folder kept; for a fine-tuned one, the conversion's too. Raises UserError if damaged."""
    return [Corpus.load(path) for path in sorted((folder / "run").glob("*corpus.safetensors"))]


def shared_share(text: Sequences, fitted: Sequences, ngram: int = NGRAM) -> float:
    """Share of the real tokens of `text` in a run of `ngram` tokens that also occurs in `fitted`."""
    return int(shared_tokens(text, fitted, ngram).sum()) / max(text.tokens, 1)


def shared_tokens(text: Sequences, fitted: Sequences, ngram: int = NGRAM) -> Bool[Tensor, "B S"]:
    """Mark the real tokens of `text` in a run of `ngram` tokens, within a sequence, that also occurs in `fitted`. Nothing is
    hashed, so there are no false matches: runs of 2, 4, 8, ... tokens are numbered in turn, equal runs alike (prefix doubling),
    by one sort of all windows each."""
    covered = torch.zeros_like(text.mask, device="cpu")
    if min(text.input_ids.shape[1], fitted.input_ids.shape[1]) < ngram:
        return covered
    numbers = [sequences.input_ids.long().cpu() for sequences in (text, fitted)]
    width = 1
    while width < ngram:
        step = min(width, ngram - width)
        highest = max(int(ids.max()) for ids in numbers) + 1
        pairs = [ids[:, : ids.shape[1] - step] * highest + ids[:, step:] for ids in numbers]
        renumbered = torch.cat([pair.flatten() for pair in pairs]).unique(return_inverse=True)[1]
        parts = renumbered.split([pair.numel() for pair in pairs])
        numbers = [part.view_as(pair) for part, pair in zip(parts, pairs, strict=True)]
        width += step
    real = [sequences.mask.cpu().unfold(1, ngram, 1).all(2) for sequences in (text, fitted)]
    shared = torch.isin(numbers[0], numbers[1][real[1]]) & real[0]
    for offset in range(ngram):
        covered[:, offset : offset + shared.shape[1]] |= shared
    return covered
