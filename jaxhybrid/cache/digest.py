"""64-bit digests of token histories, as two uint32 lanes: two histories are taken for equal by theirs.

The cells of an attention child are digested as a set of (token, position); a recurrent state, which
cannot be looked into, carries the digest of the list of tokens that it has seen.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

LANES = 2
_SEEDS = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)
_FACTORS = (0x2C1B3C6D, 0x297A2D39)  # odd, so that they have inverses modulo 2**32


def of_cells(tokens: Array, positions: Array, counted: Array) -> Array:
    """uint32 [..., 2] of cells [..., S] where `counted`; their order does not matter."""
    mixed = _mix(tokens, positions.astype(jnp.uint32) * jnp.uint32(0xC2B2AE3D))
    return jnp.sum(jnp.where(counted[..., None], mixed, 0), axis=-2, dtype=jnp.uint32)


def of_prefixes(before: Array, tokens: Array) -> Array:
    """uint32 [B, T + 1, 2]: digests of `before` [B, 2] followed by each prefix of tokens [B, T].

    h -> factor * h + mix(token), for all prefixes at once: factor**t * (h + sum of mix / factor**i).
    """
    n_tokens = tokens.shape[1]
    powers, inverses = (jnp.asarray(t) for t in _powers(n_tokens))
    scaled = _mix(tokens, jnp.zeros_like(tokens, jnp.uint32)) * inverses[1:]
    sums = jnp.cumsum(scaled, axis=1, dtype=jnp.uint32)
    sums = jnp.pad(sums, ((0, 0), (1, 0), (0, 0)))
    return powers * (before[:, None] + sums)


def _mix(tokens: Array, salt: Array) -> Array:
    """A well-stirred uint32 [..., 2] for each token."""
    h = (tokens.astype(jnp.uint32) + 1)[..., None] * jnp.asarray(_SEEDS) ^ salt[..., None]
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def _powers(n: int) -> tuple[np.ndarray, np.ndarray]:
    """factor**i and factor**-i modulo 2**32 for i = 0 to n, each uint32 [n + 1, 2]."""
    tables = []
    for factors in (_FACTORS, [pow(f, -1, 2**32) for f in _FACTORS]):
        steps = np.tile(np.array(factors, np.uint32), (n + 1, 1))
        steps[0] = 1
        tables.append(np.cumprod(steps, axis=0, dtype=np.uint32))
    return tables[0], tables[1]
