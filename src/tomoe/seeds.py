"""One seed per draw, derived from its purpose, so that any draw can be repeated by itself."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from numbers and names; different parts give unrelated streams."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
