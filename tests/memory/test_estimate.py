"""Memory by arithmetic, compared with real tensors; and a run that cannot fit does not begin."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from conftest import PICO, make_pico, make_plan, mask_step, tokens
from pico_files import CommandLine, small, write_pico
from tomoe.data.corpus import Sequences
from tomoe.errors import UserError
from tomoe.memory import estimate
from tomoe.methods.inputs import input_costs
from tomoe.methods.registry import resolve_method
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.method import ToMoE, new_network, trainable_bytes
from tomoe.methods.tomoe.networks import mask_network
from tomoe.model import base_weights
from tomoe.model.activation_memory import activation_bytes
from tomoe.model.loading import load_config
from tomoe.model.projections import groups_of
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.plans.partition import experts as partition
from tomoe.plans.partition.elimination import elimination_bytes
from tomoe.plans.partition.experts import fine_bytes
from tomoe.plans.partition.layouts import FineLayout, Layout, OverlappingLayout, layout_of
from tomoe.plans.repair.equations import FewTokens, NormalEquations, refit
from tomoe.plans.repair.plan import repair_plan
from tomoe.recipe.conversion import Recipe, RepairSection
from tomoe.recipe.shared import DataSection
from tomoe.training.loop import activation_checkpointing, make_optimizer

LAYOUT = OverlappingLayout(num_experts=4, width_multiple=1)
WIDE = {"num_hidden_layers": 6, "intermediate_size": 512, "hidden_size": 64}


def a_recipe(*changes: str) -> Recipe:
    experts = ("form=overlapping", "num_experts=4", "embedding_size=8", "width_multiple=1")
    sizes = [f"experts.{size}" for size in experts]
    return Recipe.load(None, ["train.steps=500", "train.dtype=float32", "data.seq_len=128", *sizes, *changes])


class _Kept(Exception):
    """Raised in place of the backward pass."""


class Peak(TorchDispatchMode):
    """The most bytes, to 1 %, that tensors made inside the block held at once, except views of those that are `known`."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {t.untyped_storage()._cdata for t in known}
        self.bytes = 0
        self.bound = 0  # as if nothing had been freed since `now` was last asked

    def now(self) -> int:
        self.held = {place: held for place, held in self.held.items() if not held[0].expired()}
        self.bound = sum(size for _, size in self.held.values())
        return self.bound

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known and storage._cdata not in self.held:
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.bound += storage.nbytes()
        # to look at all of them after every operation takes seconds
        if self.bound > 1.01 * self.bytes:
            self.bytes = max(self.bytes, self.now())
        return made


def kept_for_backward(family: str, recipe: Recipe, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of all tensors of 256 tokens that are held when a forward pass is over, weights not counted."""
    model = make_pico(family, **WIDE).to(dtype)
    net = mask_network(shape_of(model), LAYOUT, recipe.experts.embedding_size, recipe.attention, recipe.sampling, 0)
    held = 0

    def stop(*_: object) -> None:
        nonlocal held
        held = peak.now()
        raise _Kept

    monkeypatch.setattr(torch.Tensor, "backward", stop)
    ids = tokens(2, recipe.data.seq_len)
    checkpointing = activation_checkpointing(model) if recipe.train.gradient_checkpointing else nullcontext()
    with pytest.raises(_Kept), checkpointing, Peak([*model.parameters(), *net.parameters()]) as peak:
        mask_step(model, net, recipe)(Sequences(ids, torch.ones_like(ids, dtype=torch.bool)), 0, 0)
    return held


@pytest.mark.parametrize(
    ("family", "dtype", "attention"),
    [("llama", torch.bfloat16, "off"), ("llama", torch.bfloat16, "static"), ("qwen2", torch.float32, "per_token")],
)
def test_what_waits_for_the_backward_pass(
    family: str, dtype: torch.dtype, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_recipe(f"attention.pruning={attention}", "attention.rotate_values=false")
    shape = shape_of(make_pico(family, **WIDE))
    kept = kept_for_backward(family, recipe, dtype, monkeypatch)
    drawn = ToMoE().peak(recipe, shape, dtype, PICO["vocab_size"])["masks of experts"]
    counted = activation_bytes(shape, dtype, 256, False, attention, 4)
    assert counted + drawn == pytest.approx(kept, rel=estimate.MARGIN)
    checkpointed = recipe.changed(["train.gradient_checkpointing=true"])
    kept = kept_for_backward(family, checkpointed, dtype, monkeypatch)
    # and a layer that runs again
    counted = activation_bytes(shape, dtype, 256, True, attention, 4) - counted * 2 // 11
    assert counted + drawn == pytest.approx(kept, rel=estimate.MARGIN)


@pytest.mark.parametrize("attention", ["off", "static", "per_token"])
def test_what_is_learned(attention: str) -> None:
    recipe, model = a_recipe(f"attention.pruning={attention}"), make_pico("qwen2")
    net = mask_network(shape_of(model), LAYOUT, recipe.experts.embedding_size, recipe.attention, recipe.sampling, 0)
    optimizer = make_optimizer(net, recipe.train)
    for p in net.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    held = [t for m in (net.parameters(), net.buffers()) for t in m]
    held += [p.grad for p in net.parameters() if p.grad is not None]
    held += [t for slots in optimizer.state.values() for key, t in slots.items() if key != "step"]
    assert trainable_bytes(net, learns=True) == sum(t.nbytes for t in held)
    stored = sum(t.nbytes for m in (net.parameters(), net.buffers()) for t in m)
    assert trainable_bytes(net, learns=False) == stored


def held_by_the_carve(layout: Layout, shape: ModelShape, dtype: torch.dtype, tokens: int) -> int:
    if isinstance(layout, FineLayout):
        return fine_bytes(shape, layout, dtype, tokens)
    return elimination_bytes(shape, layout.num_experts, dtype, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "experts", "active"), [("fine", 64, 0.625), ("overlapping", 2, 0.627)])
def test_what_a_carve_holds_of_all_calibration_tokens(
    form: str, experts: int, active: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "ERROR_TOKENS", 16)
    sizes = [f"experts.form={form}", f"experts.num_experts={experts}", f"active={active}"]
    sizes.append("data.calibration_tokens=2048")
    recipe, model = Recipe.load(None, sizes), make_pico("llama", intermediate_size=256).to(dtype)
    layout = layout_of(recipe, shape_of(model))
    net = new_network(recipe, model)
    ids = tokens(64, 32)
    of_all = shape_of(model), dtype, recipe.data.calibration_tokens
    counted = held_by_the_carve(layout, *of_all)
    with Peak(model.parameters()) as peak:
        carve_(net, model, ids, torch.ones_like(ids, dtype=torch.bool), recipe.active, 0)
    assert counted == pytest.approx(peak.bytes, rel=estimate.MARGIN)


@pytest.mark.parametrize("vocab_size", [64, 4096])
def test_choosing_inputs_holds_one_sequence_at_a_time(vocab_size: int) -> None:
    model = make_pico("qwen2", **WIDE, vocab_size=vocab_size)
    inputs, recipe = resolve_method(Recipe.load(None, ["method.name=inputs", "train.dtype=float32"]))
    choosing, _ = estimate.least_memory(estimate.sizes_of(model.config, recipe), inputs, recipe)
    ids = tokens(3, recipe.data.seq_len)
    with Peak(model.parameters()) as peak:
        input_costs(model, groups_of(model), ids, torch.ones_like(ids, dtype=torch.bool), seed=0)
    counted = choosing.total - choosing.parts["weights in float32"]
    assert counted == pytest.approx(peak.bytes, rel=estimate.MARGIN)


def test_weights_and_shares_of_them() -> None:
    model, recipe = make_pico("qwen2"), a_recipe()
    sizes = estimate.sizes_of(model.config, recipe)
    assert sizes.shape == shape_of(model)
    assert sizes.output == model.lm_head.weight.numel()
    assert sizes.of_all(1.0) == 1.0
    assert sizes.of_all(0.0) == pytest.approx(1 - sizes.decoder_params / sizes.total)
    whole, halves, quarters = (estimate.base_bytes(sizes, torch.float32, shards=n) for n in (1, 2, 4))
    assert whole == sum(p.nbytes for p in model.parameters()) > halves > quarters
    runs = sizes.decoder_params // 2 + sizes.output  # one of two layers, and the output matrix
    assert quarters == pytest.approx(4 * (runs + (sizes.total - runs) / 4), abs=4)
    assert 2 * estimate.base_bytes(sizes, torch.bfloat16) == whole


def free(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    """So many bytes are free."""
    found = estimate.AvailableMemory(int(memory), 0)
    monkeypatch.setattr(estimate, "available_memory", lambda device: found)


def too_little(need: estimate.MemoryEstimate) -> int:
    """The most memory in which it is not tried."""
    return int((1 - estimate.MARGIN) * need.total) - 1


@pytest.mark.slow
def test_a_run_that_cannot_fit_does_not_begin(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.load(None, [f"model={model}", *small()[1::2]])
    training, *_ = stages(model, recipe)
    command = [model, "--data", text, *small(), "-o", tmp_path / "out"]
    free(monkeypatch, too_little(training))
    for name in ("train", "convert"):
        refused = tomoe(name, *command)
        assert refused.code == 2
        assert refused.err.count("\n") == 1
        assert refused.err.startswith("tomoe: training needs about ")
        for words in ("kB for weights in float32", "of main memory", f"tomoe doctor {model}", "--skip-memory-check"):
            assert words in refused.err
        assert not (tmp_path / "out").exists()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    free(monkeypatch, 4 * too_little(training))
    assert "in each of 4 processes" in tomoe("train", *command).err
    assert tomoe("train", *command, "--skip-memory-check").code == 0


@pytest.mark.parametrize("mode", ["full", "low_rank"])
def test_repair_counts_streams_and_the_plan(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both terms are what the repair of a model really holds; low rank makes the plan small."""
    model = make_pico("qwen2", intermediate_size=256)
    recipe = a_recipe(f"repair.mode={mode}", "repair.tokens=64", "repair.rank=3", "data.seq_len=16")
    streams: list[torch.Tensor] = []
    empty = torch.empty

    def storing(*args: object, **options: object) -> torch.Tensor:
        streams.append(empty(*args, **options))
        return streams[-1]

    monkeypatch.setattr(torch, "empty", storing)
    ids = tokens(4, 16)
    plan = repair_plan(make_plan(model, "off"), model, ids, torch.ones_like(ids, dtype=torch.bool), recipe.repair)
    sizes = estimate.sizes_of(model.config, recipe)
    carving, repair, folding = estimate.least_memory(sizes, *resolve_method(recipe.changed(["train.steps=0"])))
    assert (carving.stage, repair.stage, folding.stage) == ("carving", "repair", "folding")
    assert repair.parts["hidden states"] == sum(t.nbytes for t in streams if t.shape[:2] == ids.shape)
    refits = sum(t.nbytes for layer in plan.layers for t in layer.refit.values())
    assert repair.parts["refitted projections"] == folding.parts["refitted projections"] == refits
    assert refits < 4 * 2 * 32 * 256 or mode == "full"
    bare = estimate.least_memory(sizes, *resolve_method(recipe.changed(["train.steps=0", "repair.mode=none"])))
    assert [need.stage for need in bare] == ["carving", "folding"]
    assert folding.total - bare[1].total == refits


@pytest.mark.parametrize("tokens", [128, 1024])
def test_what_the_equations_of_a_layer_hold(tokens: int) -> None:
    shape = shape_of(make_pico("llama", intermediate_size=512))
    hidden, device = shape.hidden_size, torch.device("cpu")
    h, gap = torch.zeros(tokens, 512), torch.ones(tokens, hidden)
    h.fill_diagonal_(1.0)
    with Peak((h, gap)) as peak:
        few = tokens < 512
        sums = FewTokens(512, hidden, tokens, device) if few else NormalEquations(512, hidden, device)
        for chunk in range(0, tokens, 32):
            sums.add(*(t[chunk : chunk + 32] for t in (h, gap, gap)))
        refit(torch.zeros(hidden, 512), sums, ridge=0.1)
    assert estimate.equation_bytes(shape, tokens, RepairSection()) == pytest.approx(peak.bytes, rel=estimate.MARGIN)


def test_hidden_states_in_a_file_take_no_memory() -> None:
    shape = shape_of(make_pico("llama"))

    def counted(tokens: int, steps: int) -> int:
        repair, data = RepairSection(tokens=tokens), DataSection(tokens=2 * tokens)
        return estimate.hidden_state_bytes(shape, torch.float32, repair, steps, data)

    assert counted(100_000, steps=0) == 100_000 * (2 * 32 + shape.mlp_size) * 4
    # after learning a layer is fitted to its own dense output: one stream
    assert counted(100_000, steps=1) == 100_000 * (32 + shape.mlp_size) * 4
    assert counted(100_000_000, steps=1) == 0


def stages(folder: Path, recipe: Recipe) -> tuple[estimate.MemoryEstimate, ...]:
    """What converting the model in a folder needs."""
    sizes = estimate.sizes_of(load_config(str(folder)), recipe)
    return estimate.least_memory(sizes, *resolve_method(recipe))


@pytest.mark.parametrize(
    ("layers", "changes", "words"),
    [
        (2, ("repair.mode=full",), "repair needs about .* for normal equations"),
        (12, ("repair.mode=none", "data.calibration_tokens=1"), "folding needs"),
    ],
)
def test_what_cannot_fit_after_the_start_does_not_begin(
    layers: int, changes: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_pico(tmp_path / "dense", num_hidden_layers=layers)
    recipe = Recipe.load(None, [f"model={folder}", *small(train_steps="0")[1::2], *changes])
    carving, most, *_ = stages(folder, recipe)
    assert most.total > carving.total
    free(monkeypatch, too_little(most))
    # `tomoe train` learns only
    estimate.check_memory(recipe, folds=False)
    with pytest.raises(UserError, match=words):
        estimate.check_memory(recipe, folds=True)
    free(monkeypatch, too_little(most) + 2)
    estimate.check_memory(recipe, folds=True)


def test_what_is_read_layer_by_layer_needs_the_memory_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = write_pico(tmp_path / "dense", num_hidden_layers=6)
    changes = ["train.steps=0", "repair.mode=full", "data.sources=text.txt"]
    whole, offloaded = (
        Recipe.load(None, [f"model={dense}", *small()[1::2], *changes, f"offload={offload}"])
        for offload in ("false", "true")
    )
    most, layer = (max(stages(dense, recipe), key=lambda need: need.total) for recipe in (whole, offloaded))
    sizes = estimate.sizes_of(load_config(str(dense)), whole)
    assert most.total - layer.total == 4 * sizes.decoder_params * 5 // 6
    free(monkeypatch, too_little(most))
    with pytest.raises(UserError, match="use offload=True to hold one layer at a time"):
        estimate.check_memory(whole, folds=True)
    estimate.check_memory(offloaded, folds=True)


def test_a_config_that_claims_too_much_is_found_before_it_is_counted(tmp_path: Path) -> None:
    folder = write_pico(tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(UserError, match="1,000,000,000 layers by its config"):
        estimate.check_memory(a_recipe(f"model={folder}"), folds=False)


def test_counting_needs_the_config_alone(tomoe: CommandLine, tmp_path: Path) -> None:
    make_pico("llama", intermediate_size=512).config.save_pretrained(tmp_path / "paper")
    # a budget that widths of whole multiples meet
    done = tomoe("doctor", tmp_path / "paper", "--active", "0.7115")
    assert done.code == 0, done.err
    assert "The structure fits: 2 layers" in done.out
    assert "carving" in done.out
    assert "Free now" in done.out
    found = json.loads(tomoe("doctor", tmp_path / "paper", "--active", "0.7115", "--json").out)
    assert [need["stage"] for need in found["least"]] == ["carving", "repair", "folding"]
    assert found["sizes"]["shape"]["num_layers"] == 2
    assert found["lacking"] == found["remedies"] == []
    learning = tomoe("doctor", tmp_path / "paper", "--active", "0.7115", "--set", "train.steps=1", "--json")
    assert [need["stage"] for need in json.loads(learning.out)["least"]] == ["training", "repair", "folding"]


def test_limits_of_the_group_and_of_those_around_it(tmp_path: Path) -> None:
    own, job = tmp_path / "own", tmp_path / "fs" / "slurm" / "job_1"
    (job / "step_0").mkdir(parents=True)
    own.write_text("0::/slurm/job_1/step_0\n1:cpu:/elsewhere\n")
    for group, most, used in ((job, "1000", "700"), (job / "step_0", "max", "600")):
        (group / "memory.max").write_text(most + "\n")
        (group / "memory.current").write_text(used + "\n")
        (group / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert list(estimate._left_in_cgroups(tmp_path / "fs", own)) == [1000 - 700 + 150]


def test_limits_of_the_older_groups(tmp_path: Path) -> None:
    own, group = tmp_path / "own", tmp_path / "fs" / "memory" / "job"
    group.mkdir(parents=True)
    own.write_text("4:memory:/job\n0::/\n")
    for name, value in (("limit_in_bytes", "500"), ("usage_in_bytes", "450"), ("stat", "total_inactive_file 20\n")):
        (group / f"memory.{name}").write_text(value)
    assert list(estimate._left_in_cgroups(tmp_path / "fs", own)) == [70]
    assert list(estimate._left_in_cgroups(tmp_path / "fs", tmp_path / "none")) == []


def test_the_measured_peaks_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """7.7 billion parameters in bfloat16 on a GPU: 36 GB there in the paper's training, 18 GB of main memory in a conversion."""
    monkeypatch.setattr(base_weights, "pick_device", lambda name: "cuda")
    # it runs a whole MLP of the model
    monkeypatch.setattr(estimate, "check_without_weights", lambda model: None)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=151936
    )
    paper, default = Recipe.load("paper", ["active=0.5"]), Recipe(active=0.5)
    sizes = estimate.sizes_of(config, paper)
    training, *_ = estimate.least_memory(sizes, *resolve_method(paper))
    assert training.total == pytest.approx(36e9, rel=estimate.MARGIN)
    assert estimate.main_memory(estimate.sizes_of(config, default), default).total == pytest.approx(
        18e9, rel=estimate.MARGIN
    )


def test_the_measured_peak_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M learned from 512 tokens a step on a CPU in 1.63 GB, 0.6 GB of them Python and PyTorch."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    changes = ["experts.form=overlapping", "train.steps=500", "train.compute_dtype=stored", "repair.mode=none"]
    recipe = Recipe.load(None, [*changes, "device=cpu", "data.seq_len=512"])
    sizes = estimate.sizes_of(config, recipe)
    training, *_ = estimate.least_memory(sizes, *resolve_method(recipe))
    assert training.total + 0.6e9 == pytest.approx(1.63e9, rel=estimate.MARGIN)
