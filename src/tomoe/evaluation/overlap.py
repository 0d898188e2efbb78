"""Does the text that a model is measured on stand in the text that it was fitted on? Exact, on tokens."""

from __future__ import annotations

import torch

from tomoe.data.corpus import Blocks

NGRAM = 13  # tokens in a row that are no chance; as in the decontamination of GPT-3 (Brown et al. 2020, appendix C)


def shared_share(text: Blocks, fitted: Blocks, ngram: int = NGRAM) -> float:
    """Share of the real tokens of `text` that lie in a run of `ngram` tokens which `fitted` holds too.

    Runs end where a block ends. Nothing is hashed, so there are no false matches: runs of 2, 4, 8, ... tokens are
    numbered in turn, equal runs alike (prefix doubling), which takes one sort of all windows for each doubling.
    0 where blocks are shorter than `ngram`.
    """
    if min(text.input_ids.shape[1], fitted.input_ids.shape[1]) < ngram:
        return 0.0
    numbers, width = [blocks.input_ids.long().cpu() for blocks in (text, fitted)], 1
    while width < ngram:
        step = min(width, ngram - width)
        highest = max(int(own.max()) for own in numbers) + 1
        pairs = [own[:, : own.shape[1] - step] * highest + own[:, step:] for own in numbers]
        again = torch.cat([own.flatten() for own in pairs]).unique(return_inverse=True)[1]
        parts = again.split([own.numel() for own in pairs])
        numbers = [part.view_as(own) for part, own in zip(parts, pairs, strict=True)]
        width += step
    whole = [blocks.mask.cpu().unfold(1, ngram, 1).all(2) for blocks in (text, fitted)]
    found = torch.isin(numbers[0], numbers[1][whole[1]]) & whole[0]
    covered = torch.zeros_like(text.mask, device="cpu")
    for offset in range(ngram):
        covered[:, offset : offset + found.shape[1]] |= found
    return int(covered.sum()) / max(text.tokens, 1)
