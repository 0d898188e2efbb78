"""Kill -9 at random moments of `tomoe convert`, and what `--resume` makes of each: the same bytes as without a kill?

The stages take turns, whatever their length. In every other turn the moment is a point in time; in the rest it is right
before a change of a file (opened for writing, renamed, deleted), which time alone would seldom hit. Prints one line per
moment, then a table by what was there when the kill came:

- same bytes: the weights, the plan, the text and the metrics (but for the clock) of a conversion that nobody killed, and
  the same files in the folder
- left over: the same bytes, and beside them files that no conversion makes
- refused: exit code 2 and a sentence
- lost: exit code 0, and something is missing or different

    python benchmarks/kills.py --moments 50 --seed 0 [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from tomoe.cli import main as tomoe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pico_files import contents, small, steps_of, write_pico, write_text

VERDICTS = ("same bytes", "left over", "refused", "traceback", "hang", "lost")
# left by a stage, newest first; the kill came after it
STAGES = (("report.html", "done"), ("config.json", "report"), ("run/masks/step-000006", "fold"), ("run/masks/step-*", "learn"),
          ("run/recipe.json", "carve"), ("", "text"))  # fmt: skip
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.chmod"}
PATIENCE = 60.0  # seconds of processor time beside twenty times what a whole conversion takes
IDLE = 20  # times as long by the clock: who waits for what never comes uses no processor


@dataclass(frozen=True)
class Ended:
    """A command that ended by itself, or that was killed."""

    code: int
    seconds: float
    changes: list[float]  # of files, in seconds since it began; if it ended by itself
    stages: dict[str, float]  # when each was first seen
    said: str


def is_change(event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audit event of Python changes a file."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    return event in CHANGES or (event == "open" and isinstance(args[2], int) and bool(args[2] & writes))


def run(command: list[str], out: Path, log: Path, after: float = 0, change: int = 0, patience: float = 0) -> Ended:
    """`tomoe COMMAND` in a fork, killed `after` seconds, or right before change number `change`; 0: not at all.

    patience: seconds of processor time, or IDLE times as many by the clock, after which it is killed, too.
    """
    reading, writing = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(command, log, change, writing)
    os.close(writing)
    found, status, stages = 0, 0, dict[str, float]()
    while not found:
        stages.setdefault(stage(out), time.monotonic() - began)
        found, status = os.waitpid(pid, os.WNOHANG)
        passed = time.monotonic() - began
        due = after and passed > after
        stuck = not found and patience and (passed > IDLE * patience or processor_seconds(pid) > patience)
        if not found and (due or stuck):
            os.kill(pid, signal.SIGKILL)
            after = patience = 0
        time.sleep(0.005)
    with os.fdopen(reading) as file:
        changes = [float(word) - began for word in file.read().split()]
    seconds, said = time.monotonic() - began, log.read_text(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), seconds, changes, stages, said)


def processor_seconds(pid: int) -> float:
    """Processor time of a running process and of the children that it waited for."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def write_output_to(log: Path) -> None:
    """Let all that this process prints go to a file."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def exit_code(words: list[str]) -> int:
    """Run `tomoe WORDS` in this process. An exception is printed, and the code is 1."""
    code = 1
    try:
        tomoe(words)
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _child(command: list[str], log: Path, change: int, writing: int) -> None:
    changes = list[float]()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_change(event, args):
            changes.append(time.monotonic())
            if len(changes) == change:
                os.kill(os.getpid(), signal.SIGKILL)

    write_output_to(log)
    sys.addaudithook(hook)
    code = exit_code(command)
    os.write(writing, " ".join(map(str, changes)).encode())
    os._exit(code)


def result(out: Path) -> dict[str, Any]:
    """What has to be the same: names of all files, bytes of those that no clock is in, metrics without the clock."""
    files = contents(out)
    fixed = [name for name in files if name.endswith((".safetensors", "SHA256SUMS")) and "optimizer" not in name]
    return {name: files[name] for name in fixed} | {"files": sorted(files), "metrics": steps_of(out / "run")}


def judge(ended: Ended, patience: float, out: Path, whole: dict[str, Any]) -> tuple[str, str]:
    """The verdict, and what there is to say of it."""
    last = (ended.said.strip().splitlines() or [""])[-1]
    if ended.code == -signal.SIGKILL:
        return "hang", f"after {patience:.0f} s of processor time, or {IDLE} times as long: {last}"
    if "Traceback" in ended.said or ended.code not in (0, 2):
        return "traceback", f"exit code {ended.code}: {last}"
    if ended.code == 2:
        return "refused", last
    try:
        found = result(out)
    except OSError as error:
        return "lost", str(error)
    other = [name for name in whole if name != "files" and found.get(name) != whole[name]]
    gone, more = set(whole["files"]) - set(found["files"]), set(found["files"]) - set(whole["files"])
    if other or gone:
        return "lost", f"other: {other}; missing: {sorted(gone)}; left over: {sorted(more)}"
    return ("left over", str(sorted(more))) if more else ("same bytes", "")


def stage(out: Path) -> str:
    """What the command was at, by what is there."""
    return next(name for left, name in STAGES if not left or any(out.glob(left)))


def measure(folder: Path, moments: int, seed: int) -> collections.Counter[tuple[str, str]]:
    """(stage, verdict) of every moment."""
    dense, text = write_pico(folder / "dense"), write_text(folder / "text.txt", 60)

    def command(out: Path) -> list[str]:
        return ["convert", str(dense), "--data", "self", "--data", str(text), "-o", str(out), *small(train_steps="6")]

    clean = run(command(folder / "whole" / "out"), folder / "whole" / "out", folder / "whole.log")
    if clean.code:
        sys.exit(f"the conversion itself fails:\n{clean.said}")
    whole = result(folder / "whole" / "out")
    patience = PATIENCE + 20 * clean.seconds
    # a stage that was too short to be seen begins with the next one
    begins = [clean.seconds]
    for _, name in STAGES[1:]:
        begins.insert(0, clean.stages.get(name, begins[0]))
    print(
        f"uninterrupted: {clean.seconds:.1f} s, {len(clean.changes)} changes of files, {len(whole['files'])} files; stages "
        f"began after {', '.join(f'{name} {seconds:.1f} s' for name, seconds in clean.stages.items())}",
        flush=True,
    )
    draws, table = random.Random(seed), collections.Counter[tuple[str, str]]()
    for i in range(moments):
        out, log = folder / str(i) / "out", folder / f"{i}.log"
        turn, number = divmod(i, len(begins) - 1)
        first, last = begins[number : number + 2]
        within = [j for j, seconds in enumerate(clean.changes, 1) if first <= seconds < last]
        if turn % 2 == 0 and within:
            kill: dict[str, Any] = {"change": draws.choice(within)}
        else:
            kill = {"after": draws.uniform(first, last)}
        killed = run(command(out), out, log, **kill)
        came = stage(out) if killed.code else "done"
        resumed = run([*command(out), "--resume"], out, folder / f"{i}.resumed.log", patience=patience)
        verdict, why = judge(resumed, patience, out, whole)
        table[came, verdict] += 1
        point = " ".join(f"{key} {value:.2f}" if key == "after" else f"{key} {value}" for key, value in kill.items())
        print(f"{i}: killed {point} ({came}): {verdict} {why}".rstrip(), flush=True)
    return table


def show(table: collections.Counter[tuple[str, str]]) -> None:
    print(f"\n| killed in | tried | {' | '.join(VERDICTS)} |\n|---|" + "---:|" * (len(VERDICTS) + 1))
    stages = [name for _, name in reversed(STAGES)]
    for name, rows in [*((name, [name]) for name in stages), ("all", stages)]:
        counts = [sum(table[row, verdict] for row in rows) for verdict in VERDICTS]
        print(f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="Keep everything here.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tomoe-kills-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        table = measure(folder, given.moments, given.seed)
    show(table)
    sys.exit(any(verdict in ("traceback", "hang", "lost") for _, verdict in table))


if __name__ == "__main__":
    main()
