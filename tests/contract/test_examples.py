"""Every file in examples/ is run, on a pico model."""

from __future__ import annotations

import builtins
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from pico_files import SMALL, CommandLine, write_pico, write_text
from pico_tokenizer import TOKENIZER
from tomoe.plans import read_plan

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = {"experts.form": "fine", "experts.num_experts": "8", "experts.expert_size": "32", "train.steps": "0"}
# Three layers meet this budget with equally many experts of 32 neurons, as stock architectures want them.
SETTINGS = ["active=0.8125", *(f"{key}={value}" for key, value in (SMALL | OWN).items())]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the examples run in, one after the other: dense/, some text and what they make."""
    place = tmp_path_factory.mktemp("examples")
    write_pico(place / "dense", vocab_size=len(TOKENIZER), num_hidden_layers=3)
    TOKENIZER.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    TOKENIZER.save_pretrained(place / "dense")
    TOKENIZER.chat_template = None
    write_text(place / "text.txt")
    write_text(place / "other.txt", sentences=300)
    write_text(place / "held_out.txt", sentences=20)
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name))


@pytest.mark.usefixtures("always_better")
def test_convert_and_chat_then_finetune(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["the sea", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(said))
    run(monkeypatch, "convert_and_chat.py", "model=dense", "data.sources=text.txt", *SETTINGS)
    assert capsys.readouterr().out.startswith("moe: ")
    small = [setting for setting in SETTINGS if setting.startswith("data.")]
    run(monkeypatch, "finetune.py", "moe", "other.txt", "dense", "train.steps=2", *small)
    dense, tuned, moe = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"dense: perplexity [\d.]+ ", dense)
    assert re.fullmatch(r"moe-tuned: perplexity [\d.]+ KL [\d.]+", tuned)
    assert re.fullmatch(r"moe: perplexity [\d.]+ KL [\d.]+", moe)


@pytest.mark.usefixtures("place")
def test_your_own_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "your_own_text.py", "text.txt,other.txt", "held_out.txt", "model=dense", *SETTINGS)
    perplexities, distance = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"perplexity [\d.]+ dense, [\d.]+ as experts", perplexities)
    assert re.fullmatch(r"KL [\d.]+ nats, same next token [\d.]+%", distance)


@pytest.mark.usefixtures("place")
def test_largest_inputs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = [setting for setting in SETTINGS if setting.startswith("data.")]
    run(
        monkeypatch,
        "largest_inputs.py",
        "the sea",
        "model=dense",
        "data.sources=text.txt",
        "train.dtype=float32",
        *data,
    )
    assert re.findall(r"^\d+%", capsys.readouterr().out, re.MULTILINE) == ["100%", "70%", "50%"]


def test_serve_in_vllm_without_vllm(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match="vllm serve moe-glm4"):
        run(monkeypatch, "serve_in_vllm.py", "model=dense", "data.sources=text.txt", *SETTINGS)
    assert type(AutoModelForCausalLM.from_pretrained(place / "moe-glm4")).__name__ == "Glm4MoeForCausalLM"


def test_gguf_for_llama_cpp(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "gguf_for_llama_cpp.py", "model=dense", "data.sources=text.txt", *SETTINGS)
    assert (place / "moe-llama-cpp" / "model-q8_0.gguf").is_file()
    assert capsys.readouterr().out.endswith("llama-server -m moe-llama-cpp/model-q8_0.gguf\n")


def test_own_method(place: Path, tomoe: CommandLine) -> None:
    """By the command that stands in it."""
    text = (EXAMPLES / "own_method.py").read_text("utf-8")
    (_, command, _, *words) = shlex.split(next(line for line in text.splitlines() if line.startswith("tomoe convert")))
    words[words.index("examples/own_method.py:ByText")] = f"{EXAMPLES / 'own_method.py'}:ByText"
    small = (word for setting in SETTINGS for word in ("--set", setting))
    done = tomoe(command, "dense", *words, "--data", "text.txt", *small)
    assert done.code == 0, done.err
    assert read_plan(place / "by-text").notes["method"]["name"] == "ByText"


def test_every_example_is_run_here() -> None:
    tested = Path(__file__).read_text("utf-8")
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tested
