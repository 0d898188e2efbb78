"""The loss of a student against its teacher, or on the text: a mean over tokens in nats, without all logits in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Head = Callable[[Tensor], Tensor]  # hidden states -> logits
CHUNK, CHUNK_ON_DEVICE = 128, 1024  # tokens whose logits are in memory at a time, on a CPU and elsewhere


class _ChunkedLoss(torch.autograd.Function):
    """Mean over tokens of a loss on logits, in chunks: the gradient of the hidden states is computed in the forward pass, so no
    [T, V] tensor ever exists, in any dtype."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, token_loss: Callable[..., tuple[Tensor, Tensor]], *per_token: Tensor
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        grads = []
        size = CHUNK if hidden.device.type == "cpu" else CHUNK_ON_DEVICE
        for chunk in zip(hidden.split(size), *(t.split(size) for t in per_token), strict=True):
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
    student: Float[Tensor, "T D"], teacher: Float[Tensor, "T D"], head: Head, valid: Bool[Tensor, " T"] | None
) -> Float[Tensor, ""]:
    """Return KL(teacher || student) in nats, the mean over valid tokens, in float32, from final hidden states (App. B.1). d
    KL / d logits = softmax(student) - softmax(teacher), so the backward pass needs no second softmax."""

    def token_loss(logits: Tensor, teacher_states: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = head(teacher_states)
        log_q, log_p = logits.float().log_softmax(-1), teacher_logits.float().log_softmax(-1)
        p = log_p.exp()
        loss = torch.sum(p * log_p.sub_(log_q))
        return loss, log_q.exp_().sub_(p)

    if valid is not None:
        student, teacher = student[valid], teacher[valid]
    return _ChunkedLoss.apply(student, head, token_loss, teacher)


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
    mask: Bool[Tensor, "B S"] | None,
    head: Head,
) -> Float[Tensor, ""]:
    """Return the KL to the teacher, or without one the cross-entropy to the next token; without a mask nothing is padding."""
    if teacher is not None:
        return kl_loss(student, teacher, head, None if mask is None else mask.flatten())
    targets, valid = shift_targets(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
    return language_model_loss(student, targets, head, valid)


def shift_targets(
    input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]
) -> tuple[Int[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return the next-token targets, flattened, and which of them exist (the last token and padding have none)."""
    targets = F.pad(input_ids[:, 1:], (0, 1))
    valid = mask & F.pad(mask[:, 1:], (0, 1))
    return targets.flatten(), valid.flatten()
