"""Turned value heads: exact as long as nothing is cut, and ordered so that the last dims are the ones to cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conftest import FAMILIES, make_pico, make_plan, tokens
from tomoe.model.loading import load_dense
from tomoe.model.structure import layer_parts, run_model, shape_of
from tomoe.pruning import rotation as rotation_module
from tomoe.pruning.carving import attention_importance
from tomoe.pruning.masking import masked, planned_masks
from tomoe.pruning.rotation import head_rotations, rotate_heads, rotate_weights, rotated, value_rotations

EXACT = dict(atol=1e-5, rtol=1e-5)


def rotations_of(model: PreTrainedModel, rows: int = 8) -> list[Tensor]:
    ids = tokens(rows, 32, seed=3)
    return value_rotations(model, ids, torch.ones_like(ids, dtype=torch.bool))


def rotate_model_(model: PreTrainedModel, rotations: list[Tensor]) -> None:
    """Write the rotated weights into the model, as `fold` does."""
    for parts, rotation in zip(layer_parts(model), rotations, strict=True):
        v, bias, o = rotate_weights(parts.v.weight, parts.v.bias, parts.o.weight, rotation)
        parts.v.weight.data, parts.o.weight.data = v, o
        if bias is not None:
            parts.v.bias.data = bias


class KeepValues:
    """Masks that keep everything but some V/O dims, the same in every layer."""

    def __init__(self, kept: Tensor, mlp_size: int):
        self.kept, self.mlp_size = kept, mlp_size

    def neurons(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), self.mlp_size)

    def qk(self) -> None:
        return None

    def values(self, x: Tensor) -> Tensor:
        return self.kept


def inputs_of_o(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [p.o.register_forward_pre_hook(lambda _, a: seen.append(a[0].flatten(0, -2))) for p in layer_parts(model)]
    run_model(model, ids, None)
    for handle in handles:
        handle.remove()
    return seen


def hooks(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(params=["activations", "weights"])
def turn(request: pytest.FixtureRequest) -> Callable[[PreTrainedModel, list[Tensor], Tensor], Tensor]:
    """Logits of the rotated model, both ways: as training and calibration run it, and as it is folded."""

    def by_activations(model: PreTrainedModel, rotations: list[Tensor], ids: Tensor) -> Tensor:
        with rotated(model, rotations):
            return model(ids).logits

    def by_weights(model: PreTrainedModel, rotations: list[Tensor], ids: Tensor) -> Tensor:
        model = copy.deepcopy(model)
        rotate_model_(model, rotations)
        return model(ids).logits

    return by_activations if request.param == "activations" else by_weights


def test_whole_it_is_the_dense_model(dense: PreTrainedModel, turn: Callable[..., Tensor]) -> None:
    """All families: grouped heads, biases of V and O, heads of another size than D / H."""
    ids, rotations = tokens(), rotations_of(dense)
    assert max(float((r - torch.eye(r.shape[-1])).abs().max()) for r in rotations) > 0.1
    torch.testing.assert_close(turn(dense, rotations, ids), dense(ids).logits, **EXACT)


FAULTS = {
    "the output turned by the transpose": lambda x, r, inverse: rotate_heads(x, r, not inverse),
    "the output not turned": lambda x, r, inverse: x,
    "the output turned by another head's rotation": lambda x, r, inverse: rotate_heads(x, r.flip(0), inverse),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rotation_turned_the_wrong_way_is_noticed(
    fault: str, turn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above is able to fail. (Turned wrongly on both sides, the model would still be the same.)"""
    dense, ids = make_pico("qwen2"), tokens()
    shape, rotations, right = shape_of(dense), rotations_of(dense), rotate_heads

    def faulty(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
        is_output = x.shape[-1] == shape.num_heads * shape.head_dim
        return FAULTS[fault](x, rotation, inverse) if is_output else right(x, rotation, inverse)

    monkeypatch.setattr(rotation_module, "rotate_heads", faulty)
    assert float((turn(dense, rotations, ids) - dense(ids).logits).abs().max()) > 1e-2


def test_rotations_are_orthogonal_and_of_float32(dense: PreTrainedModel) -> None:
    shape, rotations = shape_of(dense), rotations_of(dense)
    assert len(rotations) == shape.num_layers
    for r in rotations:
        assert (tuple(r.shape), r.dtype) == ((shape.num_kv_heads, shape.head_dim, shape.head_dim), torch.float32)
        torch.testing.assert_close(r.mT @ r, torch.eye(shape.head_dim).expand_as(r), atol=1e-6, rtol=0)
        largest = r.take_along_dim(r.abs().argmax(1, keepdim=True), 1)
        assert bool((largest > 0).all()), "the sign of a direction is left to chance"
    assert all(map(torch.equal, rotations, rotations_of(dense)))


def test_dims_stand_in_order_of_importance_in_every_head(dense: PreTrainedModel) -> None:
    """Then one mask for all heads cuts what each can spare best, and the ranking of the carve is the order itself."""
    shape, ids = shape_of(dense), tokens(8, 32, seed=3)
    rotations = rotations_of(dense)
    with rotated(dense, rotations):
        seen = inputs_of_o(dense, ids)  # before the rotation is undone
    for x, plain, parts, r in zip(seen, inputs_of_o(dense, ids), layer_parts(dense), rotations, strict=True):
        torch.testing.assert_close(x, rotate_heads(plain, r), **EXACT)
        o = rotate_weights(parts.v.weight, parts.v.bias, parts.o.weight, r)[2]
        energy = (x.square().mean(0) * o.square().sum(0)).view(shape.num_kv_heads, -1, shape.head_dim).sum(1)
        assert bool((energy[:, 1:] <= energy[:, :-1] * (1 + 1e-4)).all())
        _, importance = attention_importance(x, x[:, : len(parts.k.weight)], x, o, shape)
        assert importance.argsort(descending=True, stable=True).tolist() == list(range(shape.head_dim))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_of_the_last_dims_loses_less_than_one_by_energy(family: str) -> None:
    """The error of the output projection, computed directly, on the tokens that the rotation was made from."""
    dense, ids = make_pico(family), tokens(8, 32, seed=3)
    shape, rotations = shape_of(dense), rotations_of(dense)
    heads, c = shape.num_heads, shape.head_dim
    for x, parts, r in zip(inputs_of_o(dense, ids), layer_parts(dense), rotations, strict=True):
        whole = x @ parts.o.weight.T
        energy = (x.square().mean(0) * parts.o.weight.square().sum(0)).view(heads, c).sum(0)
        o = rotate_weights(parts.v.weight, parts.v.bias, parts.o.weight, r)[2]
        by_energy, by_index = [], []
        for dropped in range(1, c):
            plain = torch.ones(c).index_fill_(0, energy.argsort()[:dropped], 0.0).repeat(heads)
            last = (torch.arange(c) < c - dropped).float().repeat(heads)
            by_energy.append(float((x * plain @ parts.o.weight.T - whole).square().sum()))
            by_index.append(float((rotate_heads(x, r) * last @ o.T - whole).square().sum()))
        assert all(a <= b for a, b in zip(by_index, by_energy, strict=True)), (by_index, by_energy)
        assert sum(by_index) < 0.9 * sum(by_energy)


def test_a_planted_direction_is_found() -> None:
    """Grouped heads: what all of them read lies in one plane, turned differently in each key/value head."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(2, 8, 8, generator=generator))[0][..., :2]
    values = torch.randn(200, 2, 3, 2, generator=generator) * torch.tensor([3.0, 1.0])
    attended = torch.einsum("tgrk,gck->tgrc", values, plane).flatten(1)
    rotation = head_rotations(attended, torch.randn(16, 48, generator=generator), 2, 8)
    found = rotation[..., :2] @ rotation[..., :2].mT
    torch.testing.assert_close(found, plane @ plane.mT, atol=1e-3, rtol=0)


@pytest.mark.parametrize("empty", ["values", "weights", "both"])
def test_heads_that_do_nothing_get_a_rotation_all_the_same(empty: str) -> None:
    """And so do heads with fewer tokens than dims."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 16, generator=generator), torch.randn(4, 16, generator=generator)
    x[:, :8] *= empty == "weights"
    weight[:, :8] *= empty == "values"
    rotation = head_rotations(x, weight, 2, 8)
    torch.testing.assert_close(rotation.mT @ rotation, torch.eye(8).expand(2, 8, 8), atol=1e-6, rtol=0)


def test_masks_act_in_the_rotated_basis_whichever_is_entered_first() -> None:
    dense, ids = make_pico("qwen2"), tokens()
    rotations, shape = rotations_of(dense), shape_of(dense)
    masks = [KeepValues((torch.arange(shape.head_dim) < 3).float(), shape.mlp_size)] * shape.num_layers
    with rotated(dense, rotations), masked(dense, masks):
        outside = dense(ids).logits
    with masked(dense, masks), rotated(dense, rotations):
        inside = dense(ids).logits
    turned = copy.deepcopy(dense)
    rotate_model_(turned, rotations)
    with masked(turned, masks):
        by_weights = turned(ids).logits
    with masked(dense, masks):
        assert not torch.allclose(dense(ids).logits, inside, atol=1e-2)
    assert torch.equal(outside, inside)
    torch.testing.assert_close(inside, by_weights, **EXACT)


@pytest.mark.parametrize("attention", ["static", "per_token"])
def test_planned_masks_with_gradients_and_padding(attention: str) -> None:
    """The student of training: frozen weights, a gradient through V and O, and the same result by rotated weights."""
    dense, ids = make_pico("qwen3"), tokens()
    rotations, plan = rotations_of(dense), make_plan(dense, attention)
    x = dense.get_input_embeddings()(ids).requires_grad_()
    with rotated(dense, rotations), masked(dense, planned_masks(plan)):
        out = dense(inputs_embeds=x).logits
        out.square().sum().backward()
    gradient, x.grad = x.grad, None
    rotate_model_(dense, rotations)
    with masked(dense, planned_masks(plan)):
        again = dense(inputs_embeds=x).logits
    again.square().sum().backward()
    torch.testing.assert_close(out, again, **EXACT)
    torch.testing.assert_close(gradient, x.grad, atol=1e-4 * float(x.grad.abs().max()), rtol=1e-3)


def test_padding_does_not_count() -> None:
    dense, ids = make_pico("llama3"), tokens(4, 16)
    mask = torch.arange(16) < torch.tensor([[16], [9], [12], [5]])
    other = torch.where(mask, ids, tokens(4, 16, seed=9))
    for one, again in zip(value_rotations(dense, ids, mask), value_rotations(dense, other, mask), strict=True):
        torch.testing.assert_close(one, again, atol=1e-4, rtol=0)


def test_the_model_is_left_as_it_was(dense: PreTrainedModel) -> None:
    ids, weights, before = tokens(), copy.deepcopy(dense.state_dict()), dense(tokens()).logits
    reported: list[tuple[int, int]] = []
    mask = torch.ones_like(ids, dtype=torch.bool)
    rotations = value_rotations(dense, ids, mask, lambda done, total: reported.append((done, total)))
    assert reported == [(1, 2), (2, 2)]
    with rotated(dense, rotations):
        dense(ids)
    with pytest.raises(KeyError, match="inside"), rotated(dense, rotations):
        raise KeyError("inside")
    with pytest.raises(ValueError, match="shorter"), rotated(dense, rotations[:1]):
        pass
    assert torch.equal(dense(ids).logits, before)
    assert hooks(dense) == 0
    assert not any("forward" in vars(m) for p in layer_parts(dense) for m in (p.v, p.o))
    assert all(torch.equal(value, weights[name]) for name, value in dense.state_dict().items())


@pytest.fixture
def offloaded(tmp_path: Path) -> PreTrainedModel:
    make_pico("qwen2").save_pretrained(tmp_path / "dense")
    return load_dense(str(tmp_path / "dense"), torch.float32, offload=True)


def test_offloaded_weights(offloaded: PreTrainedModel) -> None:
    """A layer's weights are there only while it runs, before and after."""
    ids, whole = tokens(), make_pico("qwen2")
    rotations = rotations_of(offloaded)
    for found, expected in zip(rotations, rotations_of(whole), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with rotated(offloaded, rotations):
        torch.testing.assert_close(offloaded(ids).logits, whole(ids).logits, **EXACT)
    assert layer_parts(offloaded)[0].v.weight.is_meta
    torch.testing.assert_close(offloaded(ids).logits, whole(ids).logits, **EXACT)


def test_bfloat16_stays_near() -> None:
    """Orthogonal: rounding the rotated weights does no more harm than rounding the weights did."""
    dense, ids = make_pico("llama3"), tokens(8, 32)
    rotations = rotations_of(dense)
    half = copy.deepcopy(dense).bfloat16()
    rounding = float((half(ids).logits.float() - dense(ids).logits).norm())
    rotate_model_(half, rotations)
    assert layer_parts(half)[0].v.weight.dtype == torch.bfloat16
    assert float((half(ids).logits.float() - dense(ids).logits).norm()) < 2 * rounding
