"""The version of the package: read by pyproject.toml, and written into whatever is made."""

__version__ = "0.1.0"
