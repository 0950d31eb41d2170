"""Sampling seeds: a stable hash of who samples, the same in every process and every run."""

import hashlib

_BITS = 63


def stable_seed(*parts: int | str) -> int:
    """Hash `parts` to [0, 2^63). Order and boundaries of the parts count."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)
