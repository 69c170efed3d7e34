"""The attention child of a cache: cells of K/V, their positions and owners.

A unified child has one stream of cells shared by all sequences, with a set of owners a cell. Otherwise
each sequence has its own stream, and a cell in stream s that has a position belongs to sequence s.
A windowed child holds the layers that see only the last `window` tokens; it has few cells, and takes
those back that no later query of an owner can see.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxhybrid.cache import digest
from jaxhybrid.hparams import RopeHparams
from jaxhybrid.ops.rope import rotate

_NEVER = jnp.iinfo(jnp.int32).max


class AttentionCache(struct.PyTreeNode):
    """keys, values: one [streams, KV heads, S, head size] a layer in `layers`.

    positions: int32 [streams, S], -1 where a cell is empty. tokens: int32 [streams, S], the token ids.
    owners: bool [1, S, sequences] when unified, else None. lost: int32 [sequences] when windowed, the
    last position whose cell was taken back (-1: none), else None. ropes: how each layer's keys were
    rotated. window: tokens a query sees, itself included; None for all.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array
    tokens: Array
    owners: Array | None
    lost: Array | None
    layers: tuple[int, ...] = struct.field(pytree_node=False)
    ropes: tuple[RopeHparams | None, ...] = struct.field(pytree_node=False)
    n_seq_max: int = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False)

    @property
    def unified(self) -> bool:
        return self.owners is not None

    @property
    def n_cells(self) -> int:
        """Cells of one stream."""
        return self.positions.shape[1]


class CellPlan(struct.PyTreeNode):
    """Where the tokens of one ubatch go, and what they see; made once a step, used by every layer.

    streams: int32 [W], cells: int32 [W, T] (out of range where nothing is written) and rows: int32 [W]
    say which row is written where; rows is None for W = B, in order. read: int32 [B], the stream each
    row sees. mask: bool [B, T, n_kv]. `aligned`: row r is stream r, so that nothing needs gathering.
    """

    streams: Array
    cells: Array
    rows: Array | None
    read: Array
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
        if self.plan.rows is not None:
            new = new[self.plan.rows]
        return buffer.at[self.plan.streams[:, None], :, self.plan.cells].set(new, mode="drop")

    def _visible(self, buffer: Array) -> Array:
        filled = buffer[:, :, : self.plan.mask.shape[-1]]
        if self.plan.aligned or buffer.shape[0] == 1:
            return filled
        return filled[self.plan.read]


def create(
    layers: tuple[int, ...],
    cell_shapes: tuple[tuple[int, int], ...],
    ropes: tuple[RopeHparams | None, ...],
    window: int | None,
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
        tokens=jnp.zeros((streams, n_cells), jnp.int32),
        owners=jnp.zeros((1, n_cells, n_seq_max), bool) if unified else None,
        lost=None if window is None else jnp.full(n_seq_max, -1, jnp.int32),
        layers=layers,
        ropes=ropes,
        n_seq_max=n_seq_max,
        window=window,
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
    least = jnp.min(jnp.where(held(cache), cache.positions, _NEVER), axis=1)
    return jnp.where(least == _NEVER, -1, least)


def n_free(cache: AttentionCache) -> Array:
    """int32 [streams]: empty cells."""
    return jnp.sum(cache.positions < 0, axis=1, dtype=jnp.int32)


def can_end_at(cache: AttentionCache, end: Array) -> Array:
    """bool [sequences]: whether all that a query right after `end` (int32, [] or [sequences]) would see
    is still held."""
    if cache.lost is None or cache.window is None:
        return jnp.ones(cache.n_seq_max, bool)
    return (cache.lost < 0) | (cache.lost < end + 2 - cache.window)


def history(cache: AttentionCache, end: Array) -> Array:
    """uint32 [sequences, 2]: digest of what a query right after `end` (int32 [sequences]) would see."""
    end = end[:, None]
    seen = held(cache) & (cache.positions <= end)
    if cache.window is not None:
        seen = seen & (cache.positions > end + 1 - cache.window)
    tokens = jnp.broadcast_to(cache.tokens, seen.shape)
    return digest.of_cells(tokens, jnp.broadcast_to(cache.positions, seen.shape), seen)


# ------------------------------------------------------------------------------------------ a step


class Takers(struct.PyTreeNode):
    """The sequences that take tokens in a step, and from which row.

    seq_ids: int32 [W]. rows: int32 [W], or None for row w. lengths: int32 [W], tokens taken. starts:
    int32 [W]. A unified child takes one entry a row, whose `members` (bool [B, sequences]) own the cells.
    """

    seq_ids: Array
    rows: Array | None
    lengths: Array
    starts: Array


def takers(
    cache: AttentionCache, seq_ids: Array, lengths: Array, starts: Array, members: Array | None
) -> Takers:
    """Who writes cells: each row, or, where rows are coupled and streams apart, each sequence."""
    if members is None or cache.unified:
        return Takers(seq_ids, None, lengths, starts)
    mine = (members & (lengths > 0)[:, None]).T  # [sequences, B]
    row = jnp.argmax(mine, axis=1).astype(jnp.int32)
    taken = jnp.where(jnp.any(mine, axis=1), lengths[row], 0)
    return Takers(jnp.arange(cache.n_seq_max, dtype=jnp.int32), row, taken, starts[row])


def find_cells(
    cache: AttentionCache, who: Takers, members: Array | None, n_tokens: int
) -> tuple[Array, Array]:
    """Cells for each token: (int32 [W, T], fits: bool). The lowest free cells are taken first.

    A windowed child then takes back the oldest cells that nobody can see any more.
    """
    lengths, column = who.lengths, jnp.arange(n_tokens, dtype=jnp.int32)
    if cache.window is None:
        counted = jnp.cumsum(cache.positions < 0, axis=1, dtype=jnp.int32)  # [streams, S]
        if cache.unified:
            ranks = (jnp.cumsum(lengths) - lengths)[:, None] + column
            cells = jnp.searchsorted(counted[0], ranks + 1, side="left")
            fits = jnp.sum(lengths) <= counted[0, -1]
        else:
            mine = counted[who.seq_ids]
            cells = jax.vmap(lambda row: jnp.searchsorted(row, column + 1, side="left"))(mine)
            fits = jnp.all(lengths <= mine[:, -1])
    else:
        rank = _reuse_rank(cache, who, members)
        wanted = n_tokens * len(lengths) if cache.unified else n_tokens
        order = jnp.argmin(rank, axis=1)[:, None] if wanted == 1 else jnp.argsort(rank, axis=1)
        room = jnp.sum(rank < _NEVER, axis=1)
        if cache.unified:
            ranks = (jnp.cumsum(lengths) - lengths)[:, None] + column
            cells = order[0].at[ranks].get(mode="fill", fill_value=cache.n_cells)
            fits = jnp.sum(lengths) <= room[0]
        else:
            cells = order.at[:, column].get(mode="fill", fill_value=cache.n_cells)[who.seq_ids]
            fits = jnp.all(lengths <= room[who.seq_ids])
    return jnp.where(column < lengths[:, None], cells, cache.n_cells).astype(jnp.int32), fits


def _reuse_rank(cache: AttentionCache, who: Takers, members: Array | None) -> Array:
    """int32 [streams, S]: -1 for empty cells, the position of cells that are out of sight, or _NEVER."""
    assert cache.window is not None
    following = pos_max(cache) + 1  # the next query of each sequence
    if cache.unified:
        taking = jax.nn.one_hot(who.seq_ids, cache.n_seq_max, dtype=bool) if members is None else members
        taking = taking & (who.lengths > 0)[:, None]
        start = jnp.max(jnp.where(taking, who.starts[:, None], -1), axis=0)
        following = jnp.where(jnp.any(taking, axis=0), start, following)
        assert cache.owners is not None
        hidden = cache.positions[:, :, None] <= following - cache.window
        out = jnp.all(hidden | ~cache.owners, axis=-1)
    else:
        taken = jnp.where(who.lengths > 0, who.seq_ids, cache.n_seq_max)
        following = following.at[taken].set(who.starts, mode="drop")
        out = cache.positions <= following[:, None] - cache.window
    return jnp.where(cache.positions < 0, -1, jnp.where(out, cache.positions, _NEVER))


def occupy(
    cache: AttentionCache,
    seq_ids: Array,
    who: Takers,
    members: Array | None,
    cells: Array,
    positions: Array,
    tokens: Array,
    n_kv: int,
    aligned: bool,
) -> tuple[AttentionCache, CellPlan]:
    """Give the cells [W, T] to their takers at `positions` [B, T]; the plan for the layers."""
    streams = jnp.zeros_like(who.seq_ids) if cache.unified else who.seq_ids
    at = (streams[:, None], cells)
    cache = cache.replace(lost=_lost(cache, who, streams, cells))
    of_rows = (positions, tokens) if who.rows is None else (positions[who.rows], tokens[who.rows])
    cache = cache.replace(
        positions=cache.positions.at[at].set(of_rows[0], mode="drop"),
        tokens=cache.tokens.at[at].set(of_rows[1], mode="drop"),
    )
    if cache.owners is not None:
        owner = jax.nn.one_hot(seq_ids, cache.n_seq_max, dtype=bool) if members is None else members
        owner = jnp.broadcast_to(owner[:, None, :], (*cells.shape, cache.n_seq_max))
        owners = cache.owners.at[0, cells].set(owner, mode="drop")
        cache = cache.replace(owners=owners)
        mine = owners[0, :n_kv].T[seq_ids]  # [B, n_kv]
        stored = jnp.where(mine, cache.positions[0, :n_kv], -1)
    else:
        stored = cache.positions[:, :n_kv] if aligned else cache.positions[seq_ids, :n_kv]
    stored, query = stored[:, None], positions[:, :, None]
    mask = (stored >= 0) & (stored <= query)
    if cache.window is not None:
        mask = mask & (stored > query - cache.window)
    read = jnp.zeros_like(seq_ids) if cache.unified else seq_ids
    plan = CellPlan(
        streams=streams,
        cells=cells,
        rows=who.rows,
        read=read,
        mask=mask,
        aligned=aligned and not cache.unified,
    )
    return cache, plan


def _lost(cache: AttentionCache, who: Takers, streams: Array, cells: Array) -> Array | None:
    """`lost` once these cells are overwritten."""
    if cache.lost is None:
        return None
    over = cache.positions.at[streams[:, None], cells].get(mode="fill", fill_value=-1)  # [W, T]
    if cache.owners is not None:
        owners = cache.owners.at[0, cells].get(mode="fill", fill_value=False)  # [W, T, sequences]
        return jnp.maximum(cache.lost, jnp.max(jnp.where(owners, over[:, :, None], -1), axis=(0, 1)))
    return cache.lost.at[who.seq_ids].max(jnp.max(over, axis=1), mode="drop")


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
    if cache.lost is not None:
        cache = cache.replace(lost=jnp.full_like(cache.lost, -1))
    if data:
        cache = cache.replace(
            keys=tuple(map(jnp.zeros_like, cache.keys)),
            values=tuple(map(jnp.zeros_like, cache.values)),
            tokens=jnp.zeros_like(cache.tokens),
        )
    return cache


def seq_rm(cache: AttentionCache, seqs: Array, p0: Array, p1: Array) -> AttentionCache:
    """Drop the cells of the sequences in `seqs` (bool [sequences]) with position in [p0, p1).

    p0 and p1 are int32 [], or [sequences] for a range each.
    """
    p0, p1 = (jnp.broadcast_to(p, (cache.n_seq_max,)) for p in (p0, p1))
    if cache.owners is None:
        inside = (cache.positions >= p0[:, None]) & (cache.positions < p1[:, None])
        cache = cache.replace(positions=jnp.where(seqs[:, None] & inside, -1, cache.positions))
    else:
        where = cache.positions[:, :, None]
        owners = cache.owners & ~((where >= p0) & (where < p1) & seqs)
        cache = _with_owners(cache, owners)
    return _forget_lost(cache)


def _with_owners(cache: AttentionCache, owners: Array) -> AttentionCache:
    """A cell without an owner is empty."""
    return cache.replace(owners=owners, positions=jnp.where(jnp.any(owners, axis=-1), cache.positions, -1))


def _forget_lost(cache: AttentionCache) -> AttentionCache:
    """A sequence without cells has lost nothing."""
    if cache.lost is None:
        return cache
    return cache.replace(lost=jnp.where(jnp.any(held(cache), axis=1), cache.lost, -1))


def seq_cp(cache: AttentionCache, src: Array, dsts: Array, p0: Array, p1: Array) -> AttentionCache:
    """The sequences dsts (int32 [D]), emptied first, receive the cells of src in [p0, p1).

    Shared when unified, else copied. A dst out of range changes nothing.
    """
    inside = (cache.positions >= p0) & (cache.positions < p1)
    if cache.lost is not None:
        cache = cache.replace(lost=cache.lost.at[dsts].set(cache.lost[src], mode="drop"))
    if cache.owners is not None:
        column = cache.owners[:, :, src] & inside
        owners = cache.owners.at[:, :, dsts].set(column[:, :, None], mode="drop")
        return _forget_lost(_with_owners(cache, owners))
    kept = jnp.where(inside[src], cache.positions[src], -1)

    def copied(buffer: Array) -> Array:
        return buffer.at[dsts].set(buffer[src], mode="drop")

    return _forget_lost(
        cache.replace(
            positions=cache.positions.at[dsts].set(kept, mode="drop"),
            tokens=copied(cache.tokens),
            keys=tuple(map(copied, cache.keys)),
            values=tuple(map(copied, cache.values)),
        )
    )


def gather(cache: AttentionCache, parents: Array) -> AttentionCache:
    """Sequence s becomes what sequence parents[s] was."""
    if cache.lost is not None:
        cache = cache.replace(lost=cache.lost[parents])
    if cache.owners is not None:
        return _with_owners(cache, cache.owners[:, :, parents])
    return cache.replace(
        positions=cache.positions[parents],
        tokens=cache.tokens[parents],
        keys=tuple(k[parents] for k in cache.keys),
        values=tuple(v[parents] for v in cache.values),
    )


Move = Callable[[Array], Array]


def room_to_move(cache: AttentionCache, seq: Array, p0: Array, p1: Array) -> Array:
    """bool: whether the cells in range that others share could be copied for `seq` alone."""
    if cache.owners is None:
        return jnp.bool_(True)
    return jnp.sum(_shared(cache, seq, p0, p1)) <= n_free(cache)[0]


def _shared(cache: AttentionCache, seq: Array, p0: Array, p1: Array) -> Array:
    """bool [S]: cells of one sequence in [p0, p1) that have other owners; none when every one is meant."""
    assert cache.owners is not None
    where, owners = cache.positions[0], cache.owners[0]
    mine = owners[:, jnp.clip(seq, 0, cache.n_seq_max - 1)] & (seq >= 0)
    return mine & (where >= p0) & (where < p1) & (jnp.sum(owners, axis=1) > 1)


def move(cache: AttentionCache, seq: Array, p0: Array, p1: Array, to: Move) -> AttentionCache:
    """Positions of `seq` (-1: every sequence) in [p0, p1) become to(position); below 0 they are dropped.

    Keys are rotated by the same amount. Cells that other sequences share are copied first, which
    `room_to_move` must have allowed.
    """
    if cache.owners is not None:
        cache = _split(cache, seq, _shared(cache, seq, p0, p1))
        assert cache.owners is not None
        column = cache.owners[0, :, jnp.clip(seq, 0, cache.n_seq_max - 1)]
        mine = jnp.where(seq < 0, True, column)[None]
    else:
        mine = ((jnp.arange(cache.n_seq_max) == seq) | (seq < 0))[:, None]
    before = cache.positions
    moved = mine & (before >= jnp.maximum(p0, 0)) & (before < p1)
    after = jnp.where(moved, to(before), before)
    turn = jnp.where(moved & (after >= 0), after - before, 0)
    cache = cache.replace(positions=jnp.maximum(after, -1), keys=_turned(cache, seq, turn))
    if cache.owners is not None:
        cache = cache.replace(owners=cache.owners & (cache.positions >= 0)[:, :, None])
    if cache.lost is not None:
        touched = ((jnp.arange(cache.n_seq_max) == seq) | (seq < 0)) & (cache.lost >= p0) & (cache.lost < p1)
        # what was lost before p0 stays where it was
        later = jnp.maximum(to(cache.lost), p0 - 1)
        cache = cache.replace(lost=jnp.where(touched, later, cache.lost))
    return _forget_lost(cache)


def _split(cache: AttentionCache, seq: Array, shared: Array) -> AttentionCache:
    """Copies of the cells `shared` (bool [S]) that belong to `seq` alone, in free cells."""
    assert cache.owners is not None
    free = jnp.cumsum(cache.positions[0] < 0)
    fresh = jnp.searchsorted(free, jnp.cumsum(shared), side="left")
    target = jnp.where(shared, fresh, cache.n_cells)

    def split(cache: AttentionCache) -> AttentionCache:
        assert cache.owners is not None

        def copied(buffer: Array) -> Array:
            return buffer.at[0, :, target].set(buffer[0].swapaxes(0, 1), mode="drop")

        alone = jax.nn.one_hot(seq, cache.n_seq_max, dtype=bool)
        owners = cache.owners.at[0, :, seq].set(cache.owners[0, :, seq] & ~shared)
        return cache.replace(
            keys=tuple(map(copied, cache.keys)),
            values=tuple(map(copied, cache.values)),
            positions=cache.positions.at[0, target].set(cache.positions[0], mode="drop"),
            tokens=cache.tokens.at[0, target].set(cache.tokens[0], mode="drop"),
            owners=owners.at[0, target].set(alone, mode="drop"),
        )

    return lax.cond(jnp.any(shared), split, lambda cache: cache, cache)


def _turned(cache: AttentionCache, seq: Array, turn: Array) -> tuple[Array, ...]:
    """Keys rotated by `turn` (int32 [streams, S]) positions more; one stream is touched for one sequence."""

    def rotated(keys: Array, turn: Array, rope: RopeHparams) -> Array:
        turned = rotate(keys.swapaxes(1, 2), turn, rope).swapaxes(1, 2)
        return jnp.where((turn != 0)[:, None, :, None], turned, keys)

    def one(keys: Array, rope: RopeHparams) -> Array:
        stream = jnp.clip(seq, 0, cache.n_seq_max - 1)
        row = lax.dynamic_index_in_dim(keys, stream)
        row = rotated(row, lax.dynamic_index_in_dim(turn, stream), rope)
        return lax.dynamic_update_index_in_dim(keys, row, stream, 0)

    def of_layer(keys: Array, rope: RopeHparams | None) -> Array:
        if rope is None:
            return keys
        if cache.unified or cache.n_seq_max == 1:
            return rotated(keys, turn, rope)
        return lax.cond(seq < 0, lambda k: rotated(k, turn, rope), lambda k: one(k, rope), keys)

    return tuple(of_layer(k, r) for k, r in zip(cache.keys, cache.ropes, strict=True))
