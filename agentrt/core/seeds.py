"""Seeds by derivation: every source of randomness is a hash of what it belongs to.

    run seed ─► episode (task id, member, attempt) ─► branch (path) ─► turn

Two forks with equal context therefore differ, and the same episode run twice does not. The hash is BLAKE2b over tagged,
length-prefixed parts, so that no two different paths can spell the same bytes.
"""

import secrets
from hashlib import blake2b

SEED_BITS = 63
"""Seeds fit a signed 64-bit integer, as JSON readers and numpy expect."""


def derive(seed: int, *path: str | int) -> int:
    """A child seed of `seed` for `path`; equal arguments give equal seeds on every machine and Python version."""
    digest = blake2b(digest_size=8)
    for part in (seed, *path):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> (64 - SEED_BITS)


def fresh() -> int:
    """A seed nobody chose, for requests without one; it is recorded with what it produced."""
    return secrets.randbits(SEED_BITS)
