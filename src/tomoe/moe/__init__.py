"""Runs the converted model: one modeling file, folding, the checkpoint, kernels."""
