"""The exception for errors that the user can fix, and the warning that the command line shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SHOWN = 200  # characters


@dataclass(frozen=True)
class Advice:
    """A setting that helps: a function argument or a recipe key, whose command-line option may have another name."""

    name: str
    purpose: str  # goes on after its name: "to start over"
    value: str = "True"
    here: bool = True  # whether it belongs to the call that failed; if not, the purpose says to which

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class UserError(ValueError):
    """An error that the user can fix: what is wrong and what was found, then ways out. As text it is one sentence, which names
    settings as in Python; the command line prints one line that names its options, and exits with code 2. Bugs in tomoe are an
    `assert`."""

    def __init__(self, wrong: str, *advice: str | Advice):
        """wrong: a complete sentence without full stop. advice: what to do, in words or by a setting."""
        super().__init__(wrong, *advice)
        self.wrong, self.advice = wrong, advice

    def told(self, name: Callable[[Advice], str | None] = str) -> str:
        """Return the complete sentence, with settings named by `name`; those for which it returns None are dropped."""
        found = ((one, name(one)) if isinstance(one, Advice) else (None, one) for one in self.advice)
        fixes = [f"use {named} {one.purpose}" if one else named for one, named in found if named]
        return "; ".join(filter(None, (self.wrong, ", or ".join(fixes))))

    def __str__(self) -> str:
        return self.told()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether main or device memory has run out; needs no import of torch."""
    words = ("out of memory", "allocate memory")
    named = type(error).__name__ == "OutOfMemoryError"
    return (
        isinstance(error, MemoryError)
        or named
        or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))
    )


@contextmanager
def enough_memory(*advice: Advice) -> Iterator[None]:
    """Raise UserError, with the advice, if memory runs out within the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"memory ran out ({shortened(error)})", *advice) from error


class Note(UserWarning):
    """A warning that the command line shows, too: what was done differently than the input asks for."""


def shortened(text: object) -> str:
    """Shorten text from a file or library for use in a sentence: damaged files may hold values of any length."""
    shown = str(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
