"""Damaged folders through the command line: is each refused in a sentence, or accepted with the words of the undamaged one?

A plan, converted models (overlapping and fine-grained experts, in one file and in shards), a fine-tuned one, an export and a
dense model, all of a few thousand weights, are copied; one file that the command reads (or any other) is damaged, and the
command runs in a fork that has everything imported, with a limit of time and memory. Verdicts:

- refused: exit code 2 and one sentence
- alike: exit code 0 and the words of the undamaged folder
- other words: exit code 0 and other words, as a number that a table shows
- traceback: any other exit code, a traceback, or a refusal that is no single line
- hang: no end within twenty times what the undamaged folder takes, and 20 s
- memory: a peak of more than 100 MB above the undamaged folder's

    python benchmarks/fuzz.py --count 10000 --seed 0 [--only inspect] [--folder FOLDER] [--case 123]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi

from tomoe.cli import main as tomoe
from tomoe.evaluation.timings import Cell
from tomoe.locks import LOCK_FILE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from damage import copy_folder, damage, write_sums
from pico_files import fine, small, write_pico, write_text

VERDICTS = ("refused", "alike", "other words", "traceback", "hang", "memory")
MORE_MEMORY = 100 * 2**20  # bytes
ROOM = 2**31  # bytes of addresses beside those of the parent: whoever wants more gets a MemoryError
LEAST_PATIENCE = 20.0  # seconds of processor time


@dataclass(frozen=True)
class Command:
    """One way to read a folder; {0} is the damaged one, {base} holds the others, {new} does not exist."""

    weight: int
    kinds: tuple[str, ...]
    words: str
    # files that compiled readers (safetensors, tokenizers) open without Python's knowledge
    read: tuple[str, ...]


MODELS = ("moe", "fine", "tuned", "sharded")
PLAN, WEIGHTS, TEXT = "plan.safetensors", "model*.safetensors", "run/corpus.safetensors"
COMMANDS = {
    "inspect": Command(34, (*MODELS, "plan"), "inspect {0}", (PLAN,)),
    "inspect --json": Command(8, (*MODELS, "plan"), "inspect {0} --json", (PLAN,)),
    "inspect RUN": Command(12, ("run", "tuned run"), "inspect {0}", ()),
    "inspect --verify": Command(10, (*MODELS, "plan"), "inspect {0} --verify", (PLAN, WEIGHTS)),
    "push": Command(9, (*MODELS, "plan", "export"), "push {0} owner/name", (PLAN,)),
    "apply": Command(8, ("plan",), "apply {0} {base}/dense -o {new}", (PLAN,)),
    "apply, dense model": Command(3, ("dense",), "apply {base}/plan {0} -o {new}", (WEIGHTS, "tokenizer.json")),
    "evaluate": Command(
        6, ("moe", "fine", "sharded"), "evaluate {base}/dense {0} --text {base}/short.txt --context 32", (PLAN, WEIGHTS, TEXT)
    ),
    "evaluate, held-out text": Command(2, ("moe", "fine"), "evaluate {0} --tokens 64", (PLAN, WEIGHTS, TEXT)),
    "evaluate, dense model": Command(
        2, ("dense",), "evaluate {0} --text {base}/short.txt --context 32", (WEIGHTS, "tokenizer.json")
    ),
    "report": Command(3, ("moe", "fine"), "report {0}", (PLAN,)),
    "finetune": Command(3, ("moe", "fine"), "finetune {0} -o {new} --steps 1 {small}", (PLAN, WEIGHTS, TEXT, "tokenizer.json")),
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    code: int
    seconds: float  # of processor time
    peak: int  # bytes
    said: str
    opened: tuple[str, ...] = ()


def make_base(base: Path) -> None:
    """The undamaged folders, made by the command line."""
    dense, text = write_pico(base / "dense"), write_text(base / "text.txt")
    write_text(base / "short.txt", 12)
    settings = ["--data", str(text)]
    conversions = (
        ["convert", str(dense), "-o", str(base / "moe"), *settings, *small()],
        ["carve", str(dense), "--active", "0.6", "-o", str(base / "fine"), *settings, *fine()],
        ["plan", str(base / "moe" / "run"), "-o", str(base / "plan")],
        ["finetune", str(base / "moe"), "-o", str(base / "tuned"), "--steps", "2", *_small_finetuning()],
        ["export", str(base / "moe"), "-o", str(base / "export"), "--format", "mixtral"],
    )
    for words in conversions:
        if _quiet_main(words):
            sys.exit(f"tomoe {' '.join(words)} fails")
    cell = asdict(Cell("decode", 1, 8, "float32", "cpu", 1, "runs", 3, 1.0, 0.8, 1.25, 1.2, 1.3, 10, 5, 8, 4, 2.0))
    for name in ("moe", "fine"):
        _quiet_main(["report", str(base / name)])
        (base / name / "benchmark.json").write_text(json.dumps({"cells": [cell]}))
    _shard(base / "moe", base / "sharded")
    shutil.copytree(base / "moe" / "run", base / "run")
    shutil.copytree(base / "tuned" / "run", base / "tuned run")


def _small_finetuning() -> list[str]:
    return ["--set", "train.save_every=2", "--set", "train.batch_size=1", "--set", "train.dtype=float32"]


def _shard(whole: Path, out: Path) -> None:
    """The same model, its weights in several files under an index."""
    from transformers import AutoModelForCausalLM

    copy_folder(whole, out)
    (out / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(out, max_shard_size="100KB")
    write_sums(out)


def _quiet_main(words: list[str]) -> int:
    """`tomoe WORDS` in this process, which imports what it needs on the way."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            tomoe(words)
        except SystemExit as left:
            if left.code:
                print(said.getvalue(), file=sys.__stderr__)
            return int(left.code or 0)


def run(words: list[str], log: Path, patience: float, watched: Path | None = None) -> Ended:
    """`tomoe WORDS` in a fork; `watched` is a folder whose files, when Python opens them, are noted."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(words, log, patience, writing, watched)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        opened = tuple(sorted(set(pipe.read().decode().split("\n")) - {""}))
    _, status, usage = os.wait4(pid, 0)
    seconds, said = usage.ru_utime + usage.ru_stime, log.read_text("utf-8", errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss * 1024, said, opened)


def _child(words: list[str], log: Path, patience: float, writing: int, watched: Path | None) -> None:
    target, code = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1
    os.dup2(target, 1)
    os.dup2(target, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + ROOM, pages + ROOM))
    resource.setrlimit(resource.RLIMIT_CPU, (int(patience), int(patience) + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
    # waiting (for a pipe, say) takes no processor time
    signal.setitimer(signal.ITIMER_REAL, 10 * patience)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def note(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).startswith(f"{watched}/"):
            os.write(writing, str(args[0]).removeprefix(f"{watched}/").encode() + b"\n")

    if watched is not None:
        sys.addaudithook(note)
    try:
        tomoe(words)
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def words_of(said: str, *folders: Path) -> str:
    """What was said, without what is another every time: names of folders, times, speeds."""
    for folder in folders:
        said = said.replace(str(folder), "FOLDER")
    lines = [line for line in said.splitlines() if not re.match(r"\S.* \d+/\d+  (took|\S+ left)", line)]
    return re.sub(r"\d+ tokens/s", "", "\n".join(lines))


def judge(ended: Ended, whole: Ended, same: bool) -> str:
    if ended.code in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        return "hang"
    if ended.peak > whole.peak + MORE_MEMORY or "MemoryError" in ended.said:
        return "memory"
    sentences = [line for line in ended.said.splitlines() if re.match("tomoe: (?!note)", line)]
    if "Traceback" in ended.said or ended.code not in (0, 2):
        return "traceback"
    if ended.code == 2:
        one = len(sentences) == 1 and ended.said.rstrip("\n").endswith(sentences[0]) and 20 < len(sentences[0]) < 1500
        return "refused" if one else "traceback"
    return "alike" if same else "other words"


class Fuzz:
    """Draws cases and runs them."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.base, self.seed = folder, folder / "base", seed
        # of (command, kind): the undamaged run
        self.whole: dict[tuple[str, str], Ended] = {}
        self.table: collections.Counter[tuple[str, str]] = collections.Counter()

    def command(self, name: str, place: Path) -> list[str]:
        shutil.rmtree(self.folder / "new", ignore_errors=True)
        parts = COMMANDS[name].words.split()
        words = [w.format(place, base=self.base, new=self.folder / "new") for w in parts if w != "{small}"]
        return words + (_small_finetuning() if "{small}" in parts else [])

    def undamaged(self, name: str, kind: str) -> Ended:
        if (name, kind) not in self.whole:
            place = copy_folder(self.base / kind, self.folder / "case")
            ended = run(self.command(name, place), self.folder / "log", 600.0, place)
            if ended.code:
                sys.exit(f"{name} of the undamaged {kind} fails: {ended.said}")
            self.whole[name, kind] = ended
        return self.whole[name, kind]

    def case(self, number: int, only: str) -> tuple[str, str, str, str, Ended]:
        """(verdict, command, file, damage, what happened) of one case, which its number and the seed decide."""
        draw = random.Random(f"{self.seed} {number}")
        names = [name for name in COMMANDS if only in name]
        name = draw.choices(names, [COMMANDS[n].weight for n in names])[0]
        kind = draw.choice(COMMANDS[name].kinds)
        whole = self.undamaged(name, kind)
        place = copy_folder(self.base / kind, self.folder / "case")
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.name != LOCK_FILE)
        unseen = {path for pattern in COMMANDS[name].read for path in place.glob(pattern)}
        read = [file for file in files if str(file.relative_to(place)) in whole.opened or file in unseen]
        file = draw.choice(read if read and draw.random() < 0.9 else files)
        done = damage(place, file, draw)
        ended = run(self.command(name, place), self.folder / "log", max(LEAST_PATIENCE, 20 * whole.seconds), None)
        folders = (place, self.folder / "new", self.base)
        same = words_of(ended.said, *folders) == words_of(whole.said, *folders)
        verdict = judge(ended, whole, same)
        self.table[name, verdict] += 1
        return verdict, f"{name} ({kind})", str(file.relative_to(place)), done, ended

    def run(self, numbers: range, only: str) -> Iterator[tuple[int, tuple[str, str, str, str, Ended]]]:
        for number in numbers:
            yield number, self.case(number, only)


def last_words(said: str, lines: int = 1) -> str:
    """The end of what was said; of a traceback, the last place within the package, too."""
    spoken = said.strip().splitlines() or [""]
    places = [line.strip() for line in spoken if "/tomoe/" in line and line.strip().startswith("File")]
    where = places[-1].rpartition("/tomoe/")[2] + " " if places else ""
    return (where + " | ".join(spoken[-lines:]))[:600]


def show(table: collections.Counter[tuple[str, str]]) -> None:
    print(f"\n| command | tried | {' | '.join(VERDICTS)} |\n|---|" + "---:|" * (len(VERDICTS) + 1))
    for name, rows in [*((name, [name]) for name in COMMANDS), ("all", list(COMMANDS))]:
        counts = [sum(table[row, verdict] for row in rows) for verdict in VERDICTS]
        if sum(counts):
            print(f"| {name} | {sum(counts):,} | {' | '.join(f'{count:,}' for count in counts)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Commands whose name contains this.")
    parser.add_argument("--folder", type=Path, help="Keep the undamaged folders and the last case here.")
    parser.add_argument("--case", type=int, help="Run one case and print all that it says.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    # nothing is uploaded, but everything before it is done
    HfApi.create_repo = lambda *_, **__: "https://hub/owner/name"  # type: ignore[assignment,method-assign]
    HfApi.upload_folder = lambda *_, **__: None  # type: ignore[assignment,method-assign]
    with tempfile.TemporaryDirectory(prefix="tomoe-fuzz-") as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        fuzz = Fuzz(folder, given.seed)
        if not (fuzz.base / "tuned run").exists():
            shutil.rmtree(fuzz.base, ignore_errors=True)
            make_base(fuzz.base)
        for name, command in COMMANDS.items():
            # import all that it needs, once
            _quiet_main(fuzz.command(name, copy_folder(fuzz.base / command.kinds[0], folder / "case")))
        if given.case is not None:
            verdict, *what, ended = fuzz.case(given.case, given.only)
            print(verdict, *what, f"{ended.seconds:.1f} s, {ended.peak / 2**20:.0f} MiB", ended.said, sep="\n")
            return
        began = time.monotonic()
        for number, (verdict, *what, ended) in fuzz.run(range(given.first, given.first + given.count), given.only):
            heading = f"{number}: {verdict}: {', '.join(what)} ({ended.seconds:.2f} s)"
            print(f"{heading}: {last_words(ended.said)}", flush=True)
        seconds = time.monotonic() - began
        print(f"\n{given.count:,} cases in {seconds:.0f} s, seed {given.seed}, from case {given.first}")
    show(fuzz.table)
    sys.exit(any(verdict in ("traceback", "hang", "memory") for _, verdict in fuzz.table))


if __name__ == "__main__":
    main()
