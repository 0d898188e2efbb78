"""Finds how much of an evaluation text stands, token by token, in the text that a model was fitted on."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Bool
from torch import Tensor

from tomoe.data.corpus import Corpus, Sequences

NGRAM = 13  # tokens in a row that are no chance; as in the decontamination of GPT-3 (Brown et al. 2020, appendix C)


def kept_corpora(folder: Path) -> list[Corpus]:
    """The text that a converted folder kept; of a fine-tuned one, the conversion's too. Raises UserError if damaged."""
    return [Corpus.load(path) for path in sorted((folder / "run").glob("*corpus.safetensors"))]


def shared_share(text: Sequences, fitted: Sequences, ngram: int = NGRAM) -> float:
    """Share of the real tokens of `text` that lie in a run of `ngram` tokens which `fitted` holds too."""
    return int(shared_tokens(text, fitted, ngram).sum()) / max(text.tokens, 1)


def shared_tokens(text: Sequences, fitted: Sequences, ngram: int = NGRAM) -> Bool[Tensor, "B S"]:
    """True on real tokens of `text` that lie in a run of `ngram` tokens, within a sequence, which `fitted` holds too. Nothing
    is hashed, so there are no false matches: runs of 2, 4, 8, ... tokens are numbered in turn, equal runs alike (prefix
    doubling), by one sort of all windows each."""
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
