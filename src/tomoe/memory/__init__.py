"""Tells whether a conversion fits into the memory and onto the disk of this machine."""
