"""Measures texts that models write: programs, which are run, and loops."""
