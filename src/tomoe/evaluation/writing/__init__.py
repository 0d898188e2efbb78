"""Measures texts that models write: programs, which are run, word problems, loops."""
