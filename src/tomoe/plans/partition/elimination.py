"""Which neurons the output of an MLP needs least: the error of dropping some, and an order to drop them in."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.model.shape import ModelShape
from tomoe.plans.partition.experts import FLOAT32

ROWS = 1024  # of a matrix of all neurons that are compared at once


def error_matrix(
    h: Float[Tensor, "T F"], weight: Float[Tensor, " T"], down_gram: Float[Tensor, "F F"], tokens: int
) -> Float[Tensor, "F F"]:
    """Return E such that s^T E s is the squared error of dropping the neurons s (0/1), summed over T tokens with their weights,
    divided by `tokens`; `down_gram` is down^T down. Its diagonal is the error of dropping one neuron alone."""
    h = h * weight.sqrt()[:, None]
    # in place: with 11,008 neurons such a matrix takes half a GB
    return (h.T @ h).mul_(down_gram).div_(tokens)


def backward_elimination(error: Float[Tensor, "F F"]) -> tuple[Int[Tensor, " F"], Float[Tensor, " F1"]]:
    """Order dims whose joint loss is the quadratic form s^T `error` s of the dropped set s, always dropping the cheapest.

    Returns ranks (0 is dropped last) and the loss with 0, 1, .. F dims kept.
    """
    size = len(error)
    marginal = error.diagonal().clone()
    ranks = torch.zeros(size, dtype=torch.long, device=error.device)
    loss = error.new_zeros(size + 1)
    for kept in range(size - 1, -1, -1):
        # An index of one number; a GPU would have to be waited for to know the number itself.
        dropped = marginal.argmin().view(1)
        ranks.index_fill_(0, dropped, kept)
        loss[kept] = marginal.index_select(0, dropped)[0]
        marginal.add_(error.index_select(0, dropped)[0], alpha=2)
        marginal.index_fill_(0, dropped, torch.inf)
    return ranks, loss.flip(0).cumsum(0).flip(0)


def ranked_by_energy(error: Float[Tensor, "F F"]) -> tuple[Int[Tensor, " F"], Float[Tensor, " F1"]]:
    """Order dims by the loss of each alone; the returned losses are those of all dropped dims together."""
    ranks = error.diagonal().argsort(descending=True, stable=True).argsort()
    # what a dim adds to the loss of those that went before it; some rows at a time, as the matrix may take half a GB
    pieces = zip(error.split(ROWS), ranks.split(ROWS), strict=True)
    joint = torch.cat([(rows * (ranks > own[:, None])).sum(1) for rows, own in pieces])
    added = torch.empty_like(joint).index_copy_(0, ranks, error.diagonal() + 2 * joint)
    loss = torch.cat([added, added.new_zeros(1)]).flip(0).cumsum(0).flip(0)
    return ranks, loss


def elimination_operations(shape: ModelShape, tokens: int) -> float:
    """Count operations of two Gram matrices of one layer's neurons, and of their elimination."""
    return 2 * shape.mlp_size**2 * (tokens + shape.hidden_size + shape.mlp_size)


def elimination_bytes(shape: ModelShape, num_experts: int, dtype: torch.dtype, tokens: int) -> int:
    """Count the bytes that ranking one layer's neurons, for each of several experts, holds for so many calibration tokens with
    activations of `dtype`."""
    own, hidden, size = dtype.itemsize, shape.hidden_size, shape.mlp_size
    # the layer's input, the input and output of the MLP; before it is carved, three matrices of activations
    rest, running = 3 * hidden * own, 3 * size * own
    # activations; inputs in float32 and of unit length, activations in float32, and those of one expert's tokens twice
    held = size * own + (FLOAT32 * (hidden + size) if own < FLOAT32 else 0)
    held += FLOAT32 * (hidden + 2 * size // num_experts)
    # two Gram matrices
    return tokens * rest + max(tokens * running, tokens * held + 2 * FLOAT32 * size**2)
