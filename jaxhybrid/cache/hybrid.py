"""The cache: attention children, a recurrent child or both, and what a step and a query need of them.

The operations are in `cache/operations.py`, going back in `cache/snapshots.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxhybrid.cache import attention as cells
from jaxhybrid.cache import recurrent as slots
from jaxhybrid.cache.operation import operation

Int = int | Array
FOREVER = jnp.iinfo(jnp.int32).max


class Cache(struct.PyTreeNode):
    """Everything a model remembers, as one immutable value.

    attention: layers that see all that came before. windowed: layers that see the last tokens only.
    recurrent: layers that keep a state. lossy: bool [sequences], whether attention and state of a sequence
    disagree about its past because a lossy operation was asked for.
    """

    attention: cells.AttentionCache | None
    windowed: cells.AttentionCache | None
    recurrent: slots.RecurrentCache | None
    lossy: Array

    @property
    def n_seq_max(self) -> int:
        return self.lossy.shape[0]

    @property
    def n_cells(self) -> int | None:
        """Cells of one stream; None where no layer remembers everything and length has no limit."""
        return None if self.attention is None else self.attention.n_cells

    @property
    def n_rollback(self) -> int | None:
        """How many tokens every sequence can be rolled back; None where no state stands in the way."""
        return None if self.recurrent is None else self.recurrent.n_remembered - 1

    @property
    def cell_children(self) -> tuple[cells.AttentionCache, ...]:
        """The children that hold K/V."""
        return tuple(child for child in (self.attention, self.windowed) if child is not None)

    @property
    def kind(self) -> str:
        """attention, sliding_window, recurrent, hybrid or hybrid_sliding_window."""
        if not self.cell_children:
            return "recurrent"
        if self.recurrent is None:
            return "attention" if self.windowed is None else "sliding_window"
        return "hybrid" if self.windowed is None else "hybrid_sliding_window"

    def with_cells(self, f: Callable[[cells.AttentionCache], cells.AttentionCache]) -> Cache:
        """The cache with `f` applied to every child that holds K/V."""
        return self.replace(
            attention=None if self.attention is None else f(self.attention),
            windowed=None if self.windowed is None else f(self.windowed),
        )


class Plan(struct.PyTreeNode):
    """Cells and slots chosen for one ubatch. ok: bool; positions: int32 [B, T]."""

    ok: Array
    positions: Array
    cells: cells.CellPlan | None
    windowed: cells.CellPlan | None
    slots: slots.SlotPlan | None


# ---------------------------------------------------------------------------------------- queries


def positions_max(cache: Cache) -> Array:
    """int32 [sequences]: last position of each sequence in every child, -1 where it is empty."""
    ends = [cells.pos_max(child) for child in cache.cell_children]
    if cache.recurrent is not None:
        ends.append(slots.tail(cache.recurrent))
    return jnp.min(jnp.stack(ends), axis=0)


def positions_min(cache: Cache) -> Array:
    """int32 [sequences]: first position every child still holds, -1 where a sequence is empty."""
    starts = [cells.pos_min(child) for child in cache.cell_children]
    if cache.recurrent is not None:
        starts.append(slots.tail(cache.recurrent))
    return jnp.max(jnp.stack(starts), axis=0)


@operation
def seq_pos_max(cache: Cache, seq: Int) -> Array:
    """Last position of a sequence (the largest of all for -1); -1 when it is empty or unknown."""
    return _of_sequence(positions_max(cache), seq, jnp.max)


@operation
def seq_pos_min(cache: Cache, seq: Int) -> Array:
    """First position of a sequence that every child holds; -1 when it is empty or unknown."""
    found = positions_min(cache)

    def least(values: Array) -> Array:
        smallest = jnp.min(jnp.where(values < 0, FOREVER, values))
        return jnp.where(smallest == FOREVER, -1, smallest)

    return _of_sequence(found, seq, least)


@operation
def is_lossy(cache: Cache, seq: Int) -> Array:
    """Whether a lossy operation touched this sequence (any sequence for -1)."""
    return jnp.any(cache.lossy & chosen(cache, seq))


def can_shift(cache: Cache) -> bool:
    """Whether positions can be moved: always, since text has one-dimensional positions."""
    del cache
    return True


def histories(cache: Cache) -> Array:
    """uint32 [sequences, n]: equal rows mean sequences with the same tokens at the same positions."""
    end = positions_max(cache)
    parts = [cells.history(child, end) for child in cache.cell_children]
    if cache.recurrent is not None:
        parts.append(cache.recurrent.digests[:, 0])
    bounds = jnp.stack([positions_min(cache), end], axis=1).astype(jnp.uint32)
    return jnp.concatenate([*parts, bounds], axis=1)


def state_bytes(cache: Cache) -> dict[str, dict[int, int]]:
    """Bytes of each child and layer: {"attention": {layer: bytes}, "recurrent": {layer: bytes}}.

    Sliding-window layers count as attention.
    """
    found: dict[str, dict[int, int]] = {}
    for child in cache.cell_children:
        pairs = zip(child.layers, child.keys, child.values, strict=True)
        found.setdefault("attention", {}).update({layer: k.nbytes + v.nbytes for layer, k, v in pairs})
    if cache.recurrent is not None:
        found["recurrent"] = {
            layer: sum(a.nbytes for a in state.values())
            for layer, state in zip(cache.recurrent.layers, cache.recurrent.states, strict=True)
        }
    return found


def chosen(cache: Cache, seq: Int) -> Array:
    """bool [sequences]: which sequences an id means."""
    seq = jnp.asarray(seq)
    return (jnp.arange(cache.n_seq_max) == seq) | (seq == -1)


def known(cache: Cache, seq: Int, everyone: bool = False) -> Array:
    """bool: whether an id names a sequence, or with `everyone` is -1."""
    least = -1 if everyone else 0
    seq = jnp.asarray(seq)
    return (seq >= least) & (seq < cache.n_seq_max)


def _of_sequence(values: Array, seq: Int, everyone: Callable[[Array], Array]) -> Array:
    seq = jnp.asarray(seq)
    inside = (seq >= 0) & (seq < values.shape[0])
    one = jnp.where(inside, values[jnp.clip(seq, 0, values.shape[0] - 1)], -1)
    return jnp.where(seq == -1, everyone(values), one)


# ------------------------------------------------------------------------------------------ a step


def plan(
    cache: Cache,
    seq_ids: Array,
    members: Array | None,
    tokens: Array,
    starts: Array,
    lengths: Array,
    n_kv: int | None,
    aligned: bool,
    allowed: Array,
) -> tuple[Cache, Plan]:
    """Choose cells and slots for rows of `lengths` [B] of `tokens` [B, T] that begin at `starts` [B].

    members: bool [B, sequences], all sequences that take a row's tokens, or None for one a row. Nothing
    changes, and ok is false, unless `allowed` and every child has room.
    """
    ok, n_tokens = allowed, tokens.shape[1]
    positions = starts[:, None] + jnp.arange(n_tokens, dtype=jnp.int32)
    found = []
    for child in cache.cell_children:
        who = cells.takers(child, seq_ids, lengths, starts, members)
        places, fits = cells.find_cells(child, who, members, n_tokens)
        ok = ok & fits
        found.append((child, who, places))
    plans: list[cells.CellPlan] = []
    children: list[cells.AttentionCache] = []
    for child, who, places in found:
        places = jnp.where(ok, places, child.n_cells)
        read = child.n_cells if child.window is not None or n_kv is None else n_kv
        taken, cell_plan = cells.occupy(
            child, seq_ids, who, members, places, positions, tokens, read, aligned
        )
        plans.append(cell_plan)
        children.append(taken)
    attention_plan = plans.pop(0) if cache.attention is not None else None
    windowed_plan = plans.pop() if plans else None
    cache = cache.replace(
        attention=children.pop(0) if cache.attention is not None else None,
        windowed=children.pop() if children else None,
    )
    slot_plan = None
    if cache.recurrent is not None:
        in_place = aligned and n_tokens == 1
        child, slot_plan = slots.occupy(
            cache.recurrent, seq_ids, members, tokens, starts, lengths, ok, in_place
        )
        cache = cache.replace(recurrent=child)
    return cache, Plan(
        ok=ok, positions=positions, cells=attention_plan, windowed=windowed_plan, slots=slot_plan
    )


class Memory(NamedTuple):
    """What one layer remembers, with the plan of a step; None for what it has not."""

    cells: cells.LayerCells | None
    slots: slots.LayerSlots | None


def memory_of(cache: Cache, layer: int, plan: Plan) -> Memory:
    """The memory of one layer, ready to be handed to its mixers."""
    stored = state = None
    for child, cell_plan in ((cache.attention, plan.cells), (cache.windowed, plan.windowed)):
        if child is not None and cell_plan is not None and layer in child.layers:
            stored = cells.layer_cells(child, layer, cell_plan)
    recurrent = cache.recurrent
    if recurrent is not None and plan.slots is not None and layer in recurrent.layers:
        state = slots.layer_slots(recurrent, layer, plan.slots)
    return Memory(stored, state)


def with_memories(cache: Cache, memories: Sequence[Memory]) -> Cache:
    """The cache with the memories of all layers, in order, put back."""
    stored = {i: m.cells for i, m in enumerate(memories) if m.cells is not None}
    cache = cache.with_cells(lambda child: cells.with_layers(child, stored))
    if cache.recurrent is not None:
        states = {i: m.slots for i, m in enumerate(memories) if m.slots is not None}
        cache = cache.replace(recurrent=slots.with_layers(cache.recurrent, states))
    return cache
