"""The cost of a run: time by stage, tokens, memory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tomoe.data.corpus import Corpus
from tomoe.files import atomic_write
from tomoe.recipe.shared import LoopSection


class Stopwatch:
    """Wall seconds of each stage, in the order in which they ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def ended(self, stage: str) -> None:
        """Count the time since the last call, or since the start, as `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now


def write_cost(
    path: Path, loop: LoopSection, model: PreTrainedModel, corpus: Corpus, watch: Stopwatch, resumed: bool
) -> None:
    """Write wall seconds by stage (of a resumed run from the resume on), tokens, peak memory of process 0 in bytes (null if
    the system does not report it) and the device to `path` (cost.json)."""
    device = model.device.type
    tokens = {"text": sum(part.tokens for part in (corpus.train, corpus.calibration, corpus.evaluation))}
    if loop.steps:
        sequences = loop.steps * loop.batch_size * loop.gradient_accumulation_steps
        tokens["learning"] = sequences * corpus.train.input_ids.shape[1]
    cost = {
        "seconds": watch.seconds,
        "tokens": tokens,
        "peak_memory_bytes": peak_memory(),
        "device_peak_memory_bytes": torch.cuda.max_memory_allocated(model.device) if device == "cuda" else None,
        "device": torch.cuda.get_device_name(model.device) if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "resumed": resumed,
    }
    atomic_write(path, json.dumps(cost, indent=2) + "\n")


def peak_memory() -> int | None:
    """Return the peak of this process's main memory in bytes; None on Windows, which does not report it."""
    # Linux: `ru_maxrss` would include the peak of the process that started this one
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, others kilobytes
    return peak if sys.platform == "darwin" else peak * 1024
