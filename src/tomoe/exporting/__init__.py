"""Exports the converted model to stock architectures and GGUF, verifies each export, and uploads."""
