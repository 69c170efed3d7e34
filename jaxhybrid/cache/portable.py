"""One sequence taken out of a cache as plain arrays, and put into any other cache of the same model.

The arrays know nothing of cells, slots, streams or sizes, so the other cache may have another layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.buckets import bucket
from jaxhybrid.cache import attention as cells
from jaxhybrid.cache import recurrent as slots
from jaxhybrid.cache.hybrid import Cache, known
from jaxhybrid.cache.operations import seq_rm
from jaxhybrid.errors import CacheFullError, CheckpointError, RefusedError

Arrays = dict[str, np.ndarray]
"""Flat names to arrays: "attention.positions" [n], "attention.keys.3" [heads, n, size],
"recurrent.states.0.ssm" [remembered, ...], "lossy" [] and so on."""


def take_sequence(cache: Cache, seq: int) -> Arrays:
    """Everything that the cache holds of one sequence. Raises RefusedError when there is no such one."""
    _check_known(cache, seq)
    found: Arrays = {"lossy": np.asarray(cache.lossy[seq])}
    for name, child in _cell_children(cache):
        n = int(np.sum(np.asarray(cells.held(child)[seq])))
        positions, tokens, keys, values = _taken(child, seq)
        found |= {f"{name}.positions": np.asarray(positions)[:n], f"{name}.tokens": np.asarray(tokens)[:n]}
        for i, layer in enumerate(child.layers):
            found[f"{name}.keys.{layer}"] = np.asarray(keys[i])[:, :n]
            found[f"{name}.values.{layer}"] = np.asarray(values[i])[:, :n]
        if child.lost is not None:
            found[f"{name}.lost"] = np.asarray(child.lost[seq])
    child = cache.recurrent
    if child is not None:
        n = int(np.sum(np.asarray(child.positions[seq]) >= 0))
        table = np.asarray(child.slots[seq])[:n]
        found["recurrent.positions"] = np.asarray(child.positions[seq])[:n]
        found["recurrent.digests"] = np.asarray(child.digests[seq])[:n]
        for layer, state in zip(child.layers, child.states, strict=True):
            for name, buffer in state.items():
                found[f"recurrent.states.{layer}.{name}"] = np.asarray(buffer[table])
    return found


def put_sequence(cache: Cache, seq: int, arrays: Arrays) -> Cache:
    """The cache with `seq` replaced by what `take_sequence` gave.

    Raises RefusedError for an unknown sequence, CheckpointError naming the array that this cache cannot
    hold, CacheFullError when it has too few cells.
    """
    _check_known(cache, seq)
    _check_fits_model(cache, arrays)
    emptied, _ = seq_rm(cache, seq, -1, -1)
    children: dict[str, Any] = {}
    for name, child in _cell_children(emptied):
        children[name] = _put_cells(child, seq, name, arrays)
    child = emptied.recurrent
    if child is not None:
        children["recurrent"] = _put_states(child, seq, arrays)
    return emptied.replace(lossy=emptied.lossy.at[seq].set(bool(arrays["lossy"])), **children)


def _check_known(cache: Cache, seq: int) -> None:
    if not bool(known(cache, seq)):
        raise RefusedError(f"sequence {seq} is outside the cache's {cache.n_seq_max} sequences")


def _cell_children(cache: Cache) -> list[tuple[str, cells.AttentionCache]]:
    both = (("attention", cache.attention), ("windowed", cache.windowed))
    return [(name, child) for name, child in both if child is not None]


@jax.jit
def _taken(child: cells.AttentionCache, seq: Array) -> tuple[Array, Array, list[Array], list[Array]]:
    """(positions [S], tokens [S], keys and values [heads, S, size] a layer): the sequence's cells in order,
    then the others."""
    mine = cells.held(child)[seq]
    stream = 0 if child.unified else seq
    order = jnp.argsort(jnp.where(mine, child.positions[stream], jnp.iinfo(jnp.int32).max), stable=True)
    keys, values = ([b[stream][:, order] for b in layers] for layers in (child.keys, child.values))
    return child.positions[stream][order], child.tokens[stream][order], keys, values


def _put_cells(child: cells.AttentionCache, seq: int, name: str, arrays: Arrays) -> cells.AttentionCache:
    positions, tokens = arrays[f"{name}.positions"], arrays[f"{name}.tokens"]
    free = np.flatnonzero(np.asarray(child.positions[0 if child.unified else seq]) < 0)
    n, first = len(positions), 0
    lost = int(arrays[f"{name}.lost"]) if child.lost is not None else -1
    if n > len(free):
        # what is out of sight may stay behind
        seen = 0 if child.window is None else int(np.sum(positions <= positions[-1] + 1 - child.window))
        first = min(seen, n - len(free))
        if n - first > len(free):
            raise CacheFullError(
                f"{name} cache: the sequence needs {n} cells, {len(free)} of {child.n_cells} are free; "
                "use a cache with a larger n_ctx or remove a sequence"
            )
        lost = max(lost, int(positions[first - 1]))
    kept, width = n - first, bucket(n - first)
    target = np.full(width, child.n_cells, np.int32)
    target[:kept] = free[:kept]

    def padded(a: np.ndarray, axis: int) -> np.ndarray:
        a = np.take(a, range(first, n), axis=axis)
        return np.pad(a, [(0, width - kept) if i == axis else (0, 0) for i in range(a.ndim)])

    child = _put(
        child,
        seq,
        target,
        padded(positions, 0),
        padded(tokens, 0),
        tuple(padded(arrays[f"{name}.keys.{layer}"], 1) for layer in child.layers),
        tuple(padded(arrays[f"{name}.values.{layer}"], 1) for layer in child.layers),
    )
    return child if child.lost is None else child.replace(lost=child.lost.at[seq].set(lost))


@jax.jit
def _put(
    child: cells.AttentionCache,
    seq: Array,
    target: Array,
    positions: Array,
    tokens: Array,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
) -> cells.AttentionCache:
    stream = 0 if child.unified else seq

    def put(buffer: Array, new: Array) -> Array:
        return buffer.at[stream, :, target].set(new.swapaxes(0, 1), mode="drop")

    owners = child.owners
    if owners is not None:
        owners = owners.at[0, target, seq].set(True, mode="drop")
    return child.replace(
        keys=tuple(map(put, child.keys, keys)),
        values=tuple(map(put, child.values, values)),
        positions=child.positions.at[stream, target].set(positions, mode="drop"),
        tokens=child.tokens.at[stream, target].set(tokens, mode="drop"),
        owners=owners,
    )


def _put_states(child: slots.RecurrentCache, seq: int, arrays: Arrays) -> slots.RecurrentCache:
    """The newest states that this cache has room to remember."""
    n = min(len(arrays["recurrent.positions"]), child.n_remembered)
    if n == 0:
        return child
    used = set(np.asarray(child.slots).reshape(-1).tolist())
    free = [s for s in range(child.zero_slot) if s not in used][:n]
    table = np.full(child.n_remembered, child.zero_slot, np.int32)
    positions = np.full(child.n_remembered, -1, np.int32)
    digests = np.zeros((child.n_remembered, 2), np.uint32)
    table[:n], positions[:n] = free, arrays["recurrent.positions"][:n]
    digests[:n] = arrays["recurrent.digests"][:n]
    where = jnp.asarray(free)
    states = tuple(
        {
            name: _set_rows(buffer, where, arrays[f"recurrent.states.{layer}.{name}"][:n])
            for name, buffer in state.items()
        }
        for layer, state in zip(child.layers, child.states, strict=True)
    )
    return child.replace(
        states=states,
        slots=child.slots.at[seq].set(table),
        positions=child.positions.at[seq].set(positions),
        digests=child.digests.at[seq].set(digests),
    )


@jax.jit
def _set_rows(buffer: Array, rows: Array, new: Array) -> Array:
    return buffer.at[rows].set(new)


def _check_fits_model(cache: Cache, arrays: Arrays) -> None:
    """CheckpointError naming the first array that is missing, unexpected, or of another shape or dtype."""
    wanted: dict[str, tuple[Any, tuple[int | None, ...]]] = {"lossy": (np.dtype(bool), ())}
    integers = np.dtype(np.int32)
    for name, child in _cell_children(cache):
        wanted |= {f"{name}.positions": (integers, (None,)), f"{name}.tokens": (integers, (None,))}
        for i, layer in enumerate(child.layers):
            for which, buffer in (("keys", child.keys[i]), ("values", child.values[i])):
                wanted[f"{name}.{which}.{layer}"] = (buffer.dtype, (buffer.shape[1], None, buffer.shape[3]))
        if child.lost is not None:
            wanted[f"{name}.lost"] = (integers, ())
    if cache.recurrent is not None:
        wanted["recurrent.positions"] = (integers, (None,))
        wanted["recurrent.digests"] = (np.dtype(np.uint32), (None, 2))
        for layer, state in zip(cache.recurrent.layers, cache.recurrent.states, strict=True):
            for name, buffer in state.items():
                wanted[f"recurrent.states.{layer}.{name}"] = (buffer.dtype, (None, *buffer.shape[1:]))
    for name in sorted(wanted.keys() | arrays.keys()):
        if name not in arrays:
            raise CheckpointError(f"{name}: missing from the saved sequence; it belongs to another model")
        if name not in wanted:
            raise CheckpointError(f"{name}: this cache has no such array; the sequence is of another model")
        dtype, shape = wanted[name]
        found = arrays[name]
        if found.dtype != dtype:
            raise CheckpointError(
                f"{name}: saved as {found.dtype}, this cache holds {dtype}; create the cache with that dtype"
            )
        same = len(found.shape) == len(shape) and all(
            b in (None, a) for a, b in zip(found.shape, shape, strict=True)
        )
        if not same:
            raise CheckpointError(f"{name}: saved with shape {found.shape}, this cache needs {shape}")
