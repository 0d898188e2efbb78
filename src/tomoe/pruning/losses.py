"""The terms of the objective (eq. all). To add one: write the function, give it a line in `objective`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tomoe.budget import active_params, block_total
from tomoe.model.structure import ModelShape
from tomoe.pruning.mask_network import SampledLayerMasks
from tomoe.recipe.conversion import LossSection

Head = Callable[[Tensor], Tensor]  # hidden states -> logits
CHUNK = 128  # tokens whose logits are alive at a time


def log_ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """f_reg(a, b) = |log a - log b|: zero at equality, scale-free, with a gradient that does not vanish far away."""
    other = torch.as_tensor(b, dtype=a.dtype, device=a.device)
    return (a.clamp_min(1e-3).log() - other.clamp_min(1e-3).log()).abs()


class _ChunkedLoss(torch.autograd.Function):
    """A mean over tokens of a loss on logits, CHUNK tokens at a time.

    The gradient to the hidden states is made on the way forward, so no [T, V] tensor ever exists, in either dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, token_loss: Callable[..., tuple[Tensor, Tensor]], *given: Tensor
    ) -> Tensor:
        total, grads = hidden.new_zeros((), dtype=torch.float32), []
        for chunk in zip(hidden.split(CHUNK), *(g.split(CHUNK) for g in given), strict=True):
            with torch.enable_grad():
                h = chunk[0].detach().requires_grad_()
                logits = head(h)
            loss, grad = token_loss(logits.detach(), *chunk[1:])
            total += loss
            grads.append(torch.autograd.grad(logits, h, grad.to(logits.dtype))[0] / len(hidden))
        ctx.save_for_backward(torch.cat(grads))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_outputs[0].to(grad.dtype), *[None] * (len(ctx.needs_input_grad) - 1))


def distillation_loss(
    student: Float[Tensor, "T D"], teacher: Float[Tensor, "T D"], head: Head, valid: Bool[Tensor, " T"]
) -> Float[Tensor, ""]:
    """KL(teacher || student) in nats, mean over real tokens, float32, from final hidden states.

    d KL / d logits = softmax(student) - softmax(teacher), so the backward pass needs no second softmax.
    """

    def token_loss(logits: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
        log_q = logits.float().log_softmax(-1)
        with torch.no_grad():
            log_p = head(taught).float().log_softmax(-1)
        p = log_p.exp()
        loss = torch.sum(p * log_p.sub_(log_q))
        return loss, log_q.exp_().sub_(p)

    return _ChunkedLoss.apply(student[valid], head, token_loss, teacher[valid])


def language_model_loss(
    student: Float[Tensor, "T D"], targets: Int[Tensor, " T"], head: Head, valid: Bool[Tensor, " T"]
) -> Float[Tensor, ""]:
    """Cross-entropy to the next token (the paper's ablation), mean over tokens that have one."""

    def token_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_q = logits.float().log_softmax(-1)
        loss = -log_q.gather(1, target[:, None]).sum()
        grad = log_q.exp_()
        grad[torch.arange(len(target)), target] -= 1
        return loss, grad

    return _ChunkedLoss.apply(student[valid], head, token_loss, targets[valid])


def fidelity_loss(
    student: Float[Tensor, "T D"],
    teacher: Float[Tensor, "T D"] | None,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    head: Head,
) -> Float[Tensor, ""]:
    """To the teacher's predictions where there is one, else to the next token; from final hidden states."""
    if teacher is not None:
        return distillation_loss(student, teacher, head, mask.flatten())
    targets, valid = shift_targets(ids, mask)
    return language_model_loss(student, targets, head, valid)


def layer_widths(m: SampledLayerMasks, shape: ModelShape) -> tuple[Tensor | int, Tensor | int, Tensor | int]:
    """(MLP width, Q/K dims, V/O dims) of a draw: the maximum over experts and over tokens (eq. pr)."""
    qk: Tensor | int = shape.head_dim if m.qk_mask is None else m.qk_mask.sum()
    if m.value_masks is not None:
        values: Tensor | int = m.value_masks.sum(-1).max()
    else:
        values = shape.head_dim if m.static_values is None else m.static_values.sum()
    return m.neuron_masks.sum(-1).max(), qk, values


def active_fraction(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, ""]:
    """T(d_MoE) / T_total of the sampled masks."""
    return active_params(shape, [layer_widths(m, shape) for m in masks]) / block_total(shape)


def budget_penalty(fractions: Float[Tensor, "*L"], target: float) -> Float[Tensor, ""]:
    """R_P (eq. pr) of the whole model, or the mean over layers of the same for each layer by itself."""
    return log_ratio(fractions, target).mean()


def layer_fractions(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, " L"]:
    """Active share of each layer by itself: where all layers are to be equally wide, each has to meet the budget."""
    whole = block_total(shape) / shape.num_layers
    return torch.stack([active_params(shape, [layer_widths(m, shape)]) / whole for m in masks])


def _union(masks: Float[Tensor, "n m"]) -> Float[Tensor, ""]:
    """Share of dims that some row keeps: mean of 1 - prod(1 - s) (eq. union).

    The product's gradient to a row is the product of the other rows; torch gives it exactly, zeros included.
    """
    return (1 - (1 - masks).prod(0)).mean()


def coverage_penalty(masks: Sequence[SampledLayerMasks]) -> Float[Tensor, ""]:
    """R_U (eqs. union-mlp, ur): unions pushed to 1, MLPs over experts, V/O over tokens; mean over sites that have it."""
    terms = [log_ratio(_union(m.neuron_masks), 1.0) for m in masks]
    terms += [log_ratio(_union(m.value_masks), 1.0) for m in masks if m.value_masks is not None]
    return torch.stack(terms).mean()


@runtime_checkable
class Routed(Protocol):
    """What a layer's router did with the real tokens of a batch."""

    @property
    def assignment(self) -> Float[Tensor, "T N"] | None: ...
    @property
    def route_probs(self) -> Float[Tensor, "T N"] | None: ...


def balance_penalty(masks: Sequence[Routed]) -> Float[Tensor, ""]:
    """R_L (eq. lb) without its factor N: sum_i F_i P_i, at least 1/N; mean over layers."""
    terms = []
    for m in masks:
        assert m.assignment is not None, "the masks have seen no tokens yet"
        assert m.route_probs is not None
        terms.append((m.assignment.detach().mean(0) * m.route_probs.mean(0)).sum())
    return torch.stack(terms).mean()


def objective(
    fidelity: Float[Tensor, ""],
    masks: Sequence[SampledLayerMasks],
    shape: ModelShape,
    target: float,
    weights: LossSection,
    layers_alike: bool = False,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The weighted sum (eq. all) and its parts, unweighted, with the sampled active fraction beside them."""
    fraction = active_fraction(masks, shape)
    terms = {
        "budget": budget_penalty(layer_fractions(masks, shape) if layers_alike else fraction, target),
        "coverage": coverage_penalty(masks),
        "balance": balance_penalty(masks),
    }
    factors = {
        "budget": weights.budget_weight,
        "coverage": weights.coverage_weight,
        "balance": weights.balance_weight,
    }
    # a weight of zero is an ablation: the term is still reported, but gives no gradient
    loss = fidelity + sum(factors[name] * term for name, term in terms.items() if factors[name])
    return loss, {"fidelity": fidelity, **terms, "active_fraction": fraction}


def shift_targets(
    input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]
) -> tuple[Int[Tensor, " T"], Bool[Tensor, " T"]]:
    """Next-token targets, flattened, and which of them exist (the last token and padding have none)."""
    targets = F.pad(input_ids[:, 1:], (0, 1))
    valid = mask & F.pad(mask[:, 1:], (0, 1))
    return targets.flatten(), valid.flatten()
