"""The recurrent child of a cache: slots of state, and one slot that is always zero.

A sequence without a state reads the zero slot, which is never written. Sequences may share a slot; a
row that writes gets a slot of its own first (copy on write), or writes in place when it is the only
owner.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxhybrid.mixers.memory import Advance

State = dict[str, Array]


class RecurrentCache(struct.PyTreeNode):
    """states: one dict a layer in `layers`, each array [slots + 1, ...]; the last row is the zero slot.

    slots, positions: int32 [sequences, remembered states], newest first: the slot that holds the
    sequence's state and the position of the last token that state has seen (-1, and the zero slot,
    where there is none). Column 0 is the tail.
    """

    states: tuple[State, ...]
    slots: Array
    positions: Array
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def zero_slot(self) -> int:
        return self.slots.size

    @property
    def n_seq_max(self) -> int:
        return self.slots.shape[0]


class SlotPlan(struct.PyTreeNode):
    """Slots one ubatch reads and writes, int32 [B]; a target out of range is not written.

    rows: int32 [slots + 1], the row that writes each slot, or out of range; None where states are
    gathered for the rows instead.
    """

    source: Array
    target: Array
    rows: Array | None


class LayerSlots(struct.PyTreeNode):
    """One layer's states with the plan of a step: the memory a recurrent mixer is handed."""

    state: State
    plan: SlotPlan

    def advance(self, name: str, f: Advance, rows: Any) -> tuple[Array, LayerSlots]:
        """The states of the rows go through `f` (see `StateMemory`) and into the rows' slots."""
        buffer, plan = self.state[name], self.plan
        if plan.rows is None:
            y, new = f(buffer[plan.source], rows)
            buffer = buffer.at[plan.target].set(new.astype(buffer.dtype), mode="drop")
        else:
            # all slots in place, in their own order: nothing as large as a state is moved
            buffer = _moved(buffer, plan)
            y, new = f(buffer, _by_slot(rows, plan.rows))
            buffer = new.astype(buffer.dtype)
            y = y[jnp.minimum(plan.target, buffer.shape[0] - 1)]
        return y, self.replace(state=self.state | {name: buffer})


def _moved(buffer: Array, plan: SlotPlan) -> Array:
    """The states of rows that change their slot, brought there."""
    moves = (plan.target < buffer.shape[0]) & (plan.source != plan.target)

    def move(buffer: Array) -> Array:
        return buffer.at[plan.target].set(buffer[plan.source], mode="drop")

    return lax.cond(jnp.any(moves), move, lambda buffer: buffer, buffer)


def _by_slot(rows: Any, order: Array) -> Any:
    """Rows [B, ...] in the order of the slots (`SlotPlan.rows`), zero where no row writes.

    The branch that nobody needs is there for its results: XLA's CPU compiler would otherwise compute the
    rows again for every element of the states they meet.
    """
    n_slots, n_rows = len(order), len(jax.tree.leaves(rows)[0])

    def ordered(rows: Any) -> Any:
        return jax.tree.map(lambda t: t.at[order].get(mode="fill", fill_value=0), rows)

    def nothing(rows: Any) -> Any:
        return jax.tree.map(lambda t: jnp.zeros((n_slots, *t.shape[1:]), t.dtype), rows)

    return lax.cond(jnp.any(order < n_rows), ordered, nothing, rows)


def create(
    layers: tuple[int, ...],
    state_shapes: tuple[dict[str, tuple[int, ...]], ...],
    n_seq_max: int,
    dtypes: dict[str, jnp.dtype],
    state_dtype: jnp.dtype,
) -> RecurrentCache:
    """`dtypes` overrides `state_dtype` for the named arrays (the convolution's history)."""
    return RecurrentCache(
        states=tuple(
            {
                name: jnp.zeros((n_seq_max + 1, *shape), dtypes.get(name, state_dtype))
                for name, shape in shapes.items()
            }
            for shapes in state_shapes
        ),
        slots=jnp.full((n_seq_max, 1), n_seq_max, jnp.int32),
        positions=jnp.full((n_seq_max, 1), -1, jnp.int32),
        layers=layers,
    )


# ------------------------------------------------------------------------------------------ a step


def occupy(
    cache: RecurrentCache, seq_ids: Array, lengths: Array, last: Array, ok: Array, in_place: bool
) -> tuple[RecurrentCache, SlotPlan]:
    """Choose slots for rows of sequences `seq_ids` [B] whose last token will be at `last` [B].

    in_place (static): work on all slots where they lie, which pays when most have a row.
    Rows of length 0, and every row when `ok` is false, write nothing and change nothing. There is
    always room: a sequence needs at most one slot, and there is one for each.
    """
    zero = cache.zero_slot
    active = lengths > 0
    source = jnp.where(active, cache.slots[seq_ids, 0], zero)
    users = jnp.zeros(zero + 1, jnp.int32).at[cache.slots.reshape(-1)].add(1)
    same = active[:, None] & active & (source[:, None] == source)
    earlier = jnp.sum(jnp.tril(same, -1), axis=1)  # rows before this one that read the same slot
    # in place for the only owner, or for the last owner once all the others have moved away
    stays = active & (source != zero) & (earlier == users[source] - 1)
    moves = active & ~stays
    free = jnp.cumsum(users[:zero] == 0)
    fresh = jnp.searchsorted(free, jnp.cumsum(moves), side="left")
    target = jnp.where(ok & active, jnp.where(stays, source, fresh), zero + 1).astype(jnp.int32)
    seqs = jnp.where(ok & active, seq_ids, cache.n_seq_max)
    cache = cache.replace(
        slots=cache.slots.at[seqs, 0].set(target, mode="drop"),
        positions=cache.positions.at[seqs, 0].set(last, mode="drop"),
    )
    rows = None
    if in_place:
        n_rows = len(seq_ids)
        rows = jnp.full(zero + 1, n_rows).at[target].set(jnp.arange(n_rows), mode="drop")
    return cache, SlotPlan(source=source, target=target, rows=rows)


def layer_slots(cache: RecurrentCache, layer: int, plan: SlotPlan) -> LayerSlots:
    return LayerSlots(state=cache.states[cache.layers.index(layer)], plan=plan)


def with_layers(cache: RecurrentCache, stored: dict[int, LayerSlots]) -> RecurrentCache:
    return cache.replace(states=tuple(stored[i].state for i in cache.layers))


# -------------------------------------------------------------------------------------- operations


def tail(cache: RecurrentCache) -> Array:
    """int32 [sequences]: position of the last token each sequence's state has seen, or -1."""
    return cache.positions[:, 0]


def clear(cache: RecurrentCache, data: bool) -> RecurrentCache:
    cache = cache.replace(
        slots=jnp.full_like(cache.slots, cache.zero_slot),
        positions=jnp.full_like(cache.positions, -1),
    )
    if data:
        cache = cache.replace(
            states=tuple({n: jnp.zeros_like(a) for n, a in s.items()} for s in cache.states)
        )
    return cache


def detach(cache: RecurrentCache, seqs: Array) -> RecurrentCache:
    """The sequences in `seqs` (bool [sequences]) forget everything; their slots become free."""
    return cache.replace(
        slots=jnp.where(seqs[:, None], cache.zero_slot, cache.slots),
        positions=jnp.where(seqs[:, None], -1, cache.positions),
    )


def share(cache: RecurrentCache, src: Array, dst: Array) -> RecurrentCache:
    """dst shares the slots of src until one of them writes. A dst out of range changes nothing."""
    return cache.replace(
        slots=cache.slots.at[dst].set(cache.slots[src], mode="drop"),
        positions=cache.positions.at[dst].set(cache.positions[src], mode="drop"),
    )
