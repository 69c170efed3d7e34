"""The cache: an attention child, a recurrent child or both, and the operations on them together.

Every operation is pure and jittable with traced integers. Ranges are half-open [p0, p1) with p0 < 0
for 0 and p1 < 0 for infinity; sequence -1 is every sequence. Where an operation can be refused it
returns (cache, ok); when ok is false the cache is the one that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxhybrid.cache import attention as cells
from jaxhybrid.cache import recurrent as slots

Int = int | Array
_FOREVER = jnp.iinfo(jnp.int32).max


class Cache(struct.PyTreeNode):
    """Everything a model remembers, as one immutable value.

    lossy: bool [sequences], whether attention and recurrent state of a sequence disagree about its
    past because a lossy operation was asked for.
    """

    attention: cells.AttentionCache | None
    recurrent: slots.RecurrentCache | None
    lossy: Array

    @property
    def n_seq_max(self) -> int:
        return self.lossy.shape[0]

    @property
    def n_cells(self) -> int | None:
        """Cells of one stream; None where no layer remembers K/V and length has no limit."""
        return None if self.attention is None else self.attention.n_cells

    @property
    def kind(self) -> str:
        """attention, recurrent or hybrid."""
        if self.recurrent is None:
            return "attention"
        return "recurrent" if self.attention is None else "hybrid"


class Plan(struct.PyTreeNode):
    """Cells and slots chosen for one ubatch. ok: bool; positions: int32 [B, T]."""

    ok: Array
    positions: Array
    cells: cells.CellPlan | None
    slots: slots.SlotPlan | None


# ---------------------------------------------------------------------------------------- queries


def positions_max(cache: Cache) -> Array:
    """int32 [sequences]: last position of each sequence in every child, -1 where it is empty."""
    ends = []
    if cache.attention is not None:
        ends.append(cells.pos_max(cache.attention))
    if cache.recurrent is not None:
        ends.append(slots.tail(cache.recurrent))
    return ends[0] if len(ends) == 1 else jnp.minimum(*ends)


def positions_min(cache: Cache) -> Array:
    """int32 [sequences]: first position every child still holds, -1 where a sequence is empty."""
    starts = []
    if cache.attention is not None:
        starts.append(cells.pos_min(cache.attention))
    if cache.recurrent is not None:
        starts.append(slots.tail(cache.recurrent))
    return starts[0] if len(starts) == 1 else jnp.maximum(*starts)


def seq_pos_max(cache: Cache, seq: Int) -> Array:
    """Last position of a sequence (the largest of all for -1); -1 when it is empty or unknown."""
    return _of_sequence(positions_max(cache), seq, jnp.max)


def seq_pos_min(cache: Cache, seq: Int) -> Array:
    """First position of a sequence that every child holds; -1 when it is empty or unknown."""
    found = positions_min(cache)

    def least(values: Array) -> Array:
        smallest = jnp.min(jnp.where(values < 0, _FOREVER, values))
        return jnp.where(smallest == _FOREVER, -1, smallest)

    return _of_sequence(found, seq, least)


def is_lossy(cache: Cache, seq: Int) -> Array:
    """Whether a lossy operation touched this sequence (any sequence for -1)."""
    return jnp.any(cache.lossy & _chosen(cache, seq))


def state_bytes(cache: Cache) -> dict[str, dict[int, int]]:
    """Bytes of each child and layer: {"attention": {layer: bytes}, "recurrent": {layer: bytes}}."""
    found: dict[str, dict[int, int]] = {}
    if cache.attention is not None:
        pairs = zip(cache.attention.keys, cache.attention.values, strict=True)
        found["attention"] = {
            layer: k.nbytes + v.nbytes for layer, (k, v) in zip(cache.attention.layers, pairs, strict=True)
        }
    if cache.recurrent is not None:
        found["recurrent"] = {
            layer: sum(a.nbytes for a in state.values())
            for layer, state in zip(cache.recurrent.layers, cache.recurrent.states, strict=True)
        }
    return found


# ------------------------------------------------------------------------------------------ a step


def plan(
    cache: Cache,
    seq_ids: Array,
    starts: Array,
    lengths: Array,
    n_tokens: int,
    n_kv: int | None,
    aligned: bool,
    allowed: Array,
) -> tuple[Cache, Plan]:
    """Choose cells and slots for rows of `lengths` [B] tokens that begin at `starts` [B].

    Nothing changes, and ok is false, unless `allowed` and every child has room.
    """
    ok = allowed
    positions = starts[:, None] + jnp.arange(n_tokens, dtype=jnp.int32)
    cell_plan = slot_plan = None
    if cache.attention is not None:
        found, fits = cells.find_cells(cache.attention, seq_ids, lengths, n_tokens)
        ok = ok & fits
        found = jnp.where(ok, found, cache.attention.n_cells)
        child, cell_plan = cells.occupy(
            cache.attention, seq_ids, found, positions, n_kv or cache.attention.n_cells, aligned
        )
        cache = cache.replace(attention=child)
    if cache.recurrent is not None:
        last = starts + lengths - 1
        recurrent, slot_plan = slots.occupy(
            cache.recurrent, seq_ids, lengths, last, ok, in_place=aligned and n_tokens == 1
        )
        cache = cache.replace(recurrent=recurrent)
    return cache, Plan(ok=ok, positions=positions, cells=cell_plan, slots=slot_plan)


class Memory(NamedTuple):
    """What one layer remembers, with the plan of a step; None for what it has not."""

    cells: cells.LayerCells | None
    slots: slots.LayerSlots | None


def memory_of(cache: Cache, layer: int, plan: Plan) -> Memory:
    """The memory of one layer, ready to be handed to its mixers."""
    attention, recurrent = cache.attention, cache.recurrent
    stored = state = None
    if attention is not None and plan.cells is not None and layer in attention.layers:
        stored = cells.layer_cells(attention, layer, plan.cells)
    if recurrent is not None and plan.slots is not None and layer in recurrent.layers:
        state = slots.layer_slots(recurrent, layer, plan.slots)
    return Memory(stored, state)


def with_memories(cache: Cache, memories: Sequence[Memory]) -> Cache:
    """The cache with the memories of all layers, in order, put back."""
    attention, recurrent = cache.attention, cache.recurrent
    if attention is not None:
        stored = {i: m.cells for i, m in enumerate(memories) if m.cells is not None}
        attention = cells.with_layers(attention, stored)
    if recurrent is not None:
        states = {i: m.slots for i, m in enumerate(memories) if m.slots is not None}
        recurrent = slots.with_layers(recurrent, states)
    return cache.replace(attention=attention, recurrent=recurrent)


# -------------------------------------------------------------------------------------- operations


def clear(cache: Cache, data: bool = False) -> Cache:
    """Empty every sequence. With `data` (static) the buffers become zero too."""
    attention, recurrent = cache.attention, cache.recurrent
    return cache.replace(
        attention=None if attention is None else cells.clear(attention, data),
        recurrent=None if recurrent is None else slots.clear(recurrent, data),
        lossy=jnp.zeros_like(cache.lossy),
    )


def seq_rm(cache: Cache, seq: Int, p0: Int, p1: Int, lossy: bool = False) -> tuple[Cache, Array]:
    """Remove the tokens of `seq` in [p0, p1).

    A recurrent state cannot be cut back: where there is one, the range must cover the whole sequence
    or lie beyond its end. With `lossy` a range before the tail is dropped from the attention child
    alone and the sequence is marked.
    """
    p0, p1 = _range(p0, p1)
    chosen = _chosen(cache, seq)
    ok = _known(cache, seq, everyone=True)
    marked, recurrent, attention = cache.lossy, cache.recurrent, cache.attention
    if recurrent is not None:
        end = slots.tail(recurrent)
        beyond = (p0 > end) | (p0 >= p1)  # so is every range of an empty sequence
        whole = ~beyond & (p0 == 0) & (p1 > end)
        middle = ~beyond & (p1 <= end)
        ok = ok & jnp.all(beyond | whole | (middle & lossy) | ~chosen)
        recurrent = slots.detach(recurrent, ok & chosen & whole)
        marked = jnp.where(ok & chosen, (marked | middle) & ~whole, marked)
    if attention is not None:
        attention = cells.seq_rm(attention, ok & chosen, p0, p1)
    return cache.replace(attention=attention, recurrent=recurrent, lossy=marked), ok


def seq_cp(cache: Cache, src: Int, dst: Int, p0: Int, p1: Int, lossy: bool = False) -> tuple[Cache, Array]:
    """dst becomes the tokens of src in [p0, p1); what dst held is dropped. src = dst changes nothing.

    A recurrent state is shared and copied on write. It is known only at the tail, so where there is
    one the range must cover the whole sequence; with `lossy` dst gets the whole state and is marked.
    """
    p0, p1 = _range(p0, p1)
    src, dst = jnp.asarray(src, jnp.int32), jnp.asarray(dst, jnp.int32)
    ok = _known(cache, src) & _known(cache, dst)
    source = jnp.clip(src, 0, cache.n_seq_max - 1)
    mark = cache.lossy[source]
    recurrent, attention = cache.recurrent, cache.attention
    if recurrent is not None:
        end = slots.tail(recurrent)[source]
        cut = (end >= 0) & (p1 <= end)
        if attention is not None:
            cut = cut | (end >= 0) & (p0 > cells.pos_min(attention)[source])
        ok = ok & (cut <= (lossy | (src == dst)))
        mark = mark | cut
    target = jnp.where(ok & (src != dst), dst, cache.n_seq_max)  # out of range: nothing is written
    if recurrent is not None:
        recurrent = slots.share(recurrent, source, target)
    if attention is not None:
        attention = cells.seq_cp(attention, source, target, p0, p1)
    marked = cache.lossy.at[target].set(mark, mode="drop")
    return cache.replace(attention=attention, recurrent=recurrent, lossy=marked), ok


def fork(cache: Cache, src: Int, dsts: Array | tuple[int, ...] | list[int]) -> Cache:
    """Every sequence in `dsts` becomes a copy of `src`. Ids outside the cache are ignored."""
    for dst in dsts:
        cache, _ = seq_cp(cache, src, dst, -1, -1)
    return cache


def seq_keep(cache: Cache, seq: Int) -> Cache:
    """Drop every other sequence from both children. An unknown id changes nothing."""
    others = ~_chosen(cache, seq) & _known(cache, seq, everyone=True)
    attention, recurrent = cache.attention, cache.recurrent
    everything = (jnp.int32(0), jnp.int32(_FOREVER))
    return cache.replace(
        attention=None if attention is None else cells.seq_rm(attention, others, *everything),
        recurrent=None if recurrent is None else slots.detach(recurrent, others),
        lossy=cache.lossy & ~others,
    )


# ----------------------------------------------------------------------------------------- helpers


def _range(p0: Int, p1: Int) -> tuple[Array, Array]:
    p0, p1 = jnp.asarray(p0, jnp.int32), jnp.asarray(p1, jnp.int32)
    return jnp.maximum(p0, 0), jnp.where(p1 < 0, _FOREVER, p1)


def _known(cache: Cache, seq: Int, everyone: bool = False) -> Array:
    least = -1 if everyone else 0
    seq = jnp.asarray(seq)
    return (seq >= least) & (seq < cache.n_seq_max)


def _chosen(cache: Cache, seq: Int) -> Array:
    """bool [sequences]: which sequences an id means."""
    seq = jnp.asarray(seq)
    return (jnp.arange(cache.n_seq_max) == seq) | (seq == -1)


def _of_sequence(values: Array, seq: Int, everyone: Callable[[Array], Array]) -> Array:
    seq = jnp.asarray(seq)
    inside = (seq >= 0) & (seq < values.shape[0])
    one = jnp.where(inside, values[jnp.clip(seq, 0, values.shape[0] - 1)], -1)
    return jnp.where(seq == -1, everyone(values), one)
