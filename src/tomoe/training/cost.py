"""What a run took: time by stage, tokens, memory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tomoe.data.corpus import Corpus
from tomoe.files import write_whole
from tomoe.recipe.conversion import LoopSection


def write_cost(
    path: Path, t: LoopSection, model: PreTrainedModel, corpus: Corpus, moments: tuple[float, float, float],
    resumed: bool,
) -> None:  # fmt: skip
    """Wall seconds by stage, tokens, peak memory of the first process (bytes), and on what.

    `moments` are when it began, had its text and had learned, by `time.perf_counter`. Peak memory is null where the
    system does not say; seconds are those of the last start alone, where it was resumed.
    """
    device = model.device.type
    began, text_ready, learned = moments
    took = {
        "seconds": {
            "text": text_ready - began,
            "learning": learned - text_ready,
            "folding": time.perf_counter() - learned,
        },
        "tokens": {
            "text": sum(part.tokens for part in (corpus.train, corpus.calibration, corpus.evaluation)),
            "learning": t.steps * t.batch_size * t.gradient_accumulation * corpus.train.input_ids.shape[1],
        },
        "peak_memory_bytes": peak_memory(),
        "device_peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "resumed": resumed,
    }
    write_whole(path, json.dumps(took, indent=2) + "\n")


def peak_memory() -> int | None:
    """Most bytes of main memory that this process ever held; None on Windows, which keeps no such count for us."""
    try:  # Linux. Its `ru_maxrss` would not do: a process inherits the peak of the one that started it.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024  # macOS counts bytes, others kilobytes
