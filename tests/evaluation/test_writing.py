"""Tasks whose answers are written: batches, programs that run, answers that are read, loops, the command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from conftest import make_plan, tokens
from pico_files import CommandLine, refused, write_pico
from pico_tokenizer import make_spaced_tokenizer, make_tokenizer
from tomoe.errors import UserError
from tomoe.evaluation.tasks import TaskSet, TaskSpec, parse_tasks
from tomoe.evaluation.writing.continuations import continuations
from tomoe.evaluation.writing.humaneval import Prompt, body, function_ended, runs
from tomoe.evaluation.writing.run import distinct, loops, write
from tomoe.methods.inputs import plan_inputs
from tomoe.model.generation import asked, generate
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.model.structure import shape_of
from tomoe.model.tokens import continuation_text
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import FEW_TOKENS, choices_of

TEMPLATE = "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
PROMPTS = [[5, 9, 30], [8] * 9, [40, 41], [7, 6, 5, 4, 3, 10, 11]]


# -- batches


@pytest.mark.parametrize("form", ["dense", "fine", "overlapping"])
def test_a_batch_writes_what_the_family_writes_for_each_prompt_alone(llama: PreTrainedModel, form: str) -> None:
    tokenizer = make_tokenizer()
    # so no text ends by itself: of the many other logits one is above 0
    llama.lm_head.weight.data[tokenizer.all_special_ids] = 0
    model = llama if form == "dense" else fold(llama, make_plan(llama, "off", form=form))
    alone = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        alone.append(out[0, len(prompt) :].tolist())
    # three in one batch, one in the other
    assert continuations(model, tokenizer, PROMPTS, 12, rows=3) == alone
    # rows that end early leave the batch, and change nothing for the others
    ends = {tuple(text[:8]) for text in alone[:2]}
    assert all(len(text) == 12 for text in alone)
    stopped = continuations(model, tokenizer, PROMPTS, 12, lambda text: text in {tokenizer.decode(e) for e in ends})
    assert stopped == [text[:8] if tuple(text[:8]) in ends else text for text in alone]
    # a model that remembers more than keys and values writes row by row, by its own code
    model._is_stateful = True
    one_by_one = continuations(model, tokenizer, PROMPTS, 12, lambda text: text in {tokenizer.decode(e) for e in ends})
    assert one_by_one == stopped


def test_in_a_batch_tokens_choose_inputs_too(llama: PreTrainedModel) -> None:
    """A decoder that leaves a batch whole would write what the dense model writes."""
    ids = tokens(2, 24, seed=4)
    moe = fold(llama, plan_inputs(llama, shape_of(llama), ids, torch.ones_like(ids, dtype=torch.bool), 0.6))
    chose: list[bool] = []
    for choice in choices_of(moe):
        applies = choice.applies
        choice.applies = lambda x, applies=applies: chose.append(applies(x)) or chose[-1]  # type: ignore[method-assign]
    continuations(moe, make_tokenizer(), [[7, n] for n in range(5, 5 + 2 * FEW_TOKENS)], 4)
    assert chose
    assert all(chose)


def test_nothing_is_written_after_an_end_or_beyond_the_context(llama: PreTrainedModel) -> None:
    done: list[tuple[int, int]] = []
    (whole,) = continuations(llama, make_tokenizer(), [[5] * 50], 100, progress=lambda *now: done.append(now))
    assert len(whole) == 64 - 50
    assert done == [(count, 100) for count in (*range(1, 15), 100)]
    llama.generation_config.eos_token_id = [whole[3], 999]
    (short,) = continuations(llama, make_tokenizer(), [[5] * 50], 100)
    assert short == whole[: whole.index(whole[3])]


def test_a_question_goes_through_the_chat_template() -> None:
    tokenizer = make_tokenizer(opens_with_bos=True)
    with pytest.raises(UserError, match="no chat template"):
        asked(tokenizer, "why?")
    tokenizer.chat_template = TEMPLATE
    ids = asked(tokenizer, "why?", "Because")
    assert tokenizer.decode(ids) == "<bos>user: why?\nassistant: Because"
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(UserError, match="refuses a question"):
        asked(tokenizer, "why?")


def test_generate_shows_what_it_writes_in_pieces(tomoe: CommandLine, model: Path) -> None:
    dense, tokenizer = load_dense(str(model), torch.float32), load_tokenizer(str(model))
    pieces: list[str] = []
    whole = generate(dense, tokenizer, "the sea", 12, on_text=pieces.append)
    assert "".join(pieces) == whole
    assert len(pieces) > 2
    refused(tomoe("generate", model, "why?", "--chat"), "no chat template")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    answered = generate(dense, tokenizer, "why?", 12, chat=True)
    asked_ids = torch.tensor([asked(tokenizer, "why?")])
    plain = dense.generate(asked_ids, attention_mask=torch.ones_like(asked_ids), max_new_tokens=12, do_sample=False)
    assert answered == tokenizer.decode(plain[0, asked_ids.shape[1] :], skip_special_tokens=True)
    assert "why?" not in tomoe("generate", model, "why?", "--chat", "--max-new-tokens", 12).out
    assert tomoe("generate", model, "why?", "--max-new-tokens", 12).out.startswith("why?")


def test_what_is_written_keeps_its_first_space(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a tokenizer that leaves out the first space of whatever it decodes, as that of Llama 2 does."""
    tokenizer = make_spaced_tokenizer()
    whole = tokenizer("sea\n  a b é c")["input_ids"]
    prompt, written = whole[: len(tokenizer("sea\n")["input_ids"])], whole[len(tokenizer("sea\n")["input_ids"]) :]
    assert tokenizer.decode(written) == " a b é c"
    assert continuation_text(tokenizer, prompt, [*written, tokenizer.eos_token_id]) == "  a b é c"
    # a prompt may end within a character
    cut = next(n for n in range(len(whole)) if tokenizer.decode(whole[:n]).endswith("\ufffd"))
    assert continuation_text(tokenizer, whole[:cut], whole[cut:]) == "é c"

    class Says:
        device, config = "cpu", llama.config

        def generate(self, input_ids: torch.Tensor, streamer: BaseStreamer | None, **_: object) -> torch.Tensor:
            out = torch.tensor([[*input_ids[0].tolist(), *written]])
            for token in (input_ids, *out[0, input_ids.shape[1] :]):
                streamer.put(token)
            streamer.end()
            return out

    monkeypatch.setattr("tomoe.model.generation.check_ids", lambda *_: None)
    pieces: list[str] = []
    assert generate(Says(), tokenizer, "sea\n", on_text=pieces.append) == "".join(pieces) == "  a b é c"
    assert not any("\ufffd" in piece for piece in pieces)
    seen: list[str] = []
    monkeypatch.setattr("tomoe.evaluation.writing.continuations.batchable", lambda _: False)

    def alone(_m: object, prompt: list[int], _n: int, ended: Callable[[list[int], list[int]], bool]) -> list[int]:
        ended(prompt, written)
        return written

    monkeypatch.setattr("tomoe.evaluation.writing.continuations._alone", alone)
    continuations(llama, tokenizer, [prompt], 3, lambda text: seen.append(text) is not None)
    monkeypatch.setattr("tomoe.evaluation.writing.run.continuations", lambda *_: [written])
    assert write(None, tokenizer, [Prompt("", "", "sea\n")], 9).texts == [*seen] == ["  a b é c"]


# -- programs


@pytest.mark.parametrize(
    ("program", "fine"),
    [
        ("import math\nassert math.pi > 3", True),
        ("assert 1 > 2", False),
        ("print('so far')\nraise SystemExit(0)", False),
        ("import os\nos._exit(0)", False),
        ("x = ' ' * 2**31", False),
        ("open('big', 'wb').write(b' ' * 2**22)", False),
        ("import os\nassert not os.listdir() and 'HOME' not in os.environ", True),
        ("files = [open('f', 'w') for _ in range(99)]", False),
        ("syntax error", False),
    ],
)
def test_a_program_runs_within_limits(program: str, fine: bool) -> None:
    assert runs(program) is fine


def test_an_endless_program_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up as soon as what it started has said so; the pipe has an end once nobody is left to write into it."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    communicate = subprocess.Popen.communicate

    def until_it_began(process: Any, program: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        sent = [program]
        while True:
            try:
                return communicate(process, sent.pop() if sent else None, timeout and 0.05)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(BlockingIOError):
                    if os.read(pipe, 1):
                        raise

    monkeypatch.setattr(subprocess.Popen, "communicate", until_it_began)
    child = f"import time\nwith open({str(tmp_path / 'pipe')!r}, 'w', 1) as p:\n print(end='.', file=p, flush=True)\n"
    child += " time.sleep(20)\n print(end='late', file=p, flush=True)"
    assert not runs(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nwhile True: pass")
    os.set_blocking(pipe, True)
    assert os.read(pipe, 9) == b""
    os.close(pipe)


# -- answers


def test_a_function_ends_where_a_line_begins_at_the_margin() -> None:
    inside = "    x = [\n1 if a else 2\n".replace("\n1", "\n    1") + "\n# a comment\n    return x\n"
    assert not function_ended(inside)
    assert body(inside) == inside
    for after in ("```\nThat is all.", "def other():", "print(1)", "class A:"):
        assert function_ended(f"{inside}{after}")
        assert body(f"{inside}{after}") == inside.removesuffix("\n")
    assert body("def again(): pass") == ""


# -- loops


def test_a_loop_is_a_stretch_that_repeats_to_the_end() -> None:
    said = list(range(200))
    assert not loops(said)
    assert not loops([*said, *[7] * 47])
    assert loops([*said, *[7] * 48])
    assert loops([*said, *list(range(30)) * 3])
    assert not loops([*said, *list(range(30)) * 2])
    assert not loops([*said, *list(range(70)) * 3])
    assert not loops([*said, *[7] * 48, 1])
    assert not loops([])
    assert (distinct(said), distinct([1, 2] * 50), distinct([1])) == (1.0, pytest.approx(2 / 97), 1.0)


# -- the tasks, as they are run


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    rows = [
        {"prompt": f"def f{i}(x):\n", "entry_point": f"f{i}", "test": f"def check(f):\n    assert f({i}) == {i}"}
        for i in range(5)
    ]
    (tmp_path / "tasks" / "humaneval").mkdir(parents=True)
    (tmp_path / "tasks" / "humaneval" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "tasks"


def test_answers_are_scored(model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same rules for right and wrong ones, which a pico model does not write."""
    dense, tokenizer = load_dense(str(model), torch.float32), load_tokenizer(str(model))
    seen: list[str] = []

    def write(_m: object, _t: object, prompts: list[list[int]], *_: object) -> list[list[int]]:
        seen.extend(tokenizer.decode(prompt) for prompt in prompts)
        said = ["    return x\n", "    return 1\n```", "    return 0", "    return 3\nwrong("]
        return [tokenizer(text)["input_ids"] for text in said[: len(prompts)]]

    monkeypatch.setattr("tomoe.evaluation.writing.run.continuations", write)
    (score,) = TaskSet(parse_tasks("humaneval"), problems, limit=4, run_code=True).run(dense, tokenizer)
    assert [text[:7] for text in seen] == ["def f0(", "def f1(", "def f2(", "def f3("]
    assert (score.value, score.examples, score.metric) == (0.75, 4, "pass@1")
    assert score.metrics["tokens_per_s"] > 0
    assert "continued" in score.harness
    seen.clear()
    tokenizer.chat_template = TEMPLATE
    (score,) = TaskSet([TaskSpec("humaneval")], problems, limit=2, run_code=True).run(dense, tokenizer)
    assert seen[1].startswith("<bos>user: Complete this Python function.")
    assert seen[1].endswith("assistant: ```python\ndef f2(x):\n")
    assert score.value == 0.5
    assert "chat template" in score.harness


def test_programs_run_only_where_that_was_asked_for(tomoe: CommandLine, model: Path, problems: Path) -> None:
    refused(tomoe("evaluate", model, "--tasks", "humaneval", "--task-dir", problems), "--run-code", "your rights")
    refused(tomoe("evaluate", model, "--run-code"), "need tasks")
    (problems / "humaneval" / "test.jsonl").write_text('{"question": 3}\n')
    asked_for = ["--tasks", "humaneval", "--task-dir", problems, "--run-code"]
    refused(tomoe("evaluate", model, *asked_for), "has the columns question")


def test_the_command_line_shows_both_models(tomoe: CommandLine, tmp_path: Path, problems: Path) -> None:
    # of a short context, which ends the answers
    dense, other = (write_pico(tmp_path / name, max_position_embeddings=96) for name in ("dense", "other"))
    (tmp_path / "t.txt").write_text("the sea is wide. " * 40)
    text = ["--text", tmp_path / "t.txt", "--context", 64]
    tasks = ["--tasks", "humaneval,loops", "--task-dir", problems, "--limit", 2, "--run-code"]
    shown = tomoe("evaluate", dense, other, *text, *tasks, "--json", tmp_path / "rows.json")
    assert shown.code == 0, shown
    for words in ("pass@1", "ends in a loop", "Tokens/s while writing humaneval", "greedy"):
        assert words in " ".join(shown.out.split()), words
    first, second = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [score["task"] for score in second["tasks"]] == ["humaneval", "loops"]
    assert [s["value"] for s in first["tasks"]] == [s["value"] for s in second["tasks"]]
    assert 0 < first["tasks"][1]["metrics"]["distinct_4"] <= 1
