"""The exception that means "you can mend this"."""


class UserError(ValueError):
    """Something the user can mend, told in one sentence: what is wrong, what was found, what to do.

    The command line prints it as one line and exits with code 2; whatever is our own fault is an `assert`.
    """
