"""Whether a text ends in a loop, and how varied texts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tomoe.evaluation.results import Count, Name, Share

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
class Variety:
    """How often a model's texts end in a loop, and how varied they are."""

    model: Name
    texts: Count
    length: Count  # tokens of a text, at most
    looped: Count
    distinct: Share


def question(topic: str) -> str:
    """What a chat model is asked."""
    return f"Explain {topic} to a beginner, in a few paragraphs."


def opening(topic: str) -> str:
    """What a model without a chat template continues."""
    return f"This text explains {topic} to a beginner, in a few paragraphs.\n\n"


def loops(ids: Sequence[int]) -> bool:
    """Whether the tokens end in one stretch, again and again; one with other numbers in it shows in `distinct`."""
    for period in range(1, LONGEST + 1):
        # so many tokens at the end equal the one a period before
        equal = next((n for n in range(len(ids) - period) if ids[-1 - n] != ids[-1 - n - period]), len(ids) - period)
        if equal + period >= max(LOOP_TOKENS, TIMES * period):
            return True
    return False


def distinct(ids: Sequence[int]) -> float:
    """Share of the stretches of four tokens that are no repetition of an earlier one; 1 for a text without any."""
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
