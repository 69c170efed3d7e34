"""The host-level driver: check a batch, make sure it fits, split it, step, put outputs in order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.batch import Batch, Row, Ubatch, check_batch, is_coupled
from jaxhybrid.buckets import bucket
from jaxhybrid.cache import attention as cells
from jaxhybrid.cache import hybrid
from jaxhybrid.cache.hybrid import Cache
from jaxhybrid.errors import CacheFullError, JaxHybridError, UsageError
from jaxhybrid.model import BAD_ROW, NO_ROOM, NON_FINITE, encode, step
from jaxhybrid.params import Params
from jaxhybrid.splits import Limits, lay_out, split

jitted_step = jax.jit(step)
donating_step = jax.jit(step, donate_argnums=1)
"""`step` that consumes the cache it is given, updating its buffers in place."""
_encode = jax.jit(encode)
_donating_encode = jax.jit(encode, donate_argnums=1)


def decode(
    params: Params,
    cache: Cache,
    batch: Batch,
    n_ubatch: int = 512,
    donate: bool = False,
    split: str = "uneven",
) -> tuple[Array, Cache]:
    """Run a batch: logits float32 [number of outputs, V] in the batch's order, and the new cache.

    n_ubatch: about how many tokens one step takes. split: how it is cut (`jaxhybrid.splits`), which does
    not change the result. The given cache stays valid unless `donate`. Raises a BatchError or
    CacheFullError before anything runs.
    """

    def run(cache: Cache, ubatch: Ubatch, consume: bool) -> tuple[Array, Array, Cache]:
        out, cache = (donating_step if consume else jitted_step)(params, cache, ubatch)
        return out.logits, out.status, cache

    return _drive(params, cache, batch, n_ubatch, donate, split, run)


def decode_hidden(
    params: Params, cache: Cache, batch: Batch, n_ubatch: int = 512, donate: bool = False
) -> tuple[Array, Cache]:
    """`decode` up to the head: hidden states float32 [number of outputs, D] after the final norm."""

    def run(cache: Cache, ubatch: Ubatch, consume: bool) -> tuple[Array, Array, Cache]:
        return (_donating_encode if consume else _encode)(params, cache, ubatch)

    return _drive(params, cache, batch, n_ubatch, donate, "uneven", run)


def _drive(
    params: Params, cache: Cache, batch: Batch, n_ubatch: int, donate: bool, strategy: str, run
) -> tuple[Array, Cache]:
    if n_ubatch < 1:
        raise UsageError(f"n_ubatch: {n_ubatch} must be at least 1")
    rows = checked_rows(cache, batch, params.hparams.vocab_size)
    n_kv, limits = prepare(cache, rows)
    pieces = split(strategy, batch, rows, n_ubatch, limits)
    parts: list[tuple[Array, list[int]]] = []
    states: list[tuple[Array, Array]] = []
    for k, (ubatch, where) in enumerate(_laid_out(pieces, rows, cache.n_seq_max, n_kv)):
        out, status, cache = run(cache, ubatch, donate or k > 0)
        parts.append((out, where))
        states.append((status, ubatch.seq_ids))
    _check_status(states)
    return _in_order(parts), cache


def _in_order(parts: list[tuple[Array, list[int]]]) -> Array:
    """Padded outputs [O, width] and the tokens they belong to: float32 [tokens, width] in order of tokens.

    Put together by the host: on the device every number of outputs would be a program to compile.
    """
    first, tokens = parts[0]
    order = sorted(token for _, where in parts for token in where)
    if tokens == order and first.shape[0] == len(order) and first.dtype == jnp.float32:
        return first
    rows = np.empty((len(order), first.shape[1]), np.float32)
    for part, where in parts:
        rows[np.searchsorted(order, where)] = np.asarray(part)[: len(where)]
    return jax.device_put(rows, first.sharding if first.committed else None)


def _laid_out(
    pieces, rows: Sequence[Row], n_seq_max: int, n_kv: int | None
) -> Iterator[tuple[Ubatch, list[int]]]:
    done = [0] * len(rows)
    for piece in pieces:
        yield lay_out(piece, rows, done, n_seq_max, n_kv)
        for k, n in piece:
            done[k] += n


def checked_rows(cache: Cache, batch: Batch, vocab_size: int) -> list[Row]:
    """The rows of a batch that may follow what the cache holds; a BatchError if it may not."""
    ends = np.asarray(_ends(cache)).tolist()
    pasts = [row.tobytes() for row in np.asarray(_histories(cache))] if is_coupled(batch) else None
    return check_batch(batch, vocab_size, ends, pasts)


def prepare(cache: Cache, rows: Sequence[Row]) -> tuple[int | None, Limits]:
    """Make sure that rows fit in every child, or raise CacheFullError; nothing is computed.

    Returns how many cells attention has to read, and what a step may take.
    """
    child, n_kv = cache.attention, None
    if child is not None:
        free, highest = (np.asarray(a) for a in _room(child))
        if child.unified:
            needed = sum(len(row.tokens) for row in rows)
            if needed > free[0]:
                raise CacheFullError(
                    f"attention cache: {needed} cells needed, {free[0]} of {child.n_cells} free; "
                    "raise n_ctx or remove a sequence"
                )
        else:
            by_sequence: dict[int, int] = {}
            for row in rows:
                for seq in row.seq_ids:
                    by_sequence[seq] = by_sequence.get(seq, 0) + len(row.tokens)
            for seq, needed in by_sequence.items():
                if needed > free[seq]:
                    raise CacheFullError(
                        f"attention cache: sequence {seq} needs {needed} cells, "
                        f"{free[seq]} of {child.n_cells} free; raise n_ctx or remove the sequence"
                    )
            needed = max(by_sequence.values())
        n_kv = context_bucket(int(highest.max()) + needed, child.n_cells)
    return n_kv, _limits(cache.windowed, cache.attention)


def _limits(child: cells.AttentionCache | None, full: cells.AttentionCache | None) -> Limits:
    """A windowed child has cells for the window and a ubatch: no step may take more, unless there are as many
    as in layers that see everything, whose room was checked."""
    if child is None or child.window is None or full is not None and child.n_cells >= full.n_cells:
        return Limits()
    seen = max(int(_in_sight(child)), child.window * (child.n_seq_max if child.unified else 1))
    spare = child.n_cells - seen
    if spare < 1:
        raise CacheFullError(
            f"sliding-window cache: {seen} of {child.n_cells} cells are in sight, none is free; "
            "raise n_ubatch of create_cache or remove a sequence"
        )
    return Limits(total=spare) if child.unified else Limits(row=spare)


def context_bucket(n: int, n_cells: int) -> int:
    """How many cells to read when `n` are filled: a power of two of at least 512, or all.

    All where the power of two is a third of them or more: to take a part XLA's CPU compiler copies it, which
    moves three times its bytes.
    """
    cells = max(bucket(n), 512)
    return n_cells if 3 * cells >= n_cells else cells


_ends = jax.jit(hybrid.positions_max)
_histories = jax.jit(hybrid.histories)


@jax.jit
def _room(child: cells.AttentionCache) -> tuple[Array, Array]:
    """(free cells, one past the highest filled cell) of each stream, int32 [streams]."""
    index = jnp.arange(1, child.n_cells + 1, dtype=jnp.int32)
    return cells.n_free(child), jnp.max(jnp.where(child.positions >= 0, index, 0), axis=1)


@jax.jit
def _in_sight(child: cells.AttentionCache) -> Array:
    """The most cells of a stream that a next query can see, int32 []."""
    assert child.window is not None
    seen = cells.held(child) & (child.positions > (cells.pos_max(child) + 1 - child.window)[:, None])
    if child.unified:
        return jnp.sum(jnp.any(seen, axis=0))
    return jnp.max(jnp.sum(seen, axis=1))


def _check_status(states: list[tuple[Array, Array]]) -> None:
    """Warn of sequences that are not finite; `prepare` has made sure that every row could be taken."""
    bad: set[int] = set()
    for status, seq_ids in states:
        found, ids = np.asarray(status), np.asarray(seq_ids)
        if np.isin(found, (NO_ROOM, BAD_ROW)).any():
            raise JaxHybridError("a step found no room that was there before; please report this batch")
        bad |= set(ids[found == NON_FINITE].tolist())
    for seq in sorted(bad):
        warnings.warn(f"sequence {seq}: activations are not finite; check the weights", stacklevel=4)
