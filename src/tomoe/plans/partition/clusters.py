"""Clusters of tokens, and clusters of neurons of equal size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

CLUSTER_STEPS, KMEANS_STEPS = 8, 20


def balanced_assignment(scores: Float[Tensor, "n N"], size: int | Sequence[int]) -> Int[Tensor, " n"]:
    """Assign each row to a column of high score, `size` rows per column (one number, or one each); rows with the most to lose go
    first."""
    best = scores.topk(min(2, scores.shape[1]), dim=1).values
    order = (best[:, 0] - best[:, -1]).argsort(descending=True, stable=True)
    # on the CPU, in numpy: row by row a GPU would be waited for
    left = scores[order].cpu().numpy()
    assigned = left.argmax(1)
    free = [size] * left.shape[1] if isinstance(size, int) else list(size)
    for i, column in enumerate(assigned):
        free[column] -= 1
        if not free[column]:
            # the rows that still want it take the best of the others
            left[i + 1 :, column] = -np.inf
            again = i + 1 + np.flatnonzero(assigned[i + 1 :] == column)
            assigned[again] = left[again].argmax(1)
    return torch.empty_like(order).index_copy_(0, order, torch.from_numpy(assigned).to(order.device))


def optimal_assignment(scores: Float[Tensor, "n N"], size: int) -> Int[Tensor, " n"]:
    """Assign each row to a column, at most `size` rows per column, with the largest sum of scores.

    Row after row joins, along the moves of rows from column to column that lose least. For few columns this takes the memory of
    the scores, where a general solver of assignments copies each column `size` times.
    """
    cost = -scores.double().cpu().numpy()
    n, num_columns = cost.shape
    columns, close = np.arange(num_columns), 1e-12 * max(1.0, float(np.abs(cost).max()))
    assigned, free = np.full(n, -1), np.full(num_columns, size)
    # what moving a row from one column to another adds at least, and which row that is
    added = np.full((num_columns, num_columns), np.inf)
    mover = np.zeros((num_columns, num_columns), dtype=int)
    for i in range(n):
        distance, before = cost[i].copy(), np.full(num_columns, -1)
        while not free[distance.argmin()]:
            through = distance[:, None] + added
            nearest = through.argmin(0)
            closer = through[nearest, columns] < distance - close
            if not closer.any():
                break
            distance[closer], before[closer] = through[nearest, columns][closer], nearest[closer]
        column = int(np.where(free > 0, distance, np.inf).argmin())
        free[column] -= 1
        changed = [column]
        while before[column] >= 0:
            assigned[mover[before[column], column]] = column
            column = int(before[column])
            changed.append(column)
        assigned[i] = column
        for column in changed:
            rows = np.flatnonzero(assigned == column)
            moves = cost[rows] - cost[rows, column, None]
            mover[column] = rows[moves.argmin(0)]
            added[column] = moves.min(0)
    return torch.from_numpy(assigned).to(scores.device)


def balanced_clusters(x: Float[Tensor, "n t"], num_clusters: int, seed: int) -> Int[Tensor, " n"]:
    """Cluster rows by cosine (around their mean) into clusters of equal size."""
    x = F.normalize(x - x.mean(0), dim=1)
    generator = torch.Generator(x.device).manual_seed(seed)
    centroids = x[torch.randperm(len(x), generator=generator, device=x.device)[:num_clusters]]
    for _ in range(CLUSTER_STEPS):
        assigned = balanced_assignment(x @ centroids.T, len(x) // num_clusters)
        centroids = F.normalize(F.one_hot(assigned, num_clusters).T.to(x.dtype) @ x, dim=1)
    return assigned


def spherical_kmeans(x: Float[Tensor, "T D"], num_clusters: int, seed: int) -> Float[Tensor, "N D"]:
    """Cluster by cosine from a k-means++ start; returns unit centroids. A cluster without tokens keeps its centroid."""
    generator = torch.Generator(x.device).manual_seed(seed)
    x = F.normalize(x.float(), dim=-1)
    centroids = x[torch.randint(len(x), (1,), generator=generator, device=x.device)]
    while len(centroids) < num_clusters:
        distance = (1 - x @ centroids.T).amin(1).clamp_min(1e-9)
        centroids = torch.cat([centroids, x[torch.multinomial(distance, 1, generator=generator)]])
    for _ in range(KMEANS_STEPS):
        members = F.one_hot((x @ centroids.T).argmax(-1), num_clusters).to(x.dtype)
        sums = members.T @ x
        centroids = torch.where(members.sum(0)[:, None] > 0, F.normalize(sums, dim=-1), centroids)
    return centroids
