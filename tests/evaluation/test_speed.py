"""`tomoe benchmark`: what is counted equals closed forms; what is timed is only asked for its structure."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from conftest import make_pico, make_plan, tokens
from pico_files import CommandLine, refused
from tomoe.evaluation.speed import throughput, timings
from tomoe.evaluation.speed.same_kernel import backends_of, run_everything, set_to
from tomoe.evaluation.speed.throughput import STEPS, Pair
from tomoe.evaluation.speed.timings import Benchmark, Cell, Memory
from tomoe.methods.inputs import plan_inputs
from tomoe.model.structure import CACHE, shape_of
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import BACKENDS, FEW_TOKENS, choices_of

D, C, LAYERS, KV, VOCAB = 32, 8, 2, 2, 64  # the pico qwen2


@pytest.fixture(scope="module")
def pair() -> Pair:
    dense = make_pico("qwen2")
    dense.set_attn_implementation("eager")
    moe = fold(dense, make_plan(dense, "static"))
    return Pair(dense, moe, tokens(4, 64)[0], max_seconds=60.0, pairs=3)


def test_a_long_prompt_uses_all_inputs_so_nothing_bounds_it(pair: Pair, inputs: Any) -> None:
    cell = replace(pair, moe=inputs, max_seconds=1e6).measure("prefill", 1, FEW_TOKENS + 1)
    assert cell is not None
    assert cell.bound == 1.0


# Operators that take rows by number, and which argument holds the numbers.
TAKES_ROWS = {torch.ops.aten.index_select.default: 2, torch.ops.aten.embedding.default: 1}


class RowsRead(TorchDispatchMode):
    """Notes which rows of a model's weights the operators of a pass read. Views read nothing."""

    def __init__(self, model: nn.Module):
        super().__init__()
        weights = {id(t): t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()}.values()
        self.found = {t.untyped_storage().data_ptr(): (t, torch.zeros(len(t), dtype=torch.bool)) for t in weights}
        assert len(self.found) == len(weights), "one storage for each"

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in [] if op.is_view else tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self.found:
                weight, rows = self.found[tensor.untyped_storage().data_ptr()]
                first, width = tensor.storage_offset(), weight[0].numel()
                last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                whole = slice(first // width, last // width + 1)
                rows[args[TAKES_ROWS[op]].flatten().long() if op in TAKES_ROWS else whole] = True
        return op(*args, **(kwargs or {}))

    def bytes(self) -> int:
        return sum(int(rows.sum()) * t[0].numel() * t.element_size() for t, rows in self.found.values())


@pytest.mark.parametrize(
    ("family", "form", "attention", "size"),
    [
        ("qwen2", "fine", "off", (1, 1)),
        ("qwen2", "fine, a whole layer", "off", (3, 4)),
        ("llama3", "fine", "off", (1, 2)),
        ("qwen2", "overlapping", "static", (3, 4)),
        ("llama3", "overlapping", "static", (1, 1)),
    ],
    ids=lambda value: {"qwen2": "an output matrix of its own", "llama3": "tied"}.get(str(value)),
)
def test_bytes_are_the_rows_that_operators_read(
    family: str, form: str, attention: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = make_pico(family)
    moe = fold(dense, make_plan(dense, attention, form=form.split(",")[0]))
    if "whole" in form:
        moe.config.tomoe_experts_per_token[0] = moe.config.tomoe_num_experts
    moe.config.tomoe_expert_backend = "runs"
    ids = tokens(*size)
    for step in ("router logits", "logits"):  # products that PyTorch sees
        *_, last = BACKENDS[step]
        monkeypatch.setitem(BACKENDS, step, {last: BACKENDS[step][last]})
    for model, begun in ((dense, 0), (moe, 0), (moe, 3)):
        # routing depends on what came before
        kept = throughput.prefill(model, tokens(size[0], begun, seed=3)) if begun else None
        past = {CACHE: copy.deepcopy(kept or DynamicCache())}
        with torch.no_grad(), RowsRead(model) as read:
            model(ids, use_cache=True, logits_to_keep=1, **past)
        lists = sum(t.numel() * t.element_size() for t in model.state_dict().values() if not t.is_floating_point())
        assert throughput.touched_bytes(model, ids, kept) == read.bytes() + lists
    if size == (1, 1):
        assert read.bytes() + lists < throughput.weight_bytes(moe) - (family == "qwen2") * (VOCAB - 1) * D * 4


@pytest.fixture(scope="module")
def inputs(pair: Pair) -> Any:
    """The dense model of the pair, whose tokens choose inputs."""
    ids = tokens(2, 24, seed=4)
    moe = fold(
        pair.dense, plan_inputs(pair.dense, shape_of(pair.dense), ids, torch.ones_like(ids, dtype=torch.bool), 0.6)
    )
    assert all(choice.count < len(choice.norms) for choice in choices_of(moe))
    return moe


@pytest.mark.parametrize("batch", [1, 2])
def test_bytes_of_a_few_tokens_are_those_of_the_inputs_that_some_token_chooses(
    pair: Pair, inputs: Any, batch: int
) -> None:
    """Counted by sorting what the projections get. Many tokens read all inputs."""
    ids, unread = pair.rows(batch, 1), 0
    seen: dict[int, Tensor] = {}
    hooks = [
        choice.register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[0].flatten(0, -2)}))
        for i, (choice, _) in enumerate(inputs.choices())
    ]
    with torch.no_grad():
        inputs(ids)
    for hook in hooks:
        hook.remove()
    for i, (choice, projections) in enumerate(inputs.choices()):
        matrix = torch.cat([projection.weight for projection in projections])
        scores = seen[i].abs() * matrix.norm(dim=0).bfloat16().float()
        chosen = {int(n) for row in scores for n in row.argsort(descending=True)[: choice.count]}
        unread += (len(choice.norms) - len(chosen)) * len(matrix)
    assert unread > 0
    norms = sum(choice.norms.nbytes for choice in choices_of(inputs))
    assert throughput.touched_bytes(inputs, ids) == throughput.touched_bytes(pair.dense, ids) - 4 * unread + norms
    many = pair.rows(1, FEW_TOKENS + 1)
    assert throughput.touched_bytes(inputs, many) == throughput.touched_bytes(pair.dense, many) + norms


def test_cache_bytes(pair: Pair) -> None:
    ids = pair.rows(1, 7)
    assert throughput.cache_bytes_per_token(pair.dense, ids) == LAYERS * KV * 2 * C * 4
    config = pair.moe.config
    kept = sum(config.tomoe_qk_dims) + sum(config.tomoe_value_dims)
    assert kept < LAYERS * 2 * C
    assert throughput.cache_bytes_per_token(pair.moe, ids) == KV * kept * 4


def test_decoding_goes_on_from_the_prompt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed run starts at the same place and makes the logits of one pass over all."""
    ids = pair.rows(2, 9)
    meant = pair.moe(ids).logits[:, 5:]
    kept = throughput.prefill(pair.moe, ids[:, :5])
    made: list[Tensor] = []
    hook = pair.moe.lm_head.register_forward_hook(lambda _, __, out: made.append(out))
    for _ in range(2):
        made.clear()
        assert throughput.decode(pair.moe, kept, ids[:, 5:]) > 0
        torch.testing.assert_close(torch.cat(made, 1), meant, atol=1e-4, rtol=0)
    hook.remove()


def test_compiled_decoding_makes_the_same_logits_with_a_static_cache(pair: Pair) -> None:
    """As on a GPU, where what is compiled is timed beside the model as it is; here nothing is changed."""
    made: list[Tensor] = []
    asked: list[object] = []

    def compiled(model: Any) -> Any:
        asked.append(model)

        def step(*args: Any, **kwargs: Any) -> Any:
            out = model(*args, **kwargs)
            if model is pair.moe:
                made.append(out.logits)
            return out

        return step

    both = replace(pair, compiled=compiled, max_seconds=1e6)
    assert both.phases == ("prefill", "decode", "compiled decode")
    cell = both.measure("compiled decode", 2, 5)
    assert isinstance(cell, Cell)
    assert (cell.phase, asked) == ("compiled decode", [pair.dense, pair.moe])
    assert (cell.same_kernel_s, cell.choice_ratio) == (None, None)
    ids = pair.rows(2, 5 + STEPS)
    meant = pair.moe(ids).logits[:, 5:]
    for first in range(0, len(made), STEPS):
        torch.testing.assert_close(torch.cat(made[first : first + STEPS], 1), meant, atol=1e-4, rtol=0)
    eager = both.measure("decode", 2, 5)
    assert eager is not None
    assert cell.dense_bytes == eager.dense_bytes


def test_rows_are_the_text_again_and_again(pair: Pair) -> None:
    rows = pair.rows(3, 50)
    assert torch.equal(rows.flatten(), torch.cat([pair.ids] * 3)[:150])


def test_cells(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are scripted: the dense model takes 6, 8, 9 s, the MoE 2, 4, 9 s, with all experts 3, 5, 9 s, after a warm-up that
    does not count."""
    script = iter([100.0, 100.0, 100.0, 6.0, 2.0, 3.0, 8.0, 4.0, 5.0, 9.0, 9.0, 9.0])
    used: list[int] = []
    hook = pair.moe.mlps()[0].register_forward_pre_hook(lambda mlp, _: used.append(mlp.expert_rows.shape[1]))
    monkeypatch.setattr(throughput, "seconds", lambda run, device: (run(), next(script))[1])
    cell = replace(pair, max_seconds=1e6).measure("prefill", 2, 8)
    hook.remove()
    assert isinstance(cell, Cell)
    chosen, whole = pair.moe.config.tomoe_expert_sizes[0], pair.moe.config.tomoe_union_sizes[0]
    assert used[:8] == [chosen, whole] * 4
    assert set(used[8:]) == {chosen}, "what is counted is the MoE as it is"
    assert (cell.same_kernel_s, cell.choice_ratio) == (5.0, 1.25)
    assert (cell.dense_s, cell.moe_s, cell.ratio) == (8.0, 4.0, 2.0)
    assert (cell.ratio_low, cell.ratio_high) == (1.5, 2.5)
    assert (cell.phase, cell.batch, cell.prompt, cell.dtype, cell.runs) == ("prefill", 2, 8, "float32", 3)
    assert cell.bound == pytest.approx(1 / make_plan(pair.dense, "static").active_fraction())
    assert (cell.backend, cell.verdict) == (backends_of(pair.moe, 16), "faster")
    assert replace(cell, ratio_low=0.9).verdict == "even"
    assert replace(cell, ratio_low=0.7, ratio_high=0.9).verdict == "SLOWER"


def test_all_cells_and_what_would_take_too_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[int, int]] = []
    # A pass takes one second for each of its tokens, whatever it computes.
    monkeypatch.setattr(Pair, "measure", lambda self, phase, batch, prompt: some_cell(phase, batch, prompt))
    cells, left_out = throughput.run_cells(pair, [1, 8], [2, 6], lambda *at: progress.append(at))
    assert [(c.phase, c.batch, c.prompt) for c in cells] == [
        ("prefill", 1, 2),
        ("decode", 1, 2),
        ("prefill", 1, 6),
        ("decode", 1, 6),
        ("decode", 8, 2),
    ]
    assert left_out == ["prefill of 8 x 2 tokens", "prefill of 8 x 6 tokens", "decode of 8 x 6 tokens"]
    memory = Memory(1, 1, 1)
    said = timings.footnote(Benchmark("dense", "moe", "text", None, memory, memory, (), tuple(left_out), {}))
    assert "prefill of 8 x 6 tokens, decode of 8 x 6 tokens" in said
    assert progress == [(i, 8) for i in range(9)]


def some_cell(phase: str, batch: int, prompt: int) -> Cell:
    count = float(batch * (prompt if phase == "prefill" else 1))
    return Cell(phase, batch, prompt, "float32", "cpu", 1, "runs", 3, count, count, 1.0, 0.8, 0.9, 8, 4, 2.0)


def test_a_cell_that_is_too_slow_is_left_out(pair: Pair) -> None:
    assert replace(pair, max_seconds=1e-9).measure("decode", 1, 8) is None


def test_which_backend_the_experts_run_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = pair.moe
    assert backends_of(pair.dense, 4) == "-"
    assert backends_of(moe, 4) in BACKENDS["experts"]
    # without kernels of the package
    monkeypatch.setitem(BACKENDS, "experts", {name: BACKENDS["experts"][name] for name in ("runs", "masked")})
    assert [backends_of(moe, n) for n in (4, 4000)] == ["masked", "runs"]
    monkeypatch.setattr(moe.config, "tomoe_expert_backend", "runs")
    assert backends_of(moe, 4) == "runs"


@pytest.mark.parametrize("backend", ["native", "masked", "runs"])
@pytest.mark.parametrize("form", ["fine", "overlapping"])
def test_all_experts_run_on_the_backend_of_those_that_tokens_choose(pair: Pair, form: str, backend: str) -> None:
    moe = fold(pair.dense, make_plan(pair.dense, "off", form=form))
    whole, ids, found = run_everything(moe, backend), pair.rows(2, 4), []
    assert whole is not None
    hooks = [mlp.register_forward_hook(lambda *called: found.append(called)) for mlp in moe.mlps()]
    with torch.no_grad():
        before = moe(ids).logits
        for _ in range(2):
            found.clear()
            with set_to(whole):
                assert backends_of(moe, 8) == backend
                moe(ids)
            for mlp, (x,), y in found:
                meant = mlp.activations(x, slice(None)) @ mlp.down_proj
                torch.testing.assert_close(y, meant, atol=1e-5 * float(meant.abs().max()), rtol=0)
            assert torch.equal(moe(ids).logits, before)
    for hook in hooks:
        hook.remove()


def test_all_inputs_run_on_the_backend_of_those_that_tokens_choose(pair: Pair, inputs: Any) -> None:
    assert backends_of(inputs, 1) == backends_of(inputs, FEW_TOKENS + 1) == "masked"
    with set_to([(inputs.config, "tomoe_prompts", "whole")]):
        assert backends_of(inputs, 1) == "masked"
        assert run_everything(inputs, backends_of(inputs, FEW_TOKENS + 1)) is None, "such a pass uses all inputs"
    whole, ids = run_everything(inputs, backends_of(inputs, 1)), pair.rows(1, 1)
    assert whole is not None
    with torch.no_grad():
        meant, before = pair.dense(ids).logits, inputs(ids).logits
        with set_to(whole):
            found = inputs(ids).logits
        assert torch.equal(inputs(ids).logits, before)
    torch.testing.assert_close(found, meant, atol=1e-5 * float(meant.abs().max()), rtol=0)
    assert not torch.allclose(before, meant, atol=1e-3)


def test_nothing_is_timed_again_where_several_backends_ran(pair: Pair) -> None:
    assert run_everything(pair.dense, backends_of(pair.dense, 1)) is None
    assert run_everything(pair.moe, "native, masked") is None


@pytest.mark.slow
def test_the_command(tomoe: CommandLine, tmp_path: Path, converted: Path) -> None:
    model, moe = converted / "dense", converted / "moe"
    written = tmp_path / "speed.json"
    options = "--batch 1,3 --prompt 8 --pairs 3 --dtype float32 --threads 1".split()
    done = tomoe("benchmark", model, moe, *options, "--json", written)
    assert done.code == 0, done.err
    found = json.loads(written.read_text())
    assert found["format"] == timings.FORMAT
    assert (found["dense"], found["moe"]) == ("dense", "moe")
    assert found["active_share"] == pytest.approx(0.6, abs=0.002)
    sizes = [(phase, batch, 8) for batch in (1, 3) for phase in ("prefill", "decode")]
    assert [(c["phase"], c["batch"], c["prompt"]) for c in found["cells"]] == sizes
    for cell in found["cells"]:
        assert {"dtype", "dense_s", "moe_s", "ratio", "ratio_low", "ratio_high", "verdict", "backend"} <= set(cell)
        assert min(cell["same_kernel_s"], cell["choice_ratio"]) > 0
        assert cell["ratio_low"] <= cell["ratio"] <= cell["ratio_high"]
        assert cell["moe_bytes"] < cell["dense_bytes"]
    operations = [found[name]["flops_per_token"] for name in ("dense_memory", "moe_memory")]
    assert operations[1] / operations[0] == pytest.approx(found["active_share"], abs=1e-6)
    weights = load_file(model / "model.safetensors")
    assert operations[0] == 2 * sum(w.numel() for name, w in weights.items() if "layers" in name and w.dim() == 2)
    shown = " ".join(done.out.split())  # wherever lines end
    for words in ("prefill", "decode", "bound", "cache", "GFLOP", "held out", "All, same kernel"):
        assert words in shown
    assert "60.0% of the decoder parameters" in shown
    refused(tomoe("benchmark", model, moe, "--batch", "1,x"), "'1,x'", "whole numbers")
    assert tomoe("benchmark", model, model).code == 2
