"""The exception for errors that the user can fix."""


class UserError(ValueError):
    """An error that the user can fix, in one sentence: what is wrong, what was found, what to do.

    The command line prints it as one line and exits with code 2. A mistake of ours is an `assert`.
    """
