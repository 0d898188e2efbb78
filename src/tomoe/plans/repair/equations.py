"""Refit one matrix in closed form: weighted least squares with a ridge, of full or low rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.model.compute_dtype import rounded_products

BLOCK = 512  # inputs; of a Gram matrix only the upper blocks are computed
MOST_RAISES = 6  # of the ridge, tenfold each
LEAST_RIDGE = 1e-6  # what a ridge of zero is raised to first

Matrix = Float[Tensor, "D n"]


@dataclass(frozen=True)
class Refit:
    """One refitted matrix and what it gained on the calibration tokens."""

    weight: Matrix  # float32, in place of the dense one
    factors: tuple[Float[Tensor, "D r"], Float[Tensor, "r n"]] | None  # their product is the change; None: full rank
    error_before: float  # mean over tokens of |gap|^2 / |residual|^2, with the dense matrix
    error_after: float
    ridge: float  # the one that was used


class NormalEquations:
    """Sums over tokens that determine the refitted matrix; t tokens, n inputs, D outputs.

    G = sum w h h^T, C = sum w g h^T, and the weighted squared gap itself.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device):
        # G, the blocks from the diagonal on: half of the products would only repeat the others
        self.upper: Float[Tensor, "n n"] = torch.zeros(inputs, inputs, device=device)
        self.cross: Matrix = torch.zeros(outputs, inputs, device=device)
        self.sums: Float[Tensor, 2] = torch.zeros(2, dtype=torch.float64, device=device)  # weighted |gap|^2, tokens

    def add(self, h_tn: Float[Tensor, "t n"], gap_tD: Float[Tensor, "t D"], residual_tD: Float[Tensor, "t D"]) -> None:
        """Add tokens; `residual_tD` is the stream that the output is added to. Sums are float32, whatever `h_tn` is."""
        dtype = h_tn.dtype
        root_t1 = _root_of_weight(residual_tD)
        h_tn = h_tn * root_t1
        gap_tD = gap_tD * root_t1
        with rounded_products(dtype):
            for a in range(0, len(self.upper), BLOCK):
                self.upper[a : a + BLOCK, a:].addmm_(h_tn[:, a : a + BLOCK].T, h_tn[:, a:])
            self.cross.addmm_(gap_tD.T, h_tn)
        self.sums += torch.stack([gap_tD.square().sum(dtype=torch.float64), root_t1.new_tensor(len(h_tn)).double()])

    @property
    def gram(self) -> Float[Tensor, "n n"]:
        """The full G: the lower triangle is copied from the upper."""
        for a in range(0, len(self.upper), BLOCK):
            block = self.upper[a : a + BLOCK, a : a + BLOCK]
            right = self.upper[a : a + BLOCK, a + BLOCK :]
            # some processors sum the two halves of a product h^T h in different orders
            block.copy_(block.triu() + block.triu(1).T)
            self.upper[a + BLOCK :, a : a + BLOCK] = right.T
        return self.upper

    def error(self, change: Matrix | None = None) -> float:
        """Mean of |h Delta^T - g|^2 / |residual|^2 over all tokens; None: without a change."""
        total, count = self.sums.tolist()
        if change is not None:
            total += float(((change @ self.gram - 2 * self.cross) * change).sum(dtype=torch.float64))
        return total / max(count, 1.0)

    def solved(self, ridge: float) -> tuple[Matrix, float]:
        """Return the change of the matrix and the ridge used. Raises UserError as `solve`."""
        return solve(self.gram, self.cross, ridge)


class FewTokens:
    """The same problem for fewer tokens than inputs: keeps their weighted rows H [T, n] and gaps [T, D] and solves Delta = gaps^T
    (H H^T + ridge mean(diag G) 1)^-1 H, without an n x n matrix."""

    def __init__(self, inputs: int, outputs: int, tokens: int, device: torch.device):
        self.rows: Float[Tensor, "T n"] = torch.empty(tokens, inputs, device=device)
        self.gaps: Float[Tensor, "T D"] = torch.empty(tokens, outputs, device=device)
        self.count = 0

    def add(self, h_tn: Float[Tensor, "t n"], gap_tD: Float[Tensor, "t D"], residual_tD: Float[Tensor, "t D"]) -> None:
        """Add tokens, as `NormalEquations.add`; there are `tokens` in total."""
        root_t1 = _root_of_weight(residual_tD)
        new = slice(self.count, self.count + len(h_tn))
        self.rows[new], self.gaps[new] = h_tn * root_t1, gap_tD * root_t1
        self.count += len(h_tn)

    def error(self, change: Matrix | None = None) -> float:
        """Mean of |h Delta^T - g|^2 / |residual|^2 over all tokens; None: without a change."""
        off = self.gaps if change is None else self.rows @ change.T - self.gaps
        return float(off.square().sum(dtype=torch.float64)) / max(self.count, 1)

    def solved(self, ridge: float) -> tuple[Matrix, float]:
        """Return the change of the matrix and the ridge used, never 0, because G is singular. Raises UserError as `solve`."""
        factors, ridge = solve(self.rows @ self.rows.T, self.gaps.T, max(ridge, LEAST_RIDGE), inputs=self.rows.shape[1])
        return factors @ self.rows, ridge


def keeps_tokens(tokens: int, inputs: int, rank: int) -> bool:
    """Whether a matrix is refitted from the rows of its tokens: they are smaller than the Gram matrix, and in one process."""
    return 2 * tokens <= inputs and not rank and distributed.world_size() == 1


def equation_operations(inputs: int, outputs: int, tokens: int, rank: int) -> tuple[float, float]:
    """Count operations of one matrix's equations and their solution, in float32 and in float64."""
    both = 2 * inputs * outputs
    if keeps_tokens(tokens, inputs, rank):
        return 2 * tokens**2 * inputs + 2 * tokens * both, tokens**3 / 3 + 2 * tokens**2 * outputs
    # half of the Gram matrix, the other side, the error of the change
    plain = tokens * (inputs**2 + both) + inputs * both
    return plain, inputs**3 / 3 + inputs * both


def _root_of_weight(residual_tD: Float[Tensor, "t D"]) -> Float[Tensor, "t 1"]:
    """Errors count relative to the stream, because a norm divides by its length before it is read."""
    return residual_tD.float().square().sum(-1, keepdim=True).clamp_min(1e-6).rsqrt()


def solve(gram: Float[Tensor, "n n"], cross: Matrix, ridge: float, inputs: int | None = None) -> tuple[Matrix, float]:
    """Return Delta = C (G + ridge mean(diag G) 1)^-1 and the ridge used, ten times larger while the matrix is not positive
    definite. `inputs`: numbers that the trace is averaged over, if not n. Raises UserError for sums that are not finite, or if no
    ridge helps."""
    scale = float(gram.diagonal().double().sum()) / (inputs or len(gram))
    if not (math.isfinite(scale) and bool(gram.isfinite().all()) and bool(cross.isfinite().all())):
        raise UserError(
            "the activations of the calibration text are not finite numbers, so nothing can be refitted to them; load the "
            "model in float32 or bfloat16"
        )
    if scale == 0:  # every input is masked for every token
        return torch.zeros_like(cross), ridge
    for _ in range(MOST_RAISES):
        regular = gram.double()
        regular.diagonal().add_(ridge * scale)
        factor, failed = torch.linalg.cholesky_ex(regular)
        if not failed:
            change = torch.cholesky_solve(cross.double().T, factor).T.float()
            if bool(change.isfinite().all()):
                return change, ridge
        ridge = max(10 * ridge, LEAST_RIDGE)
    raise UserError(
        f"the Gram matrix of the calibration text is not positive definite even with a ridge of {ridge:g}; give more text"
    )


def low_rank(
    change: Matrix, gram: Float[Tensor, "n n"], rank: int
) -> tuple[Float[Tensor, "D r"], Float[Tensor, "r n"]]:
    """Return U, V with U V nearest to the change Delta in the metric of G: least tr (Delta - U V) G (Delta - U V)^T.

    These are the first `rank` terms of the singular value decomposition of Delta G^(1/2): U holds the eigenvectors of
    Delta G Delta^T with the largest eigenvalues, V = U^T Delta. With the regularised G that Delta was solved with, U V is the
    solution of the whole problem among changes of that rank, because Delta is its minimum and G its curvature.
    """
    wide = change.double()
    _, vectors = torch.linalg.eigh(wide @ gram.double() @ wide.T)
    left = vectors[:, -min(rank, *change.shape) :].flip(1)
    return left.float(), (left.T @ wide).float()


def refit(weight: Matrix, sums: NormalEquations | FewTokens, ridge: float, rank: int = 0) -> Refit:
    """Solve the normal equations for the matrix; low rank only from sums over tokens. Raises UserError as `solve`."""
    change, ridge = sums.solved(ridge)
    factors = None
    if rank:
        assert isinstance(sums, NormalEquations)
        metric = sums.gram.clone()
        metric.diagonal().add_(ridge * metric.diagonal().mean())
        factors = low_rank(change, metric, rank)
        change = factors[0] @ factors[1]
    return Refit(weight.float() + change, factors, sums.error(), sums.error(change), ridge)
