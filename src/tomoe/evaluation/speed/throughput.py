"""Speed of two causal LMs compared: prefill and decoding, in one process, run after run.

Times of shared machines drift, so only neighbours are compared: dense, MoE, the MoE with everything in the same kernel, dense
and so on; a ratio is of one such round. Beside the times stands what can be counted: bytes of weights that a pass reads, bytes
of the cache.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import transformers
from jaxtyping import Int
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from tomoe.data.evaluation_text import held_out_text, load_text
from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.speed.same_kernel import backends_of, run_everything, set_to
from tomoe.evaluation.speed.timings import Benchmark, Cell, Memory
from tomoe.evaluation.usage import ExpertCounter
from tomoe.files import basename
from tomoe.model.hooks import hooked, own_rows
from tomoe.model.loading import load_model, load_tokenizer
from tomoe.model.shape import ceil_div
from tomoe.model.structure import CACHE
from tomoe.moe.active_experts import apply_setting_, runtime_settings
from tomoe.moe.kernels import prepare
from tomoe.moe.modeling_tomoe import Choice, choices_of, few, matrix_of, which_inputs
from tomoe.progress import ProgressCallback, StageCallback, no_progress, no_stage_progress, stage_callback
from tomoe.version import __version__

STEPS = 4  # tokens that one timed run decodes
COMPILED = "compiled decode"
FEWEST = 3  # pairs of runs below which a median says nothing


def weight_bytes(model: nn.Module) -> int:
    """Count bytes of all parameters and of the persistent buffers, tied ones once."""
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def cache_bytes_per_token(model: Any, ids: Int[Tensor, "1 S"]) -> int:
    """Count bytes of K and V in the cache per token, over all layers."""
    layers = cast(Any, prefill(model, ids)).layers
    return sum(t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values)) // ids.shape[1]


@torch.no_grad()
def prefill(model: Any, ids: Int[Tensor, "B S"]) -> DynamicCache:
    """Return keys and values of every layer for the rows `ids`, with the logits of the last token made as in generation."""
    cache = DynamicCache()
    with own_rows(model):
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return cache


@torch.no_grad()
def decode(model: Any, kept: DynamicCache, ids: Int[Tensor, "B K"]) -> float:
    """Return the seconds per step for decoding the tokens `ids` one by one with this cache."""
    cache = copy.deepcopy(kept)  # no run sees what another one added
    return seconds(lambda: _steps(model, cache, ids), ids.device) / ids.shape[1]


def _steps(model: Any, cache: DynamicCache | StaticCache, ids: Int[Tensor, "B K"]) -> None:
    for column in ids.split(1, 1):
        model(column, use_cache=True, logits_to_keep=1, **{CACHE: cache})


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the wall time of `run`, a GPU's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@contextmanager
def _unread(model: Any) -> Iterator[list[int]]:
    """Count bytes of weights whose inputs no token of a short pass chooses: one number per choice. Longer passes read
    everything."""
    unread: list[int] = []

    def note(choice: Choice, projections: Sequence[Any]) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor]) -> None:
            x = args[0]
            if few(x) and choice.applies(x):
                used = which_inputs(x, choice.norms, choice.count).flatten(0, -2).any(0)
                outputs = sum(len(matrix_of(projection)) for projection in projections)
                unread.append(int((~used).sum()) * outputs * projections[0].weight.element_size())

        return hook

    choices = model.choices() if choices_of(model) else ()
    # before the choice's own hook, which leaves zeros
    with hooked(
        projections[0].register_forward_pre_hook(note(choice, projections), prepend=True)
        for choice, projections in choices
    ):
        yield unread


@torch.no_grad()
def touched_bytes(model: Any, ids: Int[Tensor, "B S"], kept: DynamicCache | None = None) -> int:
    """Count bytes of weights that one pass over these tokens with this cache reads, if each is read once: their rows of the input
    embedding, neurons that some token needs or all share, inputs that some token chooses, and everything else."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    rows = 0 if tied else len(ids.unique())
    total = weight_bytes(model) - (0 if tied else (len(table) - rows) * table[0].numel() * table.element_size())
    counter = ExpertCounter(model)
    with counter.watching(), _unread(model) as unread:
        if not counter.top_ks and not choices_of(model):
            return total
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE: copy.deepcopy(kept or DynamicCache())})
        total -= sum(unread)
        for mlp in model.mlps():
            used = counter.chosen[mlp.router].any(0).cpu()
            union = mlp.up_proj.shape[0]
            working = mlp.shared_size + len(mlp.expert_rows.cpu()[used].unique())
            neurons = [t for t in mlp.parameters() if t.dim() and t.shape[0] == union]
            total -= sum((union - working) * t[0].numel() * t.element_size() for t in neurons)
    return total


@dataclass
class Pair:
    """Both models, and the text for timing."""

    dense: Any
    moe: Any
    ids: Int[Tensor, " T"]
    max_seconds: float  # of one cell
    pairs: int
    compiled: Callable[[Any], Any] | None = None
    """Makes what decodes with a static cache, beside the model as it is; None: nothing does."""

    @property
    def phases(self) -> tuple[str, ...]:
        return ("prefill", "decode", *([] if self.compiled is None else [COMPILED]))

    def rows(self, batch: int, length: int) -> Int[Tensor, "B S"]:
        """Different stretches of the text, starting over where it ends."""
        size = batch * length
        return self.ids.repeat(ceil_div(size, len(self.ids)))[:size].view(batch, length).to(self.dense.device)

    def measure(self, phase: str, batch: int, prompt: int) -> Cell | None:
        """Time a cell; None if it would take too long."""
        ids = self.rows(batch, prompt + STEPS)
        head, tail = ids[:, :prompt], ids[:, prompt:]
        device = head.device
        both = (self.dense, self.moe)
        kept = {id(model): DynamicCache() if phase == "prefill" else prefill(model, head) for model in both}
        static = self._static(head, tail) if phase == COMPILED else None

        def run(model: Any) -> float:
            if phase == "prefill":
                return seconds(lambda: prefill(model, head), device)
            return static(model) if static else decode(model, kept[id(model)], tail)

        ids = head if phase == "prefill" else tail[:, :1]
        all_active = None if phase == COMPILED else run_everything(self.moe, backends_of(self.moe, ids.numel()))

        def one_round() -> list[float]:
            timed = [run(self.dense), run(self.moe)]
            if all_active is not None:
                with set_to(all_active):
                    timed.append(run(self.moe))
            return timed

        spent = sum(one_round()) * (1 if phase == "prefill" else STEPS)  # warm-up
        rounds = min(self.pairs, int(self.max_seconds / spent)) if spent else self.pairs
        if rounds < FEWEST:
            return None
        timed = [one_round() for _ in range(rounds)]
        touched = [touched_bytes(model, ids, kept[id(model)]) for model in both]
        return self._cell(phase, ids, prompt, timed, touched)

    def _static(self, head: Int[Tensor, "B S"], tail: Int[Tensor, "B K"]) -> Callable[[Any], float]:
        """Seconds per step with a static cache, shared by all runs of a model, because its graph has its address."""
        assert self.compiled is not None
        both = (self.dense, self.moe)
        length = head.shape[1] + tail.shape[1]
        caches = {id(model): StaticCache(model.config, length) for model in both}
        steps = {id(model): self.compiled(model) for model in both}

        @torch.no_grad()
        def run(model: Any) -> float:
            cache = caches[id(model)]
            cache.reset()
            model(head, use_cache=True, logits_to_keep=1, **{CACHE: cache})
            return seconds(lambda: _steps(steps[id(model)], cache, tail), head.device) / tail.shape[1]

        for model in both:
            run(model)  # compiles
            run(model)  # records
        return run

    def _cell(
        self,
        phase: str,
        ids: Int[Tensor, "B S"],
        prompt: int,
        timed: Sequence[Sequence[float]],
        touched: Sequence[int],
    ) -> Cell:
        dense, moe, *all_active = zip(*timed, strict=True)
        ratios = _ratios(dense, moe)
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        backend = backends_of(self.moe, ids.numel())
        return Cell(
            phase=phase,
            batch=len(ids),
            prompt=prompt,
            dtype=str(self.dense.dtype).removeprefix("torch."),
            device=ids.device.type,
            threads=torch.get_num_threads(),
            backend=backend,
            runs=len(timed),
            dense_s=statistics.median(dense),
            moe_s=statistics.median(moe),
            ratio=statistics.median(ratios),
            ratio_low=low,
            ratio_high=high,
            dense_bytes=touched[0] // ids.numel(),
            moe_bytes=touched[1] // ids.numel(),
            bound=self._weights_bound(backend) if phase == "prefill" else touched[0] / touched[1],
            same_kernel_s=statistics.median(all_active[0]) if all_active else None,
            choice_ratio=statistics.median(_ratios(all_active[0], moe)) if all_active else None,
        )

    def _weights_bound(self, backend: str) -> float:
        """Ratio of the active decoder weights, of the dense model over the MoE's."""
        if choices_of(self.moe):
            # zeros in place of inputs that a token does not choose, or none
            return 1.0
        dense, moe = (model_facts(model)["active_block_params"] for model in (self.dense, self.moe))
        return dense / moe


def _ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(slow, fast, strict=True)]


def run_cells(
    pair: Pair, batches: Sequence[int], prompts: Sequence[int], progress: StageCallback = no_stage_progress
) -> tuple[list[Cell], list[str]]:
    """Time all cells, small ones first; return them, and the names of those that would take too long."""
    cells: list[Cell] = []
    left_out: list[str] = []
    sizes = sorted(((b, p) for b in batches for p in prompts), key=lambda size: size[0] * size[1])
    per_token = 0.0  # seconds of prefilling with both models, as last seen
    phases = pair.phases
    for done, (batch, prompt) in enumerate(sizes):
        expected = per_token * batch * prompt
        for i, phase in enumerate(phases):
            progress(len(phases) * done + i, len(phases) * len(sizes))
            # A decoding cell needs its cache filled by one prefill, a prefill cell a warm-up and the fewest pairs.
            too_slow = expected * (1 + FEWEST if phase == "prefill" else 1) > pair.max_seconds
            cell = None if too_slow else pair.measure(phase, batch, prompt)
            if cell is None:
                left_out.append(f"{phase} of {batch} x {prompt} tokens")
                continue
            cells.append(cell)
            if phase == "prefill":
                per_token = (cell.dense_s + cell.moe_s + (cell.same_kernel_s or 0)) / (batch * prompt)
    progress(len(phases) * len(sizes), len(phases) * len(sizes))
    return cells, left_out


def benchmark(
    dense: str,
    moe: str,
    batches: Sequence[int] = (1, 8, 64),
    prompts: Sequence[int] = (128, 1024),
    *,
    text: str | None = None,
    pairs: int = 9,
    seconds: float = 60.0,
    threads: int | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    active: float | None = None,
    on_progress: ProgressCallback = no_progress,
) -> Benchmark:
    """Time both models in turn on the same text: without `text`, on what the MoE held out.

    Each pair of `batches` rows and `prompts` tokens is timed `pairs` times: dense, MoE (at `active`, as in `tomoe.load`), and
    the MoE with all experts or inputs in the same kernel, in turn. Cells that would take longer than `seconds` are left out.
    On a GPU decoding is timed once more, compiled and with a static cache. Raises UserError if a model or text is not found.
    """
    setting = None if active is None else runtime_settings(moe).nearest(active)
    if threads is not None:
        torch.set_num_threads(threads)
    if text is None:
        evaluation = held_out_text([moe])
    else:
        evaluation = load_text(text, load_tokenizer(dense), 128, max(batches) * (max(prompts) + STEPS))
    ids = evaluation.sequences.input_ids[evaluation.sequences.mask]
    models: dict[str, Any] = {}
    memory: dict[str, Memory] = {}
    for name in (dense, moe):
        model = models[name] = in_own_memory(load_model(name, dtype, device))
        prepare(model)
        if setting is not None and name == moe:
            apply_setting_(model, setting)
        per_token = cache_bytes_per_token(model, ids[None, :16].to(model.device))
        memory[name] = Memory(weight_bytes(model), per_token, 2 * model_facts(model)["active_block_params"])
    # Eager decoding on a GPU measures how fast the host starts kernels.
    compiled = partial(torch.compile, dynamic=False, mode="reduce-overhead")
    on_gpu = models[moe].device.type == "cuda"
    pair = Pair(models[dense], models[moe], ids, seconds, pairs, compiled if on_gpu else None)
    cells, left_out = run_cells(pair, batches, prompts, stage_callback(on_progress, "benchmark"))
    return Benchmark(
        basename(dense),
        basename(moe),
        evaluation.name,
        model_facts(models[moe])["active_share"],
        memory[dense],
        memory[moe],
        tuple(cells),
        tuple(left_out),
        {m.__name__: str(m.__version__) for m in (torch, transformers)} | {"tomoe": __version__},
    )


def in_own_memory(model: Any) -> Any:
    """Copy weights that may be memory-mapped: such pages are read up to a fifth slower, in one of two models only."""
    for tensor in (*model.parameters(), *model.buffers()) if model.device.type == "cpu" else ():
        tensor.data = tensor.data.clone()
    return model
