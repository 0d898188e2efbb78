"""Makes text from strangers harmless before the terminal shows it."""

from __future__ import annotations

import re

from tomoe.errors import shortened

# control characters but newline and tab, changes of the writing direction, and halves of surrogate pairs
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

LONGEST_WORD = 500  # characters: a path is one word


def printable(text: str) -> str:
    """The text with control characters as escape sequences: what strangers wrote must not move the cursor or color the
    terminal."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def one_line(sentence: str) -> str:
    """A sentence in one line of printable text; of an endless word, as damaged files hold them, only the beginning."""
    words = printable(" ".join(sentence.split())).split(" ")
    return " ".join(word if len(word) <= LONGEST_WORD else shortened(word) for word in words)
