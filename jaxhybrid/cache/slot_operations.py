"""Operations on the slots of the recurrent child: forgetting, sharing, moving, taking up a state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.cache.recurrent import RecurrentCache, State


def clear(cache: RecurrentCache, data: bool) -> RecurrentCache:
    cache = detach(cache, jnp.ones(cache.n_seq_max, bool))
    if data:
        cache = cache.replace(states=jax.tree.map(jnp.zeros_like, cache.states))
    return cache


def detach(cache: RecurrentCache, seqs: Array) -> RecurrentCache:
    """The sequences in `seqs` (bool [sequences]) forget everything; their slots become free."""
    return roll_back(cache, seqs, jnp.full(cache.n_seq_max, cache.n_remembered))


def roll_back(cache: RecurrentCache, seqs: Array, columns: Array) -> RecurrentCache:
    """Each sequence in `seqs` (bool [sequences]) forgets its newest columns[s] states (int32 [sequences])."""
    shift = jnp.where(seqs, columns, 0)
    return _with_columns(cache, jnp.arange(cache.n_remembered) + shift[:, None])


def _with_columns(cache: RecurrentCache, index: Array) -> RecurrentCache:
    """Column c of each sequence becomes what column index[s, c] was; out of range, there is none."""
    exists = index < cache.n_remembered
    index = jnp.minimum(index, cache.n_remembered - 1)

    def taken(table: Array, nothing: int) -> Array:
        return jnp.where(exists, jnp.take_along_axis(table, index, axis=1), nothing)

    digests = jnp.take_along_axis(cache.digests, index[..., None], axis=1)
    return cache.replace(
        slots=taken(cache.slots, cache.zero_slot),
        positions=taken(cache.positions, -1),
        digests=jnp.where(exists[..., None], digests, 0),
    )


def column_at(cache: RecurrentCache, position: Array) -> Array:
    """int32 [sequences]: the column whose state has just seen `position` (int32 [] or [sequences]).

    `n_remembered` where there is none.
    """
    position = jnp.broadcast_to(position, (cache.n_seq_max,))[:, None]
    found = (cache.positions == position) & (position >= 0)
    return jnp.where(jnp.any(found, axis=1), jnp.argmax(found, axis=1), cache.n_remembered)


def share(cache: RecurrentCache, src: Array, dsts: Array, columns: Array) -> RecurrentCache:
    """dsts (int32 [D]) share the slots of src, but for its newest `columns` states (int32 []).

    They are copied when one of them writes. A dst out of range changes nothing.
    """
    only_src = jnp.arange(cache.n_seq_max) == src
    older = roll_back(cache, only_src, jnp.broadcast_to(columns, (cache.n_seq_max,)))
    return cache.replace(
        slots=cache.slots.at[dsts].set(older.slots[src], mode="drop"),
        positions=cache.positions.at[dsts].set(older.positions[src], mode="drop"),
        digests=cache.digests.at[dsts].set(older.digests[src], mode="drop"),
    )


def gather(cache: RecurrentCache, parents: Array) -> RecurrentCache:
    """Sequence s becomes what sequence parents[s] was."""
    return cache.replace(
        slots=cache.slots[parents], positions=cache.positions[parents], digests=cache.digests[parents]
    )


def forget_between(cache: RecurrentCache, seqs: Array, p0: Array, p1: Array) -> RecurrentCache:
    """Older states of `seqs` with position in [p0, p1) can no longer be rolled back to."""
    gone = seqs[:, None] & (cache.positions >= p0) & (cache.positions < p1)
    return _compact(cache, ~gone.at[:, 0].set(False))


def move(cache: RecurrentCache, seqs: Array, p0: Array, p1: Array, to: Any) -> RecurrentCache:
    """Positions of `seqs` in [p0, p1) become to(position); states that are no longer older are forgotten."""
    inside = seqs[:, None] & (cache.positions >= jnp.maximum(p0, 0)) & (cache.positions < p1)
    moved = cache.replace(positions=jnp.where(inside, to(cache.positions), cache.positions))
    newest = jnp.minimum.accumulate(moved.positions, axis=1)
    newer = jnp.pad(newest[:, :-1], ((0, 0), (1, 0)), constant_values=jnp.iinfo(jnp.int32).max)
    return _compact(moved, (moved.positions < newer) & (moved.positions >= 0))


def _compact(cache: RecurrentCache, keep: Array) -> RecurrentCache:
    """Only the columns `keep` (bool [sequences, remembered]) remain, in order; without the tail, none."""
    keep = keep & keep[:, :1]
    order = jnp.argsort(~keep, axis=1, stable=True)
    exists = jnp.arange(cache.n_remembered) < jnp.sum(keep, axis=1)[:, None]
    return _with_columns(cache, jnp.where(exists, order, cache.n_remembered))


# ---------------------------------------------------------------------------------------- one state


def state_of(cache: RecurrentCache, seq: Array) -> tuple[State, ...]:
    """The tail state of a sequence, one dict a layer; zeros when it has none."""
    slot = cache.slots[seq, 0]
    return jax.tree.map(lambda buffer: lax.dynamic_index_in_dim(buffer, slot, keepdims=False), cache.states)


def put_state(
    cache: RecurrentCache, seq: Array, states: tuple[State, ...], position: Array, seen: Array, ok: Array
) -> RecurrentCache:
    """`seq` has `states` at `position` and nothing older; seen: digest. Nothing changes unless `ok`."""
    alone = detach(cache, (jnp.arange(cache.n_seq_max) == seq))
    users = jnp.zeros(cache.zero_slot + 1, jnp.int32).at[alone.slots.reshape(-1)].add(1)
    slot = jnp.argmax(users[:-1] == 0)
    row = jnp.where(ok, slot, cache.zero_slot + 1)
    seq = jnp.where(ok, seq, cache.n_seq_max)

    def put(buffer: Array, state: Array) -> Array:
        return buffer.at[row].set(state.astype(buffer.dtype), mode="drop")

    table = jax.tree.map(
        lambda new, old: jnp.where(ok, new, old),
        (alone.slots, alone.positions, alone.digests),
        (cache.slots, cache.positions, cache.digests),
    )
    slots, positions, digests = table
    return cache.replace(
        states=jax.tree.map(put, cache.states, states),
        slots=slots.at[seq, 0].set(slot, mode="drop"),
        positions=positions.at[seq, 0].set(position, mode="drop"),
        digests=digests.at[seq, 0].set(seen, mode="drop"),
    )
