"""The terms of the objective (Eq. 10, Sec. 3.5). To add one, write the function and give it a line in `objective`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tomoe.budget import active_params, decoder_params, layer_params
from tomoe.model.shape import ModelShape
from tomoe.pruning.mask_network import SampledLayerMasks
from tomoe.pruning.routing import Routing

Head = Callable[[Tensor], Tensor]
"""Hidden states -> logits."""
CHUNK = 128
"""Tokens whose logits are in memory at a time."""


def log_ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """Return f_reg(a, b) = |log a - log b| (Sec. 3.4, no number): zero at equality, scale-free, steep also far away."""
    other = torch.as_tensor(b, dtype=a.dtype, device=a.device)
    return (a.clamp_min(1e-3).log() - other.clamp_min(1e-3).log()).abs()


class _ChunkedLoss(torch.autograd.Function):
    """The mean over tokens of a loss on logits, CHUNK tokens at a time.

    The gradient of the hidden states is computed in the forward pass, so no [T, V] tensor ever exists, in any dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, token_loss: Callable[..., tuple[Tensor, Tensor]], *per_token: Tensor
    ) -> Tensor:
        total, grads = hidden.new_zeros((), dtype=torch.float32), []
        for chunk in zip(hidden.split(CHUNK), *(t.split(CHUNK) for t in per_token), strict=True):
            with torch.enable_grad():
                h = chunk[0].detach().requires_grad_()
                logits = head(h)
            loss, grad = token_loss(logits.detach(), *chunk[1:])
            total += loss
            if ctx.needs_input_grad[0]:
                grads.append(torch.autograd.grad(logits, h, grad.to(logits.dtype))[0] / len(hidden))
        if grads:
            ctx.save_for_backward(torch.cat(grads))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_outputs[0].to(grad.dtype), *[None] * (len(ctx.needs_input_grad) - 1))


def kl_loss(
    student: Float[Tensor, "T D"], teacher: Float[Tensor, "T D"], head: Head, valid: Bool[Tensor, " T"]
) -> Float[Tensor, ""]:
    """Return KL(teacher || student) in nats, the mean over valid tokens, in float32, from final hidden states (App. B.1).

    d KL / d logits = softmax(student) - softmax(teacher), so the backward pass needs no second softmax.
    """

    def token_loss(logits: Tensor, teacher_states: Tensor) -> tuple[Tensor, Tensor]:
        log_q = logits.float().log_softmax(-1)
        with torch.no_grad():
            log_p = head(teacher_states).float().log_softmax(-1)
        p = log_p.exp()
        loss = torch.sum(p * log_p.sub_(log_q))
        return loss, log_q.exp_().sub_(p)

    return _ChunkedLoss.apply(student[valid], head, token_loss, teacher[valid])


def language_model_loss(
    student: Float[Tensor, "T D"], targets: Int[Tensor, " T"], head: Head, valid: Bool[Tensor, " T"]
) -> Float[Tensor, ""]:
    """Return the cross-entropy to the next token in nats (the paper's ablation), the mean over tokens that have one."""

    def token_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_q = logits.float().log_softmax(-1)
        loss = -log_q.gather(1, target[:, None]).sum()
        grad = log_q.exp_()
        grad[torch.arange(len(target)), target] -= 1
        return loss, grad

    return _ChunkedLoss.apply(student[valid], head, token_loss, targets[valid])


def distill_loss(
    student: Float[Tensor, "T D"],
    teacher: Float[Tensor, "T D"] | None,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    head: Head,
) -> Float[Tensor, ""]:
    """Return the KL to the teacher's predictions, or without a teacher the cross-entropy to the next token."""
    if teacher is not None:
        return kl_loss(student, teacher, head, mask.flatten())
    targets, valid = shift_targets(ids, mask)
    return language_model_loss(student, targets, head, valid)


def layer_widths(masks: SampledLayerMasks, shape: ModelShape) -> tuple[Tensor | int, Tensor | int, Tensor | int]:
    """Return (MLP width, Q/K dims, V/O dims) of sampled masks: the maximum over experts and over tokens (Eq. 8)."""
    qk: Tensor | int = shape.head_dim if masks.qk_mask is None else masks.qk_mask.sum()
    if masks.value_masks is not None:
        values: Tensor | int = masks.value_masks.sum(-1).max()
    else:
        values = shape.head_dim if masks.static_values is None else masks.static_values.sum()
    return masks.experts.width, qk, values


def active_fraction(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, ""]:
    """Return T(d_MoE) / T_total of sampled masks (Eq. 8, Sec. 3.4)."""
    return active_params(shape, [layer_widths(m, shape) for m in masks]) / decoder_params(shape)


def budget_penalty(fractions: Float[Tensor, "*L"], target: float) -> Float[Tensor, ""]:
    """Return R_P (Eq. 8, Sec. 3.4) of the whole model, or of several layers the mean of R_P for each layer by itself."""
    return log_ratio(fractions, target).mean()


def layer_fractions(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, " L"]:
    """Return the active fraction of each layer by itself: if all layers have one width, each has to meet the budget."""
    whole = decoder_params(shape) / shape.num_layers
    return torch.stack([layer_params(shape, *layer_widths(m, shape)) / whole for m in masks])


def _union(masks: Float[Tensor, "n m"]) -> Float[Tensor, ""]:
    """Return the fraction of dims that some row keeps: the mean of 1 - prod(1 - s) (Eq. 6, Sec. 3.4).

    The gradient of the product with respect to a row is the product of the other rows; torch gives it exactly, zeros
    included.
    """
    return (1 - (1 - masks).prod(0)).mean()


def coverage_penalty(masks: Sequence[SampledLayerMasks]) -> Float[Tensor, ""]:
    """Return R_U (Eqs. 7, 16; Sec. 3.4, App. B.2), which pushes unions to 1; the mean over the sites that have one.

    The union of an MLP is over experts, that of V/O dims over tokens. Fine-grained experts cover the layer by themselves.
    """
    terms = [log_ratio(_union(m.experts.neuron_masks), 1.0) for m in masks if m.experts.neuron_masks is not None]
    terms += [log_ratio(_union(m.value_masks), 1.0) for m in masks if m.value_masks is not None]
    return torch.stack(terms).mean() if terms else torch.zeros(())


def balance_penalty(routings: Sequence[Routing | None]) -> Float[Tensor, ""]:
    """Return R_L (Eq. 9, Sec. 3.4) without its factor N: sum_i F_i P_i, at least 1/N; the mean over layers.

    With k experts a token, F and P are divided by k.
    """
    terms = []
    for routing in routings:
        assert routing is not None, "the masks have seen no tokens yet"
        terms.append((routing.assignment.detach().mean(0) * routing.probs.mean(0)).sum() / routing.top_k**2)
    return torch.stack(terms).mean()


def shift_targets(
    input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]
) -> tuple[Int[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return the next-token targets, flattened, and which of them exist (the last token and padding have none)."""
    targets = F.pad(input_ids[:, 1:], (0, 1))
    valid = mask & F.pad(mask[:, 1:], (0, 1))
    return targets.flatten(), valid.flatten()
