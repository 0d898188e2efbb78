"""Measures generated text: programs, which are run, and loops."""
