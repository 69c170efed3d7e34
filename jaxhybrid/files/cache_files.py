"""Caches and sequences on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhybrid.cache import attention as cells
from jaxhybrid.cache.create import Sizes, build
from jaxhybrid.cache.hybrid import Cache
from jaxhybrid.cache.portable import Arrays, put_sequence, take_sequence
from jaxhybrid.cache.snapshots import Snapshot, checkpoint, rewind
from jaxhybrid.errors import CheckpointError, RefusedError
from jaxhybrid.files import fingerprint, store
from jaxhybrid.params import Params


def save_cache(path: str | Path, cache: Cache, params: Params) -> None:
    """Write a whole cache to the folder `path`, replacing what was saved there.

    Empty cells and free slots are written as zeros, so that nothing that was removed is on disk.
    """
    arrays = {name: np.asarray(a) for name, a in _named(_scrubbed(cache)).items()}
    about = {"model": fingerprint.describe(params), "sizes": Sizes.of(cache).as_json()}
    store.write(path, "cache", arrays, about)


def load_cache(path: str | Path, params: Params) -> Cache:
    """The cache saved at `path`, bit for bit. CheckpointError naming the field when the model is another."""
    arrays, about = store.read(path, "cache")
    fingerprint.check(about.get("model", {}), params, path)
    empty = build(params.hparams, Sizes.from_json(about["sizes"]))
    wanted = _named(empty)
    for name, like in wanted.items():
        found = arrays.get(name)
        shape = None if found is None else (found.dtype, found.ndim)
        if shape != (like.dtype, like.ndim):
            raise CheckpointError(f"{path}: {name} is missing or of another dtype or shape")
        arrays[name] = _grown(found, like.shape)  # type: ignore[arg-type]
    leaves = [jnp.asarray(arrays[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(empty), leaves)


def save_sequence(path: str | Path, cache: Cache, seq: int, params: Params, partial: bool = False) -> None:
    """Write one sequence to the folder `path`, replacing what was saved there.

    partial: only what its K/V cannot give back, the recurrent state; `load_sequence` then rewinds a
    sequence that still holds its cells. Raises RefusedError for an unknown sequence.
    """
    if partial:
        if not 0 <= seq < cache.n_seq_max:
            raise RefusedError(f"sequence {seq} is outside the cache's {cache.n_seq_max} sequences")
        arrays, kind = snapshot_arrays(checkpoint(cache, seq)), "snapshot"
    else:
        arrays, kind = take_sequence(cache, seq), "sequence"
    store.write(path, "sequence", arrays, {"model": fingerprint.describe(params), "form": kind})


def load_sequence(path: str | Path, cache: Cache, seq: int, params: Params) -> Cache:
    """The cache with sequence `seq` replaced by the one saved at `path`.

    The cache may have other sizes and another layout than the one it was saved from. Raises CheckpointError
    when the file does not fit the model, CacheFullError when the cache has too few cells; RefusedError for an
    unknown sequence, or when a partial file meets a sequence with another past.
    """
    arrays, about = store.read(path, "sequence")
    fingerprint.check(about.get("model", {}), params, path)
    if about.get("form") == "snapshot":
        return rewind(cache, seq, snapshot_of(arrays, cache))
    return put_sequence(cache, seq, arrays)


# ---------------------------------------------------------------------------------------- snapshots


def snapshot_arrays(snapshot: Snapshot) -> Arrays:
    """A snapshot as flat names and arrays."""
    return {name: np.asarray(a) for name, a in _named(snapshot).items()}


def snapshot_of(arrays: Arrays, cache: Cache) -> Snapshot:
    """The inverse, for a cache of the same model; CheckpointError naming the array that does not fit."""
    like = jax.eval_shape(lambda c: checkpoint(c, 0), cache)
    named = _named(like)
    for name, leaf in named.items():
        found = arrays.get(name)
        if found is None or (found.dtype, found.shape) != (leaf.dtype, leaf.shape):
            raise CheckpointError(
                f"{name}: the saved snapshot does not fit this cache ({leaf.dtype}, {leaf.shape})"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[name]) for name in named])


# ------------------------------------------------------------------------------------------ helpers


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by dotted names, in its order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def _scrubbed(cache: Cache) -> Cache:
    """Only the part of K/V that is filled, and zeros where nothing is held."""

    def child(c: cells.AttentionCache) -> cells.AttentionCache:
        filled = np.asarray(jnp.any(c.positions >= 0, axis=0))
        n = int(np.max(np.flatnonzero(filled), initial=-1)) + 1
        used = (c.positions[:, :n] >= 0)[:, None, :, None]

        def kept(buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(jnp.where(used, b[:, :, :n], 0) for b in buffers)

        return c.replace(
            keys=kept(c.keys),
            values=kept(c.values),
            positions=c.positions[:, :n],
            tokens=jnp.where(used[:, 0, :, 0], c.tokens[:, :n], 0),
            owners=None if c.owners is None else c.owners[:, :n],
        )

    cache = cache.with_cells(child)
    r = cache.recurrent
    if r is not None:
        used = jnp.zeros(r.zero_slot + 1, bool).at[r.slots.reshape(-1)].set(True)

        def masked(buffer: jax.Array) -> jax.Array:
            return jnp.where(used.reshape(-1, *(1,) * (buffer.ndim - 1)), buffer, 0)

        cache = cache.replace(recurrent=r.replace(states=jax.tree.map(masked, r.states)))
    return cache


def _grown(found: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`found` with empty cells behind, up to `shape`."""
    if any(a > b for a, b in zip(found.shape, shape, strict=True)):
        raise CheckpointError(f"a saved array has shape {found.shape}, more than {shape}")
    padding = [(0, b - a) for a, b in zip(found.shape, shape, strict=True)]
    return np.pad(found, padding, constant_values=-1 if found.dtype == np.int32 else 0)
