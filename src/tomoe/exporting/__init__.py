"""The converted model in other forms, stock architectures and GGUF, each of them verified; and its upload."""
