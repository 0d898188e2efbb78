"""What both sides of an equation are, and the tokens with which it is decided: wherever a model chooses, what it takes is
clearly above what it leaves.

Sums in another order differ by some 1e-6 of the largest logit, and what then chooses otherwise computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.model.hooks import hooked
from tomoe.moe.modeling_tomoe import ToMoEMLP
from tomoe.plans import ALWAYS, Plan
from tomoe.plans.masking import masked, planned_masks

TOLERANCE = 1e-5  # of the largest logit, float32
CLEAR = 3e-5  # of the largest logit, a router's or the model's


def meaning(dense: PreTrainedModel, plan: Plan, ids: Tensor) -> Tensor:
    """What the dense model predicts under the masks of a plan."""
    with masked(dense, planned_masks(plan)):
        return dense(ids).logits


def assert_same(found: Tensor, meant: Tensor, what: str = "logits") -> None:
    """Equal to TOLERANCE of the largest logit."""
    assert found.shape == meant.shape, what
    difference, scale = float((found - meant).abs().max()), max(1.0, float(meant.abs().max()))
    assert difference <= TOLERANCE * scale, f"{what}: largest difference {difference:.2g} of {scale:.2g}"


def gaps(logits: Tensor, k: int) -> Tensor:
    """How far the k-th largest of the last axis is above the next, of the largest of all."""
    last, following = logits.topk(k + 1, dim=-1).values[..., -2:].unbind(-1)
    return (last - following) / logits[logits < ALWAYS / 2].abs().max()


def margins(model: PreTrainedModel, input_ids: Tensor, **inputs: Tensor) -> Tensor:
    """[rows, S]: how clearly a token chooses its experts and its V/O dims, the least of its `gaps`; 1 if it chooses nothing, as
    padding does, which is the same in every row.
    """
    least = torch.ones(input_ids.shape)
    real = inputs.get("attention_mask", torch.ones_like(input_ids)).bool()

    def note(k: int, logits: Tensor) -> None:
        if k < logits.shape[-1]:
            least[real] = least[real].minimum(gaps(logits.view(*real.shape, -1)[real], k).float())

    routers = [(m.router, m.top_k or 1) for m in model.modules() if isinstance(m, ToMoEMLP)]
    routers += [(m.value_router.project_out, m.top_k) for m in model.modules() if getattr(m, "value_router", None)]
    with hooked(router.register_forward_hook(lambda _, __, out, k=k: note(k, out)) for router, k in routers):
        model(input_ids, **inputs)
    return least


def redrawn(draw: Callable[[int], Tensor], near: Callable[[Tensor], Tensor], enough: float = 1.0) -> Tensor:
    """Rows as `draw` gives them of which the share `enough` stands before the first token that is `near` a tie.

    A row is drawn again from that token on, which changes nothing before it.
    """
    ids = draw(5)
    for seed in range(6, 100):
        clear = near(ids).cumsum(-1) == 0
        if clear.float().mean() >= enough:
            return ids
        ids = torch.where(clear, ids, draw(seed))
    raise AssertionError("no tokens with wide margins")


def clear_tokens(model: PreTrainedModel, draw: Callable[[int], Tensor]) -> Tensor:
    """Rows as `draw` gives them in which no rounding lets a token choose otherwise."""
    return redrawn(draw, lambda ids: margins(model, ids) <= CLEAR)


def clear_prompts(
    model: PreTrainedModel, draw: Callable[[int], Sequence[Tensor]], new: int, but: Sequence[int] = ()
) -> Sequence[Tensor]:
    """Rows [S] that go on for `new` tokens without a choice that rounding turns: of experts, of dims, or of words `but` some."""

    def clear(ids: Tensor) -> bool:
        for _ in range(new):
            logits = model(ids, use_cache=False).logits[:, -1]
            logits[:, but] = logits.min()
            if gaps(logits, 1).min() < CLEAR:
                return False
            ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
        return bool(margins(model, ids).min() > CLEAR)

    for seed in range(7, 100):
        rows = draw(seed)
        # rows of one length at once
        if all(map(clear, [rows] if isinstance(rows, Tensor) else [row[None] for row in rows])):
            return rows
    raise AssertionError("no prompts with wide margins")
