"""Processor time (user + system) of commands that need no tensor; the goal is less than 0.5 s for each.

    .venv/bin/python benchmarks/startup.py [FOLDER] [--runs N]

FOLDER is a converted model, a plan or a run, for `inspect`. Prints the median of N runs (default 9), and which heavy
packages were imported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "jaxtyping", "huggingface_hub")
# runs a command in a fresh process; the last line on stderr lists the heavy packages that it imported
RUN = f"""
import sys
from tomoe.cli import main
try:
    main(sys.argv[1:])
finally:
    print("imported", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


def commands(folder: str | None) -> dict[str, list[str]]:
    """Name in the table -> arguments."""
    convert = ["convert", "no-such-model", "-o", "out"]
    listed = {
        "--help": ["--help"],
        "--version": ["--version"],
        "convert --help": ["convert", "--help"],
        "unknown verb": ["convrt"],
        "unknown option": [*convert, "--stepz", "3"],
        "OUT missing": convert[:2],
        "wrong recipe key": [*convert, "--set", "train.step=3"],
        "wrong recipe value": [*convert, "--set", "train.steps=many"],
        "preset that does not exist": [*convert, "--recipe", "dmo"],
        "model that does not exist": convert,
    }
    return listed | ({"inspect FOLDER": ["inspect", folder]} if folder else {})


def measure(arguments: list[str], runs: int, cwd: str) -> tuple[float, str]:
    """Median seconds of user and system time, and the heavy packages imported."""
    seconds, imported = [], ""
    for _ in range(runs):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", RUN, *arguments], cwd=cwd, capture_output=True, text=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        imported = done.stderr.splitlines()[-1].removeprefix("imported").strip()
    return statistics.median(seconds), imported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    folder = os.path.abspath(options.folder) if options.folder else None
    print("| command | CPU seconds | imports |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as cwd:
        for name, arguments in commands(folder).items():
            seconds, imported = measure(arguments, options.runs, cwd)
            print(f"| {name} | {seconds:.2f} | {imported or '-'} |", flush=True)


if __name__ == "__main__":
    main()
