"""Runs the generative tasks on one model after another, and finds texts that end in a loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tomoe.errors import Advice, UserError
from tomoe.evaluation.results import LOOP_METRIC, TOKENS_PER_S, Count, Name, Share, TaskScore
from tomoe.evaluation.writing import humaneval
from tomoe.evaluation.writing.continuations import ROWS, continuations
from tomoe.evaluation.writing.humaneval import Problem, Prompt
from tomoe.model.generation import asked
from tomoe.model.tokens import check_text, continuation_text, prompt_ids
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.version import __version__

LOOPS = "loops"
NAMES = (humaneval.NAME, LOOPS)
LOOP_LENGTH = 256
# a loop is so many tokens at the end, at least, that repeat a stretch of at most so many, three times at least
LOOP_TOKENS, LONGEST = 48, 64
TIMES = 3
NGRAM = 4
TOPICS = (
    "the sea",
    "how bread is baked",
    "the history of the bicycle",
    "why leaves change color",
    "how a computer stores numbers",
    "the life of bees",
    "how to plan a garden",
    "what makes a good story",
    "volcanoes",
    "how money works",
    "the rules of chess",
    "how vaccines protect people",
    "the planets",
    "how to learn a language",
    "old bridges",
    "what a database is",
)


@dataclass(frozen=True)
class Written:
    """What a model generated for some prompts."""

    ids: list[list[int]]
    texts: list[str]
    seconds: float
    chat: bool  # whether it was asked through its chat template

    def score(self, task: str, metric: str, hits: Sequence[bool], more: Mapping[str, float]) -> TaskScore:
        """The share of `hits` as a task score, with its standard error."""
        count = len(hits)
        tokens = sum(map(len, self.ids))
        share = sum(hits) / count
        how = "asked through the chat template" if self.chat else "the text continued, without a chat template"
        return TaskScore(
            task=task,
            shots=0,
            metric=metric,
            value=share,
            standard_error=math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None,
            examples=count,
            truncated=0,
            metrics={metric: share, TOKENS_PER_S: tokens / self.seconds, "tokens": tokens / count, **more},
            version="1",
            harness=f"tomoe {__version__}, greedy, {how}",
        )


def write(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    most: int,
    ended: Callable[[str], bool] = lambda _: False,
    rows: int = ROWS,
    progress: StageCallback = no_stage_progress,
) -> Written:
    """Generate answers: through the chat template, if the model has one, because it was trained for questions; else as a text."""
    chat = bool(tokenizer.chat_template)
    if chat:
        ids = [asked(tokenizer, prompt.question, prompt.begun) for prompt in prompts]
    else:
        ids = [prompt_ids(tokenizer, prompt.opening) for prompt in prompts]
    for row in ids:
        check_text(row, tokenizer)
    began = time.perf_counter()
    written = continuations(model, tokenizer, ids, most, ended, rows, progress)
    seconds = time.perf_counter() - began
    texts = [continuation_text(tokenizer, prompt, row) for prompt, row in zip(ids, written, strict=True)]
    return Written(written, texts, seconds, chat)


@dataclass(frozen=True)
class ProgramTask:
    """Counts functions that pass their tests."""

    problems: list[Problem]

    def run(self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: int, progress: StageCallback) -> TaskScore:
        prompts = [humaneval.prompt_of(problem) for problem in self.problems]
        ended = humaneval.function_ended
        written = write(model, tokenizer, prompts, humaneval.MOST, ended, rows, progress)
        solved = [humaneval.passes(*pair) for pair in zip(self.problems, written.texts, strict=True)]
        return written.score(humaneval.NAME, "pass@1", solved, {"solved": sum(solved)})


@dataclass(frozen=True)
class Variety:
    """How often a model's texts end in a loop, and how varied they are."""

    model: Name
    texts: Count
    length: Count  # tokens of a text, at most
    looped: Count
    distinct: Share


@dataclass(frozen=True)
class LoopTask:
    """Counts continuations that end in a loop."""

    topics: Sequence[str] = TOPICS
    length: int = LOOP_LENGTH

    @property
    def prompts(self) -> list[Prompt]:
        words = [f"{topic} to a beginner, in a few paragraphs." for topic in self.topics]
        return [Prompt(f"Explain {asked_for}", "", f"This text explains {asked_for}\n\n") for asked_for in words]

    def run(self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: int, progress: StageCallback) -> TaskScore:
        written = write(model, tokenizer, self.prompts, self.length, rows=rows, progress=progress)
        varied = self.variety("", written).distinct
        return written.score(LOOPS, LOOP_METRIC, list(map(loops, written.ids)), {"distinct_4": varied})

    def variety(self, name: str, written: Written) -> Variety:
        ids = written.ids
        return Variety(name, len(ids), self.length, sum(map(loops, ids)), sum(map(distinct, ids)) / len(ids))


def loops(ids: Sequence[int]) -> bool:
    """Whether the tokens end in one stretch, repeated; one with other numbers in it shows in `distinct`."""
    for period in range(1, LONGEST + 1):
        # so many tokens at the end equal the one a period before
        equal = next((n for n in range(len(ids) - period) if ids[-1 - n] != ids[-1 - n - period]), len(ids) - period)
        if equal + period >= max(LOOP_TOKENS, TIMES * period):
            return True
    return False


def distinct(ids: Sequence[int]) -> float:
    """Share of the stretches of four tokens that do not repeat an earlier one; 1 for a text without repetition."""
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def load_task(name: str, folder: Path | None, limit: int | None, run_code: bool) -> ProgramTask | LoopTask:
    """Load a task with `limit` of its problems, evenly spread. Raises UserError if it may not run, or has no problems."""
    if name == LOOPS:
        return LoopTask(TOPICS[:limit])
    if not run_code:
        raise UserError(
            f"the task {name} executes programs that the model generates",
            Advice(
                "run_code",
                "to run each in a process of its own, with limits on time, memory and files, but with your rights",
            ),
        )
    rows = humaneval.problems(folder)
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    return ProgramTask(rows)
