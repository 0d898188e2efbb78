"""The version of the package, and the line that installs it.

pyproject.toml reads the version, and whatever is made records it.
"""

__version__ = "0.1.0"
INSTALL = "pip install ."  # in a checkout: no package index has it


def install_extra(extra: str) -> str:
    """Say how to install an extra of pyproject.toml, to end a sentence with."""
    return f"install it in a checkout of tomoe with: {INSTALL.removesuffix('.')}'.[{extra}]'"
