"""Pico models on disk, a little text, and the command line called in this process."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import typer.main
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from conftest import make_pico, make_plan
from pico_tokenizer import make_tokenizer
from tomoe.cli import main
from tomoe.data.corpus import Sequences
from tomoe.errors import UserError
from tomoe.evaluation.results import Row, read_rows
from tomoe.finetuning.students import FinetuneStep, HeldOutLoss
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.recipe.conversion import Recipe

WORDS = list(
    "the sea and a boat under stars went over old hills while rain fell on every quiet town near us".split(" ")
)

# a conversion of a second: short sequences, few tokens, few and narrow parts
SMALL = {
    "train.dtype": "float32",
    "train.steps": "4",
    "train.save_every": "2",
    "data.seq_len": "16",
    "data.tokens": "1200",
    "data.calibration_tokens": "128",
    "data.evaluation_tokens": "128",
    "experts.form": "overlapping",
    "experts.num_experts": "2",
    "experts.embedding_size": "8",
    "experts.width_multiple": "1",
}


# the same with fine-grained experts, few and small enough for a budget of 60 %
FINE_EXPERTS = 64
FINE = ("experts.form=fine", f"experts.num_experts={FINE_EXPERTS}")


# the text of a small fine-tuning
TUNED = ("data.seq_len=16", "data.tokens=1200", "data.calibration_tokens=128", "data.evaluation_tokens=64")


# a small conversion whose tokens choose inputs
INPUTS = [
    "--method=inputs",
    *(
        f"--set={key}={SMALL[key]}"
        for key in ("train.dtype", "data.seq_len", "data.calibration_tokens", "data.evaluation_tokens")
    ),
]


# what is not learned: the last word on what `small` sets
CARVED = ["--set=train.steps=0", "--set=data.tokens=0"]


def fine(**changes: str) -> list[str]:
    """The `--set` options of a small conversion to fine-grained experts, for 60 % active."""
    return [*small(**changes), *(word for key in FINE for word in ("--set", key))]


def small(**changes: str) -> list[str]:
    """The `--set` options of a small conversion; `train_steps="8"` changes train.steps."""
    values = SMALL | {key.replace("_", ".", 1): value for key, value in changes.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def pico_recipe(folder: Path, *changes: str) -> Recipe:
    """A small conversion of `dense` by `text.txt`, both in the folder; a change reads train.steps=8."""
    where = [f"model={folder / 'dense'}", f"data.sources={folder / 'text.txt'}"]
    return Recipe.load(None, [*where, *(f"{key}={value}" for key, value in SMALL.items()), *changes])


def write_pico(folder: Path, family: str = "llama", **changes: object) -> Path:
    """A model with 512 neurons a layer (so that a budget can be met to 0.2 %), and its tokenizer."""
    tokenizer = make_tokenizer()
    sizes = {"intermediate_size": 512, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    make_pico(family, **sizes | changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_text(path: Path, sentences: int = 200) -> Path:
    """Sentences without end or sense, the same every time."""
    lines, state = [], 1
    for _ in range(sentences):
        words = []
        for _ in range(9):
            state = state * 1103515245 + 12345 & 0x7FFFFFFF
            words.append(WORDS[(state >> 16) % len(WORDS)])
        lines.append(" ".join(words) + ".")
    path.write_text("\n\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


# typer makes the commands anew whenever one is called
typer.main.get_command = functools.cache(typer.main.get_command)


class CommandLine:
    """`tomoe ...` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *args: str | Path) -> Outcome:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in args])
        shown = self.capsys.readouterr()
        return Outcome(int(left.value.code or 0), shown.out, shown.err)


def refused(outcome: Outcome, *words: str) -> None:
    """Check for exit code 2 and one line that has these words in it."""
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err, outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n"), outcome.err
    for word in words:
        assert word in outcome.err, (word, outcome.err)


def proved(export: Outcome, out: Path) -> dict[str, Any]:
    """The proof of an export that succeeded, as OUT/export.json holds it."""
    assert export.code == 0, export.err
    proof: dict[str, Any] = json.loads((out / "export.json").read_text())["proof"]
    assert proof["same"] is True
    return proof


def carved(folder: Path, *options: str) -> Path:
    """Fill the folder with `dense`, `text.txt` and `moe`, a conversion without learning; return the folder."""
    dense, text = write_pico(folder / "dense"), write_text(folder / "text.txt")
    succeed("convert", dense, "-o", folder / "moe", "--data", text, *small(), *CARVED, *options)
    return folder


def write_folded(folder: Path, family: str, tokenizer: PreTrainedTokenizerBase, **changes: object) -> Path:
    """A converted pico model by a random plan, without a run."""
    dense = make_pico(family, vocab_size=len(tokenizer), **changes)
    plan = make_plan(dense, "off", active=0.8)
    save_moe(fold(dense, plan), plan, tokenizer, folder)
    return folder


def succeed(*args: str | Path) -> None:
    """`tomoe ...` for a fixture that is made once, whatever it prints."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in args])
    assert not left.value.code


def metrics(run: Path) -> list[dict[str, Any]]:
    """A row for each step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its times."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in metrics(run)]


def contents(folder: Path, but: Sequence[str] = ()) -> dict[str, str]:
    """The sha256 of every file below a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in but
    }


def always_better(patch: pytest.MonkeyPatch) -> None:
    """Let fine-tuning call every step that moves the weights better than the start: few steps of a pico model are by luck.

    The held-out loss is measured as ever. What is told in its place falls with the distance from the weights of the
    beginning, so a resumed run is told the same.
    """
    init, measure = HeldOutLoss.__init__, HeldOutLoss.__call__
    began: dict[HeldOutLoss, list[Tensor]] = {}

    def begin(loss: HeldOutLoss, step: FinetuneStep, text: Sequences) -> None:
        init(loss, step, text)
        began[loss] = [p.detach().clone() for p in step.student.learned.parameters()]

    def tell(loss: HeldOutLoss) -> float:
        assert math.isfinite(measure(loss))
        pairs = zip(loss.step.student.learned.parameters(), began[loss], strict=True)
        return 1 / (1 + sum(float((p.detach() - b).abs().sum()) for p, b in pairs))

    patch.setattr(HeldOutLoss, "__init__", begin)
    patch.setattr(HeldOutLoss, "__call__", tell)


def leave_head_room(moe: Path) -> Path:
    """Double the last norm of a converted pico model: it is too sure of every prediction, and all text asks for less."""
    tensors = load_file(moe / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, moe / "model.safetensors", metadata={"format": "pt"})
    return moe


def rows_from(text: str) -> list[Row]:
    """The rows of a file that `to_json` wrote, or anyone else."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "evaluation.json").write_text(text, encoding="utf-8")
        return read_rows(Path(folder))


def forked(work: Callable[[], object]) -> int:
    """The id of a process, forked from this one, that does the work; `ended` says how. It ends with 3 if the work is refused."""
    with warnings.catch_warnings():  # newer Pythons warn of forks beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)  # threads of a pool are not there after a fork
        work()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except UserError:
        code = 3
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """The exit code of a process, or the negative number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
