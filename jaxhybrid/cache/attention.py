"""The attention child of a cache: cells of K/V, their positions and owners.

A unified child has one stream of cells shared by all sequences, with a set of owners a cell. Otherwise
each sequence has its own stream, and a cell in stream s that has a position belongs to sequence s.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class AttentionCache(struct.PyTreeNode):
    """keys, values: one [streams, KV heads, S, head size] a layer in `layers`.

    positions: int32 [streams, S], -1 where a cell is empty. owners: bool [1, S, sequences] when
    unified, else None.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array
    owners: Array | None
    layers: tuple[int, ...] = struct.field(pytree_node=False)
    n_seq_max: int = struct.field(pytree_node=False)

    @property
    def unified(self) -> bool:
        return self.owners is not None

    @property
    def n_cells(self) -> int:
        """Cells of one stream."""
        return self.positions.shape[1]


class CellPlan(struct.PyTreeNode):
    """Where the tokens of one ubatch go, and what they see; made once a step, used by every layer.

    streams: int32 [B]. cells: int32 [B, T], out of range where nothing is written. mask: bool
    [B, T, n_kv]. `aligned`: row r is stream r, so that nothing needs to be gathered.
    """

    streams: Array
    cells: Array
    mask: Array
    aligned: bool = struct.field(pytree_node=False)


class LayerCells(struct.PyTreeNode):
    """One layer's K/V with the plan of a step: the memory an attention mixer is handed."""

    keys: Array
    values: Array
    plan: CellPlan

    def extend(self, keys: Array, values: Array) -> tuple[Array, Array, Array, LayerCells]:
        """Write K/V [B, T, KV heads, head size] of new tokens; what queries see, and the memory."""
        stored = self.replace(keys=self._write(self.keys, keys), values=self._write(self.values, values))
        return stored._visible(stored.keys), stored._visible(stored.values), self.plan.mask, stored

    def _write(self, buffer: Array, new: Array) -> Array:
        # A neighbour's weight of 0 times NaN is NaN, so a sequence that went wrong stores zeros; its
        # own status tells.
        new = jnp.where(jnp.isfinite(new), new, 0).astype(buffer.dtype)
        return buffer.at[self.plan.streams[:, None], :, self.plan.cells].set(new, mode="drop")

    def _visible(self, buffer: Array) -> Array:
        filled = buffer[:, :, : self.plan.mask.shape[-1]]
        if self.plan.aligned or buffer.shape[0] == 1:
            return filled
        return filled[self.plan.streams]


def create(
    layers: tuple[int, ...],
    cell_shapes: tuple[tuple[int, int], ...],
    n_cells: int,
    n_seq_max: int,
    unified: bool,
    k_dtype: jnp.dtype,
    v_dtype: jnp.dtype,
) -> AttentionCache:
    streams = 1 if unified else n_seq_max

    def buffers(dtype: jnp.dtype) -> tuple[Array, ...]:
        return tuple(jnp.zeros((streams, heads, n_cells, size), dtype) for heads, size in cell_shapes)

    return AttentionCache(
        keys=buffers(k_dtype),
        values=buffers(v_dtype),
        positions=jnp.full((streams, n_cells), -1, jnp.int32),
        owners=jnp.zeros((1, n_cells, n_seq_max), bool) if unified else None,
        layers=layers,
        n_seq_max=n_seq_max,
    )


# ---------------------------------------------------------------------------------------- queries


def held(cache: AttentionCache) -> Array:
    """bool [sequences, S]: the cells of each sequence, in its own stream or the shared one."""
    if cache.owners is not None:
        return cache.owners[0].T & (cache.positions >= 0)
    return cache.positions >= 0


def pos_max(cache: AttentionCache) -> Array:
    """int32 [sequences], -1 where a sequence is empty."""
    return jnp.max(jnp.where(held(cache), cache.positions, -1), axis=1)


def pos_min(cache: AttentionCache) -> Array:
    """int32 [sequences], -1 where a sequence is empty."""
    big = jnp.iinfo(jnp.int32).max
    least = jnp.min(jnp.where(held(cache), cache.positions, big), axis=1)
    return jnp.where(least == big, -1, least)


def n_free(cache: AttentionCache) -> Array:
    """int32 [streams]: empty cells."""
    return jnp.sum(cache.positions < 0, axis=1, dtype=jnp.int32)


# ------------------------------------------------------------------------------------------ a step


def find_cells(cache: AttentionCache, seq_ids: Array, lengths: Array, n_tokens: int) -> tuple[Array, Array]:
    """Free cells for each token: (int32 [B, T], fits: bool). The lowest free cells are taken first."""
    free = cache.positions < 0
    counted = jnp.cumsum(free, axis=1, dtype=jnp.int32)  # [streams, S]
    column = jnp.arange(n_tokens, dtype=jnp.int32)
    if cache.owners is not None:
        ranks = (jnp.cumsum(lengths) - lengths)[:, None] + column
        cells = jnp.searchsorted(counted[0], ranks + 1, side="left")
        fits = jnp.sum(lengths) <= counted[0, -1]
    else:
        mine = counted[seq_ids]
        cells = jax.vmap(lambda row: jnp.searchsorted(row, column + 1, side="left"))(mine)
        fits = jnp.all(lengths <= mine[:, -1])
    return jnp.where(column < lengths[:, None], cells, cache.n_cells).astype(jnp.int32), fits


def occupy(
    cache: AttentionCache, seq_ids: Array, cells: Array, positions: Array, n_kv: int, aligned: bool
) -> tuple[AttentionCache, CellPlan]:
    """Give the cells [B, T] to their sequences at `positions` [B, T]; the plan for the layers."""
    streams = jnp.zeros_like(seq_ids) if cache.unified else seq_ids
    cache = cache.replace(positions=cache.positions.at[streams[:, None], cells].set(positions, mode="drop"))
    if cache.owners is not None:
        owner = jax.nn.one_hot(seq_ids, cache.n_seq_max, dtype=bool)[:, None, :]
        owner = jnp.broadcast_to(owner, (*cells.shape, cache.n_seq_max))
        owners = cache.owners.at[0, cells].set(owner, mode="drop")
        cache = cache.replace(owners=owners)
        mine = owners[0, :n_kv].T[seq_ids]  # [B, n_kv]
        stored = jnp.where(mine, cache.positions[0, :n_kv], -1)
    else:
        stored = cache.positions[:, :n_kv] if aligned else cache.positions[seq_ids, :n_kv]
    mask = (stored[:, None] >= 0) & (stored[:, None] <= positions[:, :, None])
    return cache, CellPlan(streams=streams, cells=cells, mask=mask, aligned=aligned and not cache.unified)


def layer_cells(cache: AttentionCache, layer: int, plan: CellPlan) -> LayerCells:
    k = cache.layers.index(layer)
    return LayerCells(keys=cache.keys[k], values=cache.values[k], plan=plan)


def with_layers(cache: AttentionCache, stored: dict[int, LayerCells]) -> AttentionCache:
    return cache.replace(
        keys=tuple(stored[i].keys for i in cache.layers),
        values=tuple(stored[i].values for i in cache.layers),
    )


# -------------------------------------------------------------------------------------- operations


def clear(cache: AttentionCache, data: bool) -> AttentionCache:
    cache = cache.replace(positions=jnp.full_like(cache.positions, -1))
    if cache.owners is not None:
        cache = cache.replace(owners=jnp.zeros_like(cache.owners))
    if data:
        cache = cache.replace(
            keys=tuple(map(jnp.zeros_like, cache.keys)),
            values=tuple(map(jnp.zeros_like, cache.values)),
        )
    return cache


def seq_rm(cache: AttentionCache, seqs: Array, p0: Array, p1: Array) -> AttentionCache:
    """Drop the cells of the sequences in `seqs` (bool [sequences]) with position in [p0, p1)."""
    inside = (cache.positions >= p0) & (cache.positions < p1)
    if cache.owners is None:
        return cache.replace(positions=jnp.where(seqs[:, None] & inside, -1, cache.positions))
    owners = cache.owners & ~(inside[:, :, None] & seqs)
    owned = jnp.any(owners, axis=-1)
    return cache.replace(owners=owners, positions=jnp.where(owned, cache.positions, -1))


def seq_cp(cache: AttentionCache, src: Array, dst: Array, p0: Array, p1: Array) -> AttentionCache:
    """dst, emptied first, receives the cells of src in [p0, p1): shared when unified, else copied.

    A dst out of range changes nothing.
    """
    inside = (cache.positions >= p0) & (cache.positions < p1)
    if cache.owners is not None:
        column = cache.owners[:, :, src] & inside
        owners = cache.owners.at[:, :, dst].set(column, mode="drop")
        owned = jnp.any(owners, axis=-1)
        return cache.replace(owners=owners, positions=jnp.where(owned, cache.positions, -1))
    kept = jnp.where(inside[src], cache.positions[src], -1)

    def copied(buffers: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(b.at[dst].set(b[src], mode="drop") for b in buffers)

    return cache.replace(
        positions=cache.positions.at[dst].set(kept, mode="drop"),
        keys=copied(cache.keys),
        values=copied(cache.values),
    )
