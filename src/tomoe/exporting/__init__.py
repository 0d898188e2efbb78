"""Exports the converted model to stock architectures and GGUF, and verifies each export."""
