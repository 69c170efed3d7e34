"""The attention child of a cache: cells of K/V, their positions and owners.

A unified child has one stream of cells shared by all sequences, with a set of owners a cell. Otherwise
each sequence has its own stream, and a cell in stream s that has a position belongs to sequence s.
A windowed child holds the layers that see only the last `window` tokens; it has few cells, and takes
those back that no later query of an owner can see.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxhybrid.cache import digest
from jaxhybrid.cache.turns import in_turn
from jaxhybrid.hparams import RopeHparams
from jaxhybrid.kernels.sight import Sight

_NEVER = jnp.iinfo(jnp.int32).max


class AttentionCache(struct.PyTreeNode):
    """keys, values: one [streams, KV heads, S, head size] a layer in `layers`; the two may differ in size.

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
    row sees. sight: which of the first n_kv cells. `aligned`: row r is stream r; nothing needs gathering.
    """

    streams: Array
    cells: Array
    rows: Array | None
    read: Array
    sight: Sight
    aligned: bool = struct.field(pytree_node=False)


class LayerCells(struct.PyTreeNode):
    """One layer's K/V with the plan of a step: the memory an attention mixer is handed."""

    keys: Array
    values: Array
    plan: CellPlan

    def extend(self, keys: Array, values: Array) -> tuple[Array, Array, Sight, LayerCells]:
        """Write K/V [B, T, KV heads, head size] of new tokens; what queries see, and the memory."""
        stored = self.replace(keys=self._write(self.keys, keys), values=self._write(self.values, values))
        return stored._visible(stored.keys), stored._visible(stored.values), self.plan.sight, stored

    def _write(self, buffer: Array, new: Array) -> Array:
        # A neighbour's weight of 0 times NaN is NaN, so a sequence that went wrong stores zeros; its
        # own status tells.
        new = jnp.where(jnp.isfinite(new), new, 0).astype(buffer.dtype)
        if self.plan.rows is not None:
            new = new[self.plan.rows]
        if new.shape[1] == 1:
            return _write_one_each(buffer, new[:, 0], self.plan.streams, self.plan.cells[:, 0])
        return _scatter(buffer, new, self.plan.streams[:, None], self.plan.cells)

    def _visible(self, buffer: Array) -> Array:
        if self.plan.aligned or buffer.shape[0] == 1:
            return buffer
        return buffer[self.plan.read, :, : self.plan.sight.n_cells]


@jax.custom_jvp
def _write_one_each(buffer: Array, new: Array, streams: Array, cells: Array) -> Array:
    """new [W, KV heads, head size] into cells [W] of streams [W]; cells out of range are left out."""
    return lax.platform_dependent(
        buffer,
        new,
        streams,
        cells,
        cpu=_by_row_if_lone,
        tpu=_write_as_it_lies,
        cuda=_scatter_as_it_lies,
        default=_scatter,
    )


@_write_one_each.defjvp
def _write_one_each_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    _, _, streams, cells = primals
    return _write_one_each(*primals), _scatter(tangents[0], tangents[1], streams, cells)


def _scatter(buffer: Array, new: Array, streams: Array, cells: Array) -> Array:
    """new [..., KV heads, head size] into cells [...] of streams [...]; cells out of range are left out."""
    return buffer.at[streams, :, cells].set(new, mode="drop")


def _scatter_as_it_lies(buffer: Array, new: Array, streams: Array, cells: Array) -> Array:
    """XLA's GPU compiler turns the buffer of a lone row to the layout that the product with it would like."""
    written = _scatter(buffer, new, streams, cells)
    return with_layout_constraint(written, Layout(major_to_minor=(0, 1, 2, 3)))


def _by_row_if_lone(buffer: Array, new: Array, streams: Array, cells: Array) -> Array:
    """XLA's CPU compiler writes one row twice, into copies, when a product reads the buffer in another shape;
    the result of a loop it leaves alone."""
    return (_write_in_turn if len(new) == 1 else _scatter)(buffer, new, streams, cells)


def _write_as_it_lies(buffer: Array, new: Array, streams: Array, cells: Array) -> Array:
    """XLA's TPU compiler turns the whole buffer to another layout and back for a scatter.

    It does so for updates in a loop too, unless the layout that the buffer comes with is asked for: the
    head size is minor only where it fills the 128 lanes.
    """
    layout = Layout(major_to_minor=(0, 1, 3, 2) if buffer.shape[3] % 128 else (0, 1, 2, 3))
    return _write_in_turn(buffer, new, streams, cells, layout)


def _write_in_turn(
    buffer: Array, new: Array, streams: Array, cells: Array, layout: Layout | None = None
) -> Array:
    """Row after row, those that are written at all."""

    def write(row: Array, buffer: Array) -> Array:
        at = (streams[row], 0, cells[row], 0)
        buffer = lax.dynamic_update_slice(buffer, new[row][None, :, None], at)
        return buffer if layout is None else with_layout_constraint(buffer, layout)

    return in_turn(cells < buffer.shape[2], write, buffer)


def create(
    layers: tuple[int, ...],
    cell_shapes: tuple[tuple[tuple[int, int], tuple[int, int]], ...],
    ropes: tuple[RopeHparams | None, ...],
    window: int | None,
    n_cells: int,
    n_seq_max: int,
    unified: bool,
    k_dtype: jnp.dtype,
    v_dtype: jnp.dtype,
) -> AttentionCache:
    streams = 1 if unified else n_seq_max

    def buffers(dtype: jnp.dtype, of: int) -> tuple[Array, ...]:
        shapes = [shape[of] for shape in cell_shapes]
        return tuple(jnp.zeros((streams, heads, n_cells, size), dtype) for heads, size in shapes)

    return AttentionCache(
        keys=buffers(k_dtype, 0),
        values=buffers(v_dtype, 1),
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
    read = jnp.zeros_like(seq_ids) if cache.unified else seq_ids
    plan = CellPlan(
        streams=streams,
        cells=cells,
        rows=who.rows,
        read=read,
        sight=Sight(stored, positions[:, 0], positions.shape[1], cache.window),
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
