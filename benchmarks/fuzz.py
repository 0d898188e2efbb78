"""Damaged folders through the command line: is each refused in a sentence, or accepted with the words of the undamaged one?

A plan, converted models (overlapping and fine-grained experts, in one file and in shards), a fine-tuned one, an export and a
dense model, all of a few thousand weights, are copied; one file that the command reads (or any other) is damaged, and the
command runs in a fork that has everything imported, with a limit of time and memory, forty cases in a fork. Verdicts:

- refused: exit code 2 and one sentence
- alike: exit code 0 and the words of the undamaged folder
- other words: exit code 0 and other words, as a number that a table shows
- traceback: any other exit code, a traceback, or a refusal that is no single line
- hang: no end within twenty times what the undamaged folder takes, and 20 s
- memory: a peak of more than 100 MB above the undamaged folder's

    python benchmarks/fuzz.py --count 10000 --seed 0 [--only inspect] [--folder FOLDER]
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from kills import exit_code, write_output_to

from tomoe.cli import main as tomoe
from tomoe.evaluation.speed.timings import Cell
from tomoe.files import write_sums
from tomoe.locks import LOCK_FILE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from damage import copy_folder, damage
from pico_files import fine, small, write_pico, write_text

VERDICTS = ("refused", "alike", "other words", "traceback", "hang", "memory")
MORE_MEMORY = 100 * 2**20  # bytes
ROOM = 2**31  # bytes of addresses beside those of the parent: whoever wants more gets a MemoryError
BATCH = 40  # cases in one fork
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
    "inspect": Command(45, (*MODELS, "plan"), "inspect {0}", (PLAN,)),
    "inspect --json": Command(10, (*MODELS, "plan"), "inspect {0} --json", (PLAN,)),
    "inspect RUN": Command(14, ("run", "tuned run"), "inspect {0}", ()),
    "inspect --verify": Command(9, (*MODELS, "plan"), "inspect {0} --verify", (PLAN, WEIGHTS)),
    "push": Command(8, (*MODELS, "plan", "export"), "push {0} owner/name", (PLAN,)),
    "apply": Command(5, ("plan",), "apply {0} {base}/dense -o {new}", (PLAN,)),
    "apply, dense model": Command(2, ("dense",), "apply {base}/plan {0} -o {new}", (WEIGHTS, "tokenizer.json")),
    "evaluate": Command(
        3, ("moe", "fine", "sharded"), "evaluate {base}/dense {0} --text {base}/short.txt --context 32", (PLAN, WEIGHTS, TEXT)
    ),
    "evaluate, held-out text": Command(1, ("moe", "fine"), "evaluate {0} --tokens 64", (PLAN, WEIGHTS, TEXT)),
    "evaluate, dense model": Command(
        1, ("dense",), "evaluate {0} --text {base}/short.txt --context 32", (WEIGHTS, "tokenizer.json")
    ),
    "report": Command(1, ("moe", "fine"), "report {0}", (PLAN,)),
    "finetune": Command(1, ("moe", "fine"), "finetune {0} -o {new} --steps 1 {small}", (PLAN, WEIGHTS, TEXT, "tokenizer.json")),
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A command that ended: its exit code, seconds of processor time, growth of its peak memory in bytes, words."""

    code: int
    seconds: float
    growth: int
    said: str


@dataclass(frozen=True)
class Result:
    """A case and what became of it."""

    number: int
    command: str
    kind: str
    verdict: str = "hang"
    file: str = ""
    damage: str = ""
    seconds: float = 0.0
    growth: int = 0
    said: str = ""


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


def execute(words: list[str], log: Path, patience: float) -> Ended:
    """`tomoe WORDS` in this process, which a signal ends after `patience` seconds of processor time."""
    write_output_to(log)
    # from here on VmHWM is the peak of this command
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _memory("VmRSS"), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, patience)
    # waiting (for a pipe, say) takes no processor time
    signal.setitimer(signal.ITIMER_REAL, 15 * patience)
    try:
        code = exit_code(words)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    said = log.read_text("utf-8", errors="replace")
    return Ended(code, time.process_time() - began, _memory("VmHWM") - before, said)


def _memory(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def forked(work: Callable[[Callable[[object], None]], None]) -> tuple[list[Any], int]:
    """What `work` sends, as JSON, from a fork with a bound on memory, and the fork's exit status."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        # signals end a case that hangs, whatever it runs
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + ROOM, pages + ROOM))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
        try:
            with os.fdopen(writing, "w", buffering=1) as pipe:
                work(lambda values: print(json.dumps(values), file=pipe, flush=True))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the folders are the parent's to clear away
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        sent = [json.loads(line) for line in pipe]
    return sent, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def words_of(said: str, *folders: Path) -> str:
    """What was said, without what is another every time: names of folders, times, speeds."""
    for folder in folders:
        said = said.replace(str(folder), "FOLDER")
    lines = [line for line in said.splitlines() if not re.match(r"\S.* \d+/\d+  (took|\S+ left)", line)]
    return re.sub(r"\d+ tokens/s", "", "\n".join(lines))


def judge(ended: Ended, whole: Ended, same: bool) -> str:
    if ended.growth > whole.growth + MORE_MEMORY or "MemoryError" in ended.said:
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

    def __init__(self, folder: Path, seed: int, only: str):
        self.folder, self.base, self.seed = folder, folder / "base", seed
        self.place, self.new, self.log = folder / "case", folder / "new", folder / "log"
        self.names = [name for name in COMMANDS if only in name]
        # of (command, kind): the undamaged run, and the files that it opened
        self.whole: dict[tuple[str, str], tuple[Ended, list[str]]] = {}

    def command(self, name: str, kind: str) -> list[str]:
        """The command, and the folder that it reads, undamaged."""
        shutil.rmtree(self.new, ignore_errors=True)
        copy_folder(self.base / kind, self.place)
        parts = COMMANDS[name].words.split()
        words = [w.format(self.place, base=self.base, new=self.new) for w in parts if w != "{small}"]
        return words + (_small_finetuning() if "{small}" in parts else [])

    def undamaged(self, name: str, kind: str) -> tuple[Ended, list[str]]:
        if (name, kind) not in self.whole:

            def work(send: Callable[[object], None]) -> None:
                words, opened = self.command(name, kind), set[str]()

                def note(event: str, args: tuple[object, ...]) -> None:
                    if event == "open" and str(args[0]).startswith(f"{self.place}/"):
                        opened.add(str(args[0]).removeprefix(f"{self.place}/"))

                sys.addaudithook(note)
                ended = execute(words, self.log, 600.0)
                send([asdict(ended), sorted(opened)])

            [(ended, opened)], _ = forked(work)
            if ended["code"]:
                sys.exit(f"{name} of the undamaged {kind} fails: {ended['said']}")
            self.whole[name, kind] = Ended(**ended), opened
        return self.whole[name, kind]

    def draw(self, number: int) -> tuple[random.Random, str, str]:
        """The random numbers of a case, its command and the kind of its folder."""
        draw = random.Random(f"{self.seed} {number}")
        name = draw.choices(self.names, [COMMANDS[n].weight for n in self.names])[0]
        return draw, name, draw.choice(COMMANDS[name].kinds)

    def case(self, number: int) -> Result:
        """Damage, run and judge one case, in this process; its number and the seed decide all of it."""
        draw, name, kind = self.draw(number)
        whole, opened = self.whole[name, kind]
        words, place = self.command(name, kind), self.place
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.name != LOCK_FILE)
        unseen = {path for pattern in COMMANDS[name].read for path in place.glob(pattern)}
        read = [file for file in files if str(file.relative_to(place)) in opened or file in unseen]
        file = draw.choice(read if read and draw.random() < 0.9 else files)
        done = damage(place, file, draw)
        ended = execute(words, self.log, max(LEAST_PATIENCE, 20 * whole.seconds))
        folders = (self.place, self.new, self.base)
        same = words_of(ended.said, *folders) == words_of(whole.said, *folders)
        verdict, where = judge(ended, whole, same), str(file.relative_to(place))
        return Result(number, name, kind, verdict, where, done, ended.seconds, ended.growth, ended.said)

    def run(self, numbers: Sequence[int]) -> Iterator[Result]:
        """The cases, many in one fork; a case that its fork does not survive hangs, or takes the process along."""
        while numbers:
            batch = numbers[:BATCH]
            for number in batch:
                self.undamaged(*self.draw(number)[1:])

            def work(send: Callable[[object], None], batch: Sequence[int] = batch) -> None:
                for number in batch:
                    result = self.case(number)
                    send(asdict(result) | {"said": last_words(result.said)})

            sent, status = forked(work)
            yield from (Result(**values) for values in sent)
            if len(sent) < len(batch):
                lost = batch[len(sent)]
                _, name, kind = self.draw(lost)
                verdict = "hang" if status in (-signal.SIGPROF, -signal.SIGALRM) else "traceback"
                yield Result(lost, name, kind, verdict, said=f"exit status {status}")
            numbers = numbers[len(sent) + (len(sent) < len(batch)) :]


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
    parser.add_argument(
        "--verbose", action="store_true", help="Print all that each case says; for one case (--count 1)."
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    # nothing is uploaded, but everything before it is done
    HfApi.create_repo = lambda *_, **__: "https://hub/owner/name"  # type: ignore[assignment,method-assign]
    HfApi.upload_folder = lambda *_, **__: None  # type: ignore[assignment,method-assign]
    with tempfile.TemporaryDirectory(prefix="tomoe-fuzz-") as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        table = fuzz(Fuzz(folder, given.seed, given.only), range(given.first, given.first + given.count), given.verbose)
    show(table)
    sys.exit(any(verdict in ("traceback", "hang", "memory") for _, verdict in table))


def fuzz(cases: Fuzz, numbers: range, verbose: bool) -> collections.Counter[tuple[str, str]]:
    """(command, verdict) of every case, which are printed on the way."""
    if not (cases.base / "tuned run").exists():
        shutil.rmtree(cases.base, ignore_errors=True)
        make_base(cases.base)
    for name in cases.names:
        # import all that it needs, once
        _quiet_main(cases.command(name, COMMANDS[name].kinds[0]))
    table, began = collections.Counter[tuple[str, str]](), time.monotonic()
    for result in cases.run(numbers):
        table[result.command, result.verdict] += 1
        what = f"{result.command} ({result.kind}), {result.file}, {result.damage}"
        print(f"{result.number}: {result.verdict}: {what} ({result.seconds:.2f} s): {result.said}", flush=True)
        if verbose:
            print(cases.log.read_text("utf-8", errors="replace"))
    print(f"\n{len(numbers):,} cases in {time.monotonic() - began:.0f} s, seed {cases.seed}, from case {numbers.start}")
    return table


if __name__ == "__main__":
    main()
