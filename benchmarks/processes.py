"""Strong scaling of the training step: the same step on 1, 2, .. processes of one machine, and what each of them holds.

    python benchmarks/processes.py MODEL TEXT [--processes 1,2] [--steps 4] [--accumulation 2] [--seq-len 512] [--shard]

starts torchrun once for each number of processes, with one thread each, and prints seconds of a step (median without the
first), speed-up over the first line, peak resident memory of every process, and the last loss, which should be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def run_worker(out: str, command: list[str]) -> None:
    """Run the command line of tomoe in one process, then write its peak memory to OUT.RANK.peak."""
    import torch

    from tomoe.cli import main
    from tomoe.training.cost import peak_memory

    torch.set_num_threads(1)
    try:
        main(command)
    finally:
        Path(f"{out}.{os.environ['RANK']}.peak").write_text(str(peak_memory()))


def measure(args: argparse.Namespace, count: int, out: Path) -> tuple[list[float], list[int], float]:
    """Return seconds of each step, peak bytes of each process, and the last loss."""
    settings = {
        "start": "random", "device": "cpu", "train.steps": args.steps,
        "train.gradient_accumulation_steps": args.accumulation, "data.seq_len": args.seq_len,
        "data.tokens": 60 * args.seq_len, "data.calibration_tokens": args.seq_len, "data.evaluation_tokens": args.seq_len,
        "train.shard": str(args.shard).lower(),
    }  # fmt: skip
    command = ["train", args.model, "--data", args.text, "-o", str(out)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-port", str(port)]
    subprocess.run(
        [sys.executable, *launcher, __file__, "--worker", str(out), *command],
        check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    peaks = [int(Path(f"{out}.{rank}.peak").read_text()) for rank in range(count)]
    return [row["seconds"] for row in rows], peaks, rows[-1]["loss"]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return run_worker(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--shard", action="store_true")
    args = parser.parse_args()
    first = 0.0
    print("| processes | seconds a step | speed-up | peak memory of each, GB | last loss |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for count in map(int, args.processes.split(",")):
            seconds, peaks, loss = measure(args, count, Path(folder) / str(count))
            step = statistics.median(seconds[1:])
            first = first or step
            memory = ", ".join(f"{peak / 1e9:.2f}" for peak in peaks)
            print(f"| {count} | {step:.2f} | {first / step:.2f} | {memory} | {loss:.5f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
