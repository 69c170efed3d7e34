"""The host-level driver: check a batch, make sure it fits, split it, step, put outputs in order."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.batch import Batch, Row, bucket, check_batch, split
from jaxhybrid.cache import attention as cells
from jaxhybrid.cache import hybrid
from jaxhybrid.cache.hybrid import Cache
from jaxhybrid.errors import CacheFullError, UsageError
from jaxhybrid.model import NON_FINITE, step
from jaxhybrid.params import Params

jitted_step = jax.jit(step)
donating_step = jax.jit(step, donate_argnums=1)
"""`step` that consumes the cache it is given, updating its buffers in place."""


def decode(
    params: Params, cache: Cache, batch: Batch, n_ubatch: int = 512, donate: bool = False
) -> tuple[Array, Cache]:
    """Run a batch: logits float32 [number of outputs, V] in the batch's order, and the new cache.

    n_ubatch: about how many tokens one step takes. The given cache stays valid unless `donate`.
    Raises a BatchError or CacheFullError before anything runs.
    """
    if n_ubatch < 1:
        raise UsageError(f"n_ubatch: {n_ubatch} must be at least 1")
    vocab = params.hparams.vocab_size
    ends = np.asarray(_ends(cache))
    rows = check_batch(batch, vocab, ends.tolist())
    n_kv = prepare(cache, rows)
    parts: list[Array] = []
    order: list[int] = []
    for k, (ubatch, where) in enumerate(split(rows, n_ubatch, cache.n_seq_max, n_kv)):
        run = donating_step if donate or k > 0 else jitted_step
        out, cache = run(params, cache, ubatch)
        parts.append(out.logits[: len(where)])
        order.extend(where)
        _warn_of_non_finite(out.status, ubatch.seq_ids)
    if not order:
        return jnp.zeros((0, vocab), jnp.float32), cache
    return jnp.concatenate(parts)[np.argsort(order, kind="stable")], cache


def prepare(cache: Cache, rows: list[Row]) -> int | None:
    """Make sure that rows fit, or raise CacheFullError; how many cells attention has to read."""
    child = cache.attention
    if child is None:
        return None
    free, highest = (np.asarray(a) for a in _room(child))
    if child.unified:
        needed = sum(len(row.tokens) for row in rows)
        if needed > free[0]:
            raise CacheFullError(
                f"attention cache: {needed} cells needed, {free[0]} of {child.n_cells} free; "
                "raise n_ctx or remove a sequence"
            )
    else:
        for row in rows:
            if len(row.tokens) > free[row.seq_id]:
                raise CacheFullError(
                    f"attention cache: sequence {row.seq_id} needs {len(row.tokens)} cells, "
                    f"{free[row.seq_id]} of {child.n_cells} free; raise n_ctx or remove the sequence"
                )
        needed = max(len(row.tokens) for row in rows)
    return context_bucket(int(highest.max()) + needed, child.n_cells)


def context_bucket(n: int, n_cells: int) -> int:
    """How many cells to read when `n` are filled: a power of two of at least 512, or all."""
    return min(max(bucket(n), 512), n_cells)


@jax.jit
def _ends(cache: Cache) -> Array:
    return hybrid.positions_max(cache)


@jax.jit
def _room(child: cells.AttentionCache) -> tuple[Array, Array]:
    """(free cells, one past the highest filled cell) of each stream, int32 [streams]."""
    index = jnp.arange(1, child.n_cells + 1, dtype=jnp.int32)
    return cells.n_free(child), jnp.max(jnp.where(child.positions >= 0, index, 0), axis=1)


def _warn_of_non_finite(status: Array, seq_ids: Array) -> None:
    bad = np.asarray(seq_ids)[np.asarray(status) == NON_FINITE]
    if bad.size:
        warnings.warn(f"sequence {bad[0]}: activations are not finite; check the weights", stacklevel=3)
