"""Methods that decide which weights a token uses: one module each, found by name."""
