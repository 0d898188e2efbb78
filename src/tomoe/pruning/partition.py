"""The learned partition of fine-grained experts: which neurons form an expert, learned from the carve's answer on.

Every neuron has one logit per expert. Sinkhorn's iteration makes a soft assignment of them whose rows add up to 1 and whose
columns to the size of an expert; rounded to whole neurons it is what the masks use, with the gradient of the soft one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.pruning.fine_carving import balanced_assignment

SHARED = -1
"""Number of the expert of neurons that every token uses."""
HEAD_START = 0.2
"""How much the logit of the carve's expert is above the others before anything is learned."""
TEMPERATURE = 0.1
"""Of the soft assignment."""
SINKHORN_STEPS = 4


def sinkhorn(logits: Float[Tensor, "n N"], size: int) -> Float[Tensor, "n N"]:
    """Return the log of the soft assignment: rows add up to 1, columns (nearly, after a fixed number of steps) to `size`."""
    for _ in range(SINKHORN_STEPS):
        logits = logits - logits.logsumexp(0) + math.log(size)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits


def partition(
    carved: Int[Tensor, " F"], learned: Float[Tensor, "F N"]
) -> tuple[Int[Tensor, " F"], Float[Tensor, "N F"]]:
    """Return the expert of every neuron, or SHARED, and the soft assignment (zero for shared neurons).

    `learned` is added to logits that say what the carve said: where it is zero, the partition is the carve's. All experts
    have the same size, and shared neurons stay shared.
    """
    routed = (carved != SHARED).nonzero().squeeze(1)
    n = learned.shape[1]
    size = len(routed) // n
    start = HEAD_START * F.one_hot(carved[routed], n)
    log_soft = sinkhorn((start + learned[routed]) / TEMPERATURE, size)
    expert = carved.index_copy(0, routed, balanced_assignment(log_soft.detach(), size))
    return expert, torch.zeros_like(learned).index_copy(0, routed, log_soft.exp()).T
