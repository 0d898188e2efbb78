"""Time a dense model and its MoE beside each other on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers

from tomoe.data.evaluation_text import held_out_text, read_text
from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.speed import throughput
from tomoe.evaluation.speed.timings import Benchmark, Memory
from tomoe.files import basename
from tomoe.model.loading import load_model, load_tokenizer
from tomoe.moe.active_experts import dial_of, use_
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.version import __version__


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
    """Time both models beside each other on the same text: without `text`, on what the MoE held out.

    Each pair of `batches` rows and `prompts` tokens is timed `pairs` times: dense, MoE (at `active`, as in `tomoe.load`), and
    the MoE with all experts or inputs in the same kernel, in turn. Cells that would take longer than `seconds` are left out.
    On a GPU decoding is timed once more, compiled and with a static cache. Raises UserError if a model or text is not found.
    """
    setting = None if active is None else dial_of(moe).nearest(active)
    if threads is not None:
        torch.set_num_threads(threads)
    if text is None:
        evaluation = held_out_text([moe])
    else:
        evaluation = read_text(text, load_tokenizer(dense), 128, max(batches) * (max(prompts) + throughput.STEPS))
    ids = evaluation.sequences.input_ids[evaluation.sequences.mask]
    models: dict[str, Any] = {}
    memory: dict[str, Memory] = {}
    for name in (dense, moe):
        model = models[name] = in_own_memory(load_model(name, dtype, device))
        if setting is not None and name == moe:
            use_(model, setting)
        per_token = throughput.cache_bytes_per_token(model, ids[None, :16].to(model.device))
        memory[name] = Memory(throughput.weight_bytes(model), per_token, 2 * model_facts(model)["active_block_params"])
    # Eager decoding on a GPU measures how fast the host starts kernels.
    compiled = partial(torch.compile, dynamic=False, mode="reduce-overhead")
    on_gpu = models[moe].device.type == "cuda"
    pair = throughput.Pair(models[dense], models[moe], ids, seconds, pairs, compiled if on_gpu else None)
    cells, left_out = throughput.run_cells(pair, batches, prompts, stage_callback(on_progress, "benchmark"))
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
    """Copy the weights that may be mapped from a file, one after another, and return the model: mapped pages are read up to a
    fifth slower, and only one of two models would be timed on them."""
    for tensor in (*model.parameters(), *model.buffers()) if model.device.type == "cpu" else ():
        tensor.data = tensor.data.clone()
    return model
