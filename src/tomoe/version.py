"""The version of the package.

pyproject.toml reads it, and whatever is made records it.
"""

__version__ = "0.1.0"
