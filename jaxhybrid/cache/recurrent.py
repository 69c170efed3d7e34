"""The recurrent child of a cache: slots of state, and one slot that is always zero.

A sequence without a state reads the zero slot, which is never written. Sequences may share a slot; a
row that writes gets a slot of its own first (copy on write), or writes in place when it is the only
owner. With a rollback window a sequence holds several slots, one for each of its last states.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxhybrid.cache import digest
from jaxhybrid.cache.turns import in_turn
from jaxhybrid.mixers.memory import Advance

State = dict[str, Array]


class RecurrentCache(struct.PyTreeNode):
    """states: one dict a layer in `layers`, each array [slots + 1, ...]; the last row is the zero slot.

    slots, positions: int32 [sequences, remembered states], newest first: the slot that holds the
    sequence's state and the position of the last token that state has seen (-1, and the zero slot,
    where there is none). Column 0 is the tail. digests: uint32 [sequences, remembered states, 2], of the
    tokens that each state has seen.
    """

    states: tuple[State, ...]
    slots: Array
    positions: Array
    digests: Array
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def zero_slot(self) -> int:
        return self.slots.size

    @property
    def n_seq_max(self) -> int:
        return self.slots.shape[0]

    @property
    def n_remembered(self) -> int:
        """States of one sequence: the tail, and those it can be rolled back to."""
        return self.slots.shape[1]


class SlotPlan(struct.PyTreeNode):
    """Slots one ubatch reads, int32 [B], and writes; a target out of range is not written.

    targets: int32 [B, n], for the states after the last token of each row, after the one before it, and
    so on. rows: int32 [slots + 1], the row that writes each slot, or out of range; None where states are
    gathered for the rows instead.
    """

    source: Array
    targets: Array
    rows: Array | None


class LayerSlots(struct.PyTreeNode):
    """One layer's states with the plan of a step: the memory a recurrent mixer is handed."""

    state: State
    plan: SlotPlan

    @property
    def n_states(self) -> int:
        return self.plan.targets.shape[1]

    def advance(self, name: str, f: Advance, rows: Any) -> tuple[Array, LayerSlots]:
        """The states of the rows go through `f` (see `StateMemory`) and into the rows' slots."""
        buffer, plan = self.state[name], self.plan
        if plan.rows is None:
            y, new = f(buffer[plan.source], rows)
            target = plan.targets[:, 0] if self.n_states == 1 else plan.targets
            buffer = buffer.at[target].set(new.astype(buffer.dtype), mode="drop")
        else:
            # all slots in place, in their own order: nothing as large as a state is moved
            y, new = f(buffer, _by_slot(rows, plan.rows))
            buffer = new.astype(buffer.dtype)
            y = y[jnp.minimum(plan.targets[:, 0], buffer.shape[0] - 1)]
        return y, self.replace(state=self.state | {name: buffer})


def _moved(states: tuple[State, ...], source: Array, target: Array, moves: Array) -> tuple[State, ...]:
    """The states of the rows in `moves` (bool [B]) brought from slots source to slots target, int32 [B].

    One row after the other, and only those that move, so that the states stay where they are otherwise. No
    row's new slot is another's old one.
    """

    def move(row: Array, states: tuple[State, ...]) -> tuple[State, ...]:
        def moved(buffer: Array) -> Array:
            state = lax.dynamic_index_in_dim(buffer, source[row], keepdims=True)
            return lax.dynamic_update_slice_in_dim(buffer, state, target[row], axis=0)

        return jax.tree.map(moved, states)

    return in_turn(moves, move, states)


def _by_slot(rows: Any, order: Array) -> Any:
    """Rows [B, ...] in the order of the slots (`SlotPlan.rows`), zero where no row writes."""
    n_slots, n_rows = len(order), len(jax.tree.leaves(rows)[0])

    def ordered(rows: Any) -> Any:
        return jax.tree.map(lambda t: t.at[order].get(mode="fill", fill_value=0), rows)

    def kept_apart(rows: Any) -> Any:
        # XLA's CPU compiler would otherwise compute the rows again for every element of the states they meet
        def nothing(rows: Any) -> Any:
            return jax.tree.map(lambda t: jnp.zeros((n_slots, *t.shape[1:]), t.dtype), rows)

        return lax.cond(jnp.any(order < n_rows), ordered, nothing, rows)

    return lax.platform_dependent(rows, cpu=kept_apart, default=ordered)


def create(
    layers: tuple[int, ...],
    state_shapes: tuple[dict[str, tuple[int, ...]], ...],
    n_seq_max: int,
    n_remembered: int,
    dtypes: dict[str, jnp.dtype],
    state_dtype: jnp.dtype,
) -> RecurrentCache:
    """`dtypes` overrides `state_dtype` for the named arrays (the convolution's history)."""
    n_slots = n_seq_max * n_remembered
    return RecurrentCache(
        states=tuple(
            {
                name: jnp.zeros((n_slots + 1, *shape), dtypes.get(name, state_dtype))
                for name, shape in shapes.items()
            }
            for shapes in state_shapes
        ),
        slots=jnp.full((n_seq_max, n_remembered), n_slots, jnp.int32),
        positions=jnp.full((n_seq_max, n_remembered), -1, jnp.int32),
        digests=jnp.zeros((n_seq_max, n_remembered, digest.LANES), jnp.uint32),
        layers=layers,
    )


# ---------------------------------------------------------------------------------------- queries


def tail(cache: RecurrentCache) -> Array:
    """int32 [sequences]: position of the last token each sequence's state has seen, or -1."""
    return cache.positions[:, 0]


# ------------------------------------------------------------------------------------------ a step


def occupy(
    cache: RecurrentCache,
    seq_ids: Array,
    members: Array | None,
    tokens: Array,
    starts: Array,
    lengths: Array,
    ok: Array,
    in_place: bool,
) -> tuple[RecurrentCache, SlotPlan]:
    """Choose slots for rows of sequences `seq_ids` [B]: `lengths` [B] of `tokens` [B, T] from `starts` [B].

    members: bool [B, sequences], all the sequences that go along with a row, or None. in_place (static):
    work on all slots where they lie, which pays when most have a row. Rows of length 0, and every row when
    `ok` is false, write nothing and change nothing. There is always room: a row needs no more slots than
    its sequence may hold.
    """
    zero, kept = cache.zero_slot, cache.n_remembered
    n_new = min(tokens.shape[1], kept)
    active = (lengths > 0) & ok
    source = jnp.where(active, cache.slots[seq_ids, 0], zero)
    # column c of a row is its c-th newest state: new ones first, then older ones that stay
    column = jnp.arange(kept)
    is_new = column < lengths[:, None]  # [B, kept]
    older = jnp.maximum(column - lengths[:, None], 0)
    old_positions = jnp.take_along_axis(cache.positions[seq_ids], older, axis=1)
    stays = ~is_new & (old_positions >= 0) & (old_positions < starts[:, None])
    old_slots = jnp.where(stays, jnp.take_along_axis(cache.slots[seq_ids], older, axis=1), zero)

    mine = jax.nn.one_hot(seq_ids, cache.n_seq_max, dtype=bool) if members is None else members
    rewritten = jnp.any(mine & active[:, None], axis=0)
    users = jnp.zeros(zero + 1, jnp.int32)
    users = users.at[jnp.where(rewritten[:, None], zero, cache.slots).reshape(-1)].add(1)
    users = users.at[jnp.where(active[:, None], old_slots, zero).reshape(-1)].add(1)
    users = users.at[zero].set(0)
    claims = is_new & active[:, None] & (column < n_new)
    if kept == 1:
        # in place where nobody else keeps the state and no earlier row has claimed its slot
        same = active[:, None] & active & (source[:, None] == source)
        first = ~jnp.any(jnp.tril(same, -1), axis=1)
        in_own = active & (source != zero) & (users[source] == 0) & first
        users = users.at[jnp.where(in_own, source, zero)].add(1)
        fresh = claims & ~in_own[:, None]
    else:
        in_own, fresh = None, claims
    free = jnp.cumsum(users[:zero] == 0)
    found = jnp.searchsorted(free, jnp.cumsum(fresh.reshape(-1)), side="left").reshape(fresh.shape)
    if in_own is not None:
        found = jnp.where(in_own[:, None], source[:, None], found)
    targets = jnp.where(claims, found, zero + 1).astype(jnp.int32)

    seen = digest.of_prefixes(cache.digests[seq_ids, 0], tokens)  # [B, T + 1, 2]
    at = jnp.maximum(lengths[:, None] - column, 0)
    new_digests = jnp.take_along_axis(seen, at[:, :, None], axis=1)
    old_digests = jnp.take_along_axis(cache.digests[seq_ids], older[:, :, None], axis=1)
    table = (
        jnp.where(claims, targets, old_slots),
        jnp.where(
            is_new, starts[:, None] + lengths[:, None] - 1 - column, jnp.where(stays, old_positions, -1)
        ),
        jnp.where(is_new[..., None], new_digests, jnp.where(stays[..., None], old_digests, 0)),
    )
    if members is None:
        seqs, rows_of = jnp.where(active, seq_ids, cache.n_seq_max), None
    else:
        rows_of = jnp.argmax(mine & active[:, None], axis=0)
        seqs = jnp.where(rewritten, jnp.arange(cache.n_seq_max), cache.n_seq_max)
    slots, positions, digests = (t if rows_of is None else t[rows_of] for t in table)
    cache = cache.replace(
        slots=cache.slots.at[seqs].set(slots, mode="drop"),
        positions=cache.positions.at[seqs].set(positions, mode="drop"),
        digests=cache.digests.at[seqs].set(digests, mode="drop"),
    )
    rows = None
    if in_place and kept == 1:
        n_rows = len(seq_ids)
        target = targets[:, 0]
        moves = (target <= zero) & (source != target)
        cache = cache.replace(states=_moved(cache.states, source, target, moves))
        rows = jnp.full(zero + 1, n_rows).at[target].set(jnp.arange(n_rows), mode="drop")
    return cache, SlotPlan(source=source, targets=targets[:, :n_new], rows=rows)


def layer_slots(cache: RecurrentCache, layer: int, plan: SlotPlan) -> LayerSlots:
    return LayerSlots(state=cache.states[cache.layers.index(layer)], plan=plan)


def with_layers(cache: RecurrentCache, stored: dict[int, LayerSlots]) -> RecurrentCache:
    return cache.replace(states=tuple(stored[i].state for i in cache.layers))
