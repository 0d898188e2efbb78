"""The exception for errors that the user can fix, and the warning that the command line shows."""

_SHOWN = 200  # characters


class UserError(ValueError):
    """An error that the user can fix, in one sentence: what is wrong, what was found, what to do. The command line prints it
    as one line and exits with code 2. A mistake of ours is an `assert`."""


class Note(UserWarning):
    """A warning for the user of the command line, too: what was done otherwise than the input asks for."""


def shortened(text: object) -> str:
    """What a file or another library says, as a sentence can hold it: a damaged file may hold values of any length."""
    shown = str(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
