"""The text of fine-tuning: text that the conversion was not fitted to comes first.

A repair fits its text closely: SmolLM2-135M at 50%, repaired on 32,768 tokens, has a KL of 0.51 on them and of 1.13 on
others. Gradients on such text have little left to correct, and what they correct is not what other text needs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.data.corpus import Corpus, Sequences, evaluation_part, joined, prepare_corpus
from tomoe.errors import Advice, UserError
from tomoe.evaluation.compare import kept_corpora, shared_tokens
from tomoe.plans import FINETUNED, REPAIRED, AnyPlan
from tomoe.progress import ProgressCallback, stage_callback
from tomoe.recipe.finetuning import FinetuneRecipe


def finetuning_text(
    recipe: FinetuneRecipe,
    converted: Path,
    plan: AnyPlan,
    tokenizer: PreTrainedTokenizerBase,
    dense: PreTrainedModel | None,
    on_progress: ProgressCallback,
) -> Corpus:
    """Read the text that the recipe names, else what the conversion kept; of either, unfitted text if there is enough.

    What the recipe's sources hold out can be text that the conversion was fitted to, if that held out fewer tokens; it would make
    the model before fine-tuning look better than it is. Such sequences are left out, unless there are no others.

    As many tokens are read beyond `data.tokens` as the conversion was fitted to, so that the same files can be named again.
    Raises UserError if there is no text.
    """
    fitted, read = fitted_text(converted, plan), stage_callback(on_progress, "text")
    if recipe.data.sources:
        extra = 0 if fitted is None else fitted.tokens
        longer = recipe.data.model_copy(update={"tokens": recipe.data.tokens + extra})
        corpus = prepare_corpus(longer, tokenizer, recipe.seed, dense, read)
        # the sources may be too short for that
        if extra and corpus.tokens_of_sources < longer.tokens:
            corpus = prepare_corpus(recipe.data, tokenizer, recipe.seed, dense, read)
        size = recipe.data.tokens - (corpus.tokens_of_sources - corpus.train.tokens)
    else:
        kept = converted / "run" / "corpus.safetensors"
        if not kept.is_file():
            raise UserError(
                f"{converted} keeps no text (run/corpus.safetensors)", Advice("data.sources", "to name some", "FILE")
            )
        corpus = Corpus.load(kept)
        size = corpus.train.tokens
        name, evaluation = evaluation_part(recipe.data, tokenizer)
        if evaluation is not None:
            corpus = replace(corpus, evaluation=evaluation, evaluation_name=name)
    if fitted is None:
        return corpus
    train = recipe.train
    sequences = train.steps * train.batch_size * train.gradient_accumulation_steps
    evaluation = corpus.evaluation
    if corpus.evaluation_name is None:
        evaluation = unfitted_first(evaluation, fitted, evaluation.tokens, 0)
    return replace(corpus, train=unfitted_first(corpus.train, fitted, size, sequences), evaluation=evaluation)


def fitted_text(converted: Path, plan: AnyPlan) -> Sequences | None:
    """Return the text that a converted folder with this plan was fitted to: all that it kept, or for a conversion without
    training steps only what it was carved from and repaired on; None if it kept none."""
    corpora = kept_corpora(converted)
    if not corpora:
        return None
    parts = [part for corpus in corpora for part in (corpus.calibration, corpus.train)]
    if FINETUNED not in plan.notes and not plan.notes.get("steps"):
        repaired_on = plan.notes.get(REPAIRED, {}).get("tokens", 0)
        parts[1:] = [parts[1].truncate(repaired_on)] if repaired_on else []
    return joined(parts)


def unfitted_first(train: Sequences, fitted: Sequences, tokens: int, read: int) -> Sequences:
    """Select at most `tokens` of the sequences of `train` that are not in `fitted`.

    If a run that reads `read` sequences would read those twice, sequences that are in `fitted` follow, up to as many. If all
    are in it, all stay.
    """
    is_fitted = 2 * shared_tokens(train, fitted).sum(1) > train.mask.sum(1)
    unfitted = (~is_fitted).nonzero().flatten()
    if not len(unfitted):
        return train.truncate(tokens)
    order = torch.cat([unfitted, is_fitted.nonzero().flatten()])
    return train.select(order[: max(len(unfitted), read)]).truncate(tokens)
