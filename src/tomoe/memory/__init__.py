"""Tells whether a conversion fits into the memory of this machine."""
