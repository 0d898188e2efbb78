"""Closed-form repair against direct least squares on what the whole model computes; what it gains; what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from conftest import FAMILIES, make_pico, make_plan, tokens
from pico_files import ended, forked, write_pico
from tomoe.errors import UserError
from tomoe.methods.tomoe.objective import SampledLayerMasks
from tomoe.model.layerwise import layer_inputs, returned_by_layers
from tomoe.model.loading import load_dense
from tomoe.model.mlp import decoder_layers
from tomoe.model.structure import layer_parts
from tomoe.plans.masking import LayerMasks, masked, planned_masks, with_weight
from tomoe.plans.repair import layers as repairing
from tomoe.plans.repair import streams
from tomoe.plans.repair.equations import MOST_RAISES, FewTokens, NormalEquations, Refit, low_rank, refit, solve
from tomoe.plans.repair.layers import LayerRepair, RepairSettings, repair_layers

pytestmark = pytest.mark.usefixtures("no_grad")
RED = 1e-2  # what a planted fault must exceed; a right solution stays below a hundredth of it
SHARE = {"local": 0.0, "half": 0.5}


def repair(*args: Any) -> list[LayerRepair]:
    """All layers at once."""
    return list(repair_layers(*args))


def calibration(rows: int = 8, length: int = 24) -> tuple[Int[Tensor, "rows length"], Bool[Tensor, "rows length"]]:
    """Blocks longer than the sliding window, the last of them padded."""
    ids, real = tokens(rows, length, seed=3), torch.ones(rows, length, dtype=torch.bool)
    real[-1, length // 2 :] = False
    return ids.masked_fill(~real, 0), real


def run_whole(
    model: PreTrainedModel, masks: list[LayerMasks] | None, repairs: list[LayerRepair | None]
) -> list[dict[str, Tensor]]:
    """What the layers of the whole model take and give on the real tokens, all layers in one pass."""
    ids, real = calibration()
    seen: list[dict[str, Tensor]] = [{} for _ in repairs]

    def keep(i: int, name: str, taken: bool) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], *out: Any) -> None:
            seen[i][name] = (args[0] if taken else out[0])[real].double()

        return hook

    with ExitStack() as stack:
        if masks:
            stack.enter_context(masked(model, masks))
        for i, (parts, layer) in enumerate(zip(layer_parts(model), decoder_layers(model), strict=True)):
            if (refitted := repairs[i]) is not None:
                stack.callback(with_weight(parts.mlp.down, refitted.down.weight).remove)
            if refitted is not None and refitted.output is not None:
                stack.callback(with_weight(parts.attention.o, refitted.output.weight).remove)
            for part, name in (
                (layer, "in"),
                (parts.mlp.module, "mlp in"),
                (parts.mlp.down, "h"),
                (parts.attention.o, "o"),
            ):
                stack.callback(part.register_forward_pre_hook(keep(i, name, True)).remove)
            for part, name in ((layer, "out"), (parts.mlp.module, "mlp"), (parts.attention.o, "attention")):
                stack.callback(part.register_forward_hook(keep(i, name, False)).remove)
        model.model(input_ids=ids, attention_mask=real.long(), use_cache=False)
    return seen


def least_squares(
    h: Tensor, wanted: Tensor, dense: Tensor, residual: Tensor, ridge: float
) -> Tensor:  # [t n], [t D], [D n], [t D]
    """argmin_W sum_t |h_t W^T - wanted_t|^2 / |residual_t|^2 + ridge mean(diag G) |W - dense|^2, as one augmented system."""
    root = residual.norm(dim=-1, keepdim=True).reciprocal()
    level = (ridge * (h * root).square().sum(0).mean()).sqrt()
    rows = torch.cat([h * root, level * torch.eye(h.shape[1], dtype=h.dtype)])
    return torch.linalg.lstsq(rows, torch.cat([wanted * root, level * dense.double().T])).solution.T


def direct_down(
    model: PreTrainedModel, masks: list[LayerMasks], made: list[LayerRepair], i: int, share: float
) -> Tensor:
    """The down projection of layer i, from whole-model passes with the layers before it repaired."""
    parts = layer_parts(model)[i]
    prefix = [*made[:i], LayerRepair(refit_nothing(parts.mlp.down.weight), made[i].output)]
    ours = run_whole(model, masks, [*prefix, *[None] * (len(made) - i - 1)])[i]
    theirs = run_whole(model, None, [None] * len(made))[i]
    residual = ours["out"] - ours["mlp"]
    local = parts.mlp.module(ours["mlp in"].float()).double()
    bias = 0 if parts.mlp.down.bias is None else parts.mlp.down.bias.double()
    wanted = (1 - share) * local + share * (theirs["out"] - residual) - bias
    return least_squares(ours["h"], wanted, parts.mlp.down.weight, residual, RepairSettings.ridge)


def refit_nothing(weight: Tensor) -> Any:
    sums = NormalEquations(weight.shape[1], weight.shape[0], weight.device)
    return refit(weight, sums, 1e-2)


def make_repair(
    family: str, attention: str = "off", form: str = "overlapping", **settings: Any
) -> tuple[PreTrainedModel, list[LayerMasks], list[LayerRepair]]:
    model = make_pico(family)
    masks: list[LayerMasks] = list(planned_masks(make_plan(model, attention, form=form)))
    return model, masks, repair(model, masks, *calibration(), RepairSettings(**settings))


def relative(found: Tensor, meant: Tensor) -> float:
    return float((found.double() - meant.double()).norm() / meant.double().norm())


def off_by(family: str, target: str = "half") -> float:
    """How far the repair of the last layer is from direct least squares, relative to how much it changed."""
    model, masks, made = make_repair(family, target=target)
    i = len(made) - 1
    dense = layer_parts(model)[i].mlp.down.weight
    return relative(made[i].down.weight - dense, direct_down(model, masks, made, i, SHARE[target]) - dense)


def dense_attention(model: PreTrainedModel, i: int, masks: list[LayerMasks], made: list[LayerRepair]) -> Tensor:
    """What attention i gives without masks, behind layers that are masked and repaired."""
    whole = [Everything(parts.mlp.down.in_features) for parts in layer_parts(model)]
    mixed = [*masks[:i], *whole[i:]]
    return run_whole(model, mixed, [*made, *[None] * (len(masks) - i)])[i]["attention"]


@pytest.mark.parametrize(
    ("family", "attention", "form", "target"),
    [
        ("qwen2", "off", "fine", "half"),
        ("mistral", "off", "overlapping", "half"),
        ("llama", "off", "fine", "local"),
        ("qwen2", "per_token", "fine", "half"),
        ("qwen3", "static", "overlapping", "half"),
        ("phi", "per_token", "overlapping", "half"),
    ],
)
def test_every_layer_solves_the_least_squares_problem(family: str, attention: str, form: str, target: str) -> None:
    """And so does the output projection where attention is pruned; the model comes nearer to the dense one, which stays."""
    model, share = make_pico(family), SHARE[target]
    before, theirs = {name: t.clone() for name, t in model.state_dict().items()}, run_whole(model, None, [None] * 2)
    masks = planned_masks(make_plan(model, attention, form=form))
    made = repair(model, masks, *calibration(), RepairSettings(target, output=attention != "off"))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for i, (layer, parts) in enumerate(zip(made, layer_parts(model), strict=True)):
        dense, meant = parts.mlp.down.weight, direct_down(model, masks, made, i, share)
        assert relative(layer.down.weight, dense) > 0.05
        assert relative(layer.down.weight - dense, meant - dense) < RED / 100
        assert layer.down.error_after < layer.down.error_before
        if layer.output is None:
            continue
        ours = run_whole(model, masks, [*made[:i], *[None] * (len(made) - i)])[i]
        dense, bias, x = parts.attention.o.weight, parts.attention.o.bias, ours["in"]
        local = dense_attention(model, i, masks, made[:i])
        wanted = (1 - share) * local + share * (theirs[i]["in"] + theirs[i]["attention"] - x)
        meant = least_squares(ours["o"], wanted - (0 if bias is None else bias), dense, x, RepairSettings.ridge)
        assert relative(layer.output.weight - dense, meant - dense) < RED / 100
        assert layer.output.error_after < layer.output.error_before
    assert torch.equal(run_whole(model, None, [None] * 2)[-1]["out"], theirs[-1]["out"]), "hooks are left"
    without, after = (run_whole(model, masks, repairs)[-1]["out"] for repairs in ([None] * len(made), made))
    assert relative(after, theirs[-1]["out"]) < 0.95 * relative(without, theirs[-1]["out"])


@pytest.mark.parametrize("family", FAMILIES)
def test_running_layer_by_layer_gives_the_hidden_states_of_the_whole_model(family: str) -> None:
    model, (ids, real) = make_pico(family), calibration()
    returned = returned_by_layers(model)
    for rows in (slice(0, 4), slice(4, 8)):  # without padding, and with it
        mask = None if bool(real[rows].all()) else real[rows].long()
        meant = model.model(input_ids=ids[rows], attention_mask=mask, use_cache=False, output_hidden_states=True)
        hidden, handed = layer_inputs(model, ids[rows], real[rows], returned)
        for i, layer in enumerate(decoder_layers(model)):
            assert torch.equal(hidden, meant.hidden_states[i])
            args, kwargs = handed[i]
            hidden = layer(hidden, *args, **kwargs)


class Everything(SampledLayerMasks):
    """Masks of ones."""

    def __init__(self, size: int):
        self.size = size

    def neurons(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), self.size)


def weights(made: list[LayerRepair]) -> Tensor:
    return torch.stack([layer.down.weight for layer in made])


def test_padding_is_ignored() -> None:
    model = make_pico("qwen2")
    masks, (ids, real) = planned_masks(make_plan(model, "off")), calibration()
    meant = weights(repair(model, masks, ids, real))
    other = torch.where(real, ids, tokens(*ids.shape, seed=9))
    assert relative(weights(repair(model, masks, other, real)), meant) < 1e-6
    more = torch.cat([ids, tokens(3, ids.shape[1])]), torch.cat([real, torch.zeros_like(real[:3])])
    more[1][8:, 0] = False
    assert relative(weights(repair(model, masks, *more)), meant) < 1e-5
    assert relative(weights(repair(model, masks, other, torch.ones_like(real))), meant) > RED
    with pytest.raises(UserError, match="every token is padding"):
        repair(model, masks, ids, torch.zeros_like(real))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 72])
def test_chunks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    model, masks, made = make_repair("mistral")
    monkeypatch.setattr(streams, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr("tomoe.plans.repair.equations.BLOCK", 5)  # Gram matrices are summed in blocks, too
    assert relative(weights(repair(model, masks, *calibration())), weights(made)) < 1e-4


def test_hidden_states_on_disk_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files lose their names as soon as they are mapped, so that no kill leaves them behind."""
    model, masks, made = make_repair("llama3")
    mapped, left = list[int](), list[Path]()
    map_file = torch.from_file

    def mapping(path: str, **options: Any) -> Tensor:
        stored = map_file(path, **options)
        assert tmp_path in Path(path).parents
        mapped.append(Path(path).stat().st_size)
        return stored

    monkeypatch.setattr(torch, "from_file", mapping)
    monkeypatch.setattr(streams, "MEMORY", 0)
    spilled = repair(
        model, masks, *calibration(), RepairSettings(), lambda *_: left.extend(tmp_path.iterdir()), tmp_path
    )
    assert torch.equal(weights(spilled), weights(made))
    assert sorted(mapped) == [8 * 24 * 32 * 4, 8 * 24 * 32 * 4, 8 * 24 * 48 * 4]
    assert not left


def test_layers_that_stay_in_their_files_are_repaired_alike(tmp_path: Path) -> None:
    model = load_dense(str(write_pico(tmp_path / "dense", "phi", intermediate_size=96)), torch.float32)
    streamed = load_dense(str(tmp_path / "dense"), torch.float32, offload=True)
    masks, settings = planned_masks(make_plan(model, "static")), RepairSettings(output=True)
    made = [repair(m, masks, *calibration(), settings) for m in (model, streamed)]
    assert all(p.is_meta for layer in decoder_layers(streamed) for p in layer.parameters())
    assert torch.equal(weights(made[1]), weights(made[0]))
    assert torch.equal(streamed(tokens()).logits, model(tokens()).logits)


def test_bfloat16_comes_near_to_float32() -> None:
    model, masks, made = make_repair("llama3")
    narrow = repair(model.bfloat16(), masks, *calibration())
    for ours, meant in zip(narrow, made, strict=True):  # a few tokens fall to another expert
        assert ours.down.error_after == pytest.approx(meant.down.error_after, rel=0.03)


def random_sums(inputs: int = 12, outputs: int = 7, count: int = 60) -> NormalEquations:
    generator = torch.Generator().manual_seed(0)
    sums = NormalEquations(inputs, outputs, torch.device("cpu"))
    h, gap, residual = (torch.randn(count, n, generator=generator) for n in (inputs, outputs, outputs))
    sums.add(h, gap + h[:, :1], residual)
    return sums


def test_error_is_that_of_the_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    h, gap, residual, change = (torch.randn(n, generator=generator) for n in ((50, 6), (50, 4), (50, 4), (4, 6)))
    sums = NormalEquations(6, 4, torch.device("cpu"))
    sums.add(h[:20], gap[:20], residual[:20])
    sums.add(h[20:], gap[20:], residual[20:])
    for made, of in ((h @ change.T, change), (torch.zeros_like(gap), None)):
        meant = ((made - gap).square().sum(1) / residual.square().sum(1)).mean()
        assert sums.error(of) == pytest.approx(float(meant), rel=1e-5)


@pytest.mark.parametrize("ridge", [1e-2, 4.0])
def test_fewer_tokens_than_inputs_solve_the_same_problem(ridge: float) -> None:
    generator = torch.Generator().manual_seed(2)
    h, gap, residual = (torch.randn(9, n, generator=generator) for n in (24, 5, 5))
    many, few = NormalEquations(24, 5, torch.device("cpu")), FewTokens(24, 5, 9, torch.device("cpu"))
    for sums in (many, few):
        sums.add(h[:4], gap[:4], residual[:4])
        sums.add(h[4:], gap[4:], residual[4:])
    (meant, taken), (change, same) = many.solved(ridge), few.solved(ridge)
    assert taken == same == ridge
    torch.testing.assert_close(change, meant, atol=1e-5, rtol=1e-4)
    for of in (None, change):
        assert few.error(of) == pytest.approx(many.error(of), rel=1e-4, abs=1e-6)
    # G is singular, so that there is no solution without a ridge
    assert few.solved(0.0)[1] > 0


@pytest.mark.parametrize("count", [6, 30])
def test_few_and_many_tokens_repair_alike(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    model = make_pico("llama")
    masks, text = planned_masks(make_plan(model, "off")), (tokens(1, count), torch.ones(1, count, dtype=torch.bool))
    kept = repairing.keeps_tokens(count, model.config.intermediate_size, 0)
    assert kept == (count == 6)
    made = repair(model, masks, *text)
    monkeypatch.setattr(repairing, "keeps_tokens", lambda *_: not kept)
    assert relative(weights(repair(model, masks, *text)), weights(made)) < 1e-4


def test_low_rank_is_the_singular_value_decomposition_in_the_metric() -> None:
    sums = random_sums()
    change, _ = solve(sums.gram, sums.cross, 1e-2)
    values, vectors = torch.linalg.eigh(sums.gram.double())
    root = vectors * values.sqrt()
    u, s, vt = torch.linalg.svd(change.double() @ root, full_matrices=False)
    for rank in (1, 3, 7):
        left, right = low_rank(change, sums.gram, rank)
        assert left.shape == (7, rank)
        assert right.shape == (rank, 12)
        meant = (u[:, :rank] * s[:rank]) @ vt[:rank] @ torch.linalg.inv(root)
        torch.testing.assert_close((left @ right).double(), meant, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_low_rank_at_full_rank_is_the_whole_change_and_less_loses_more() -> None:
    _, _, whole = make_repair("qwen3")
    made = [make_repair("qwen3", rank=rank)[2] for rank in (1, 4, 64)]
    assert relative(weights(made[-1]), weights(whole)) < 1e-5
    errors = [layers[0].down.error_after for layers in made]
    assert errors == sorted(errors, reverse=True)
    layer = made[1][1].down
    assert [t.shape for t in layer.factors] == [(32, 4), (4, 48)]
    dense = layer_parts(make_pico("qwen3"))[1].mlp.down.weight
    torch.testing.assert_close(dense + layer.factors[0] @ layer.factors[1], layer.weight)


def test_a_matrix_that_is_not_positive_definite_gets_more_ridge_and_a_sentence() -> None:
    sums = random_sums()
    lowest = torch.linalg.eigvalsh(sums.gram)[0]
    gram = sums.gram - (lowest + 1e-3 * sums.gram.diagonal().mean()) * torch.eye(12)  # now it is below zero
    change, ridge = solve(gram, sums.cross, 0.0)
    assert change.isfinite().all()
    assert ridge >= 1e-5
    made = LayerRepair(Refit(change, None, 1.0, 0.5, ridge))
    assert made.note(0.0) == f"its Gram matrix is not positive definite with a ridge of 0, taking {ridge:g}"
    assert not made.note(ridge)
    with pytest.raises(UserError, match="not positive definite even with a ridge"):
        solve(-torch.eye(12), sums.cross, 1e-9)
    gram[0, 1] = torch.inf
    with pytest.raises(UserError, match="not finite"):
        solve(gram, sums.cross, 1e-2)
    zero = NormalEquations(12, 7, torch.device("cpu"))
    assert solve(zero.gram, zero.cross, 1e-2)[0].abs().max() == 0
    assert MOST_RAISES > 3


def test_progress_says_what_was_gained_and_what_was_raised() -> None:
    model = make_pico("llama")
    heard: list[tuple[int, int, dict[str, Any]]] = []
    few = tokens(1, 4), torch.ones(1, 4, dtype=torch.bool)  # fewer tokens than neurons
    masks = planned_masks(make_plan(model, "off"))
    repair(model, masks, *few, RepairSettings(ridge=0.0), lambda *args: heard.append(args))
    assert [known[:2] for known in heard] == [(1, 2), (2, 2)]
    assert all(known["error_after"] <= known["error_before"] for _, _, known in heard)
    assert heard[0][2]["note"].startswith("layer 0: its Gram matrix is not positive definite")


@pytest.mark.slow
def test_two_processes_refit_what_one_does(tmp_path: Path) -> None:
    model, masks, made = make_repair("llama3", "static", output=True)

    def work(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        own = repair(model, masks, *calibration(), RepairSettings(output=True))
        save_file({"down": weights(own)}, tmp_path / f"{rank}.safetensors")

    children = [forked(partial(work, rank)) for rank in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    first, second = (load_file(tmp_path / f"{rank}.safetensors")["down"] for rank in range(2))
    assert torch.equal(first, second)
    assert relative(first, weights(made)) < 1e-5


# Faults, planted one by one: a test above must see each.


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = NormalEquations.add
    assert off_by("phi") < RED / 100
    for fault in (
        lambda h, gap, residual: (h, -gap, residual),
        lambda h, gap, residual: (h, 2 * gap, residual),
        lambda h, gap, residual: (h, gap, torch.ones_like(residual)),
        lambda h, gap, residual: (h, gap, residual.sign() * residual.square().sum(-1, keepdim=True)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(NormalEquations, "add", lambda self, *args, f=fault: add(self, *f(*args)))
            assert off_by("phi") > RED
    with monkeypatch.context() as patch:
        patch.setitem(repairing.STREAM_SHARE, "half", 0.4)
        assert off_by("llama") > RED
    # the stream goes on with the dense matrix: the next layer is fitted to what it will never see
    change = repairing.F.linear
    monkeypatch.setattr(
        repairing.F,
        "linear",
        lambda x, w, *b: 0 * change(x, w, *b) if not b and w.dtype == x.dtype else change(x, w, *b),
    )
    assert off_by("llama") > RED
