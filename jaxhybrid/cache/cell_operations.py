"""Operations on the cells of one attention child: dropping, copying, reordering, moving."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.cache.attention import AttentionCache, held, n_free
from jaxhybrid.hparams import RopeHparams
from jaxhybrid.ops.rope import rotate_further


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
        return _set_streams(buffer, dsts, lambda _, old: buffer[src][None])

    return _forget_lost(
        cache.replace(
            positions=cache.positions.at[dsts].set(kept, mode="drop"),
            tokens=copied(cache.tokens),
            keys=tuple(map(copied, cache.keys)),
            values=tuple(map(copied, cache.values)),
        )
    )


def _set_streams(
    buffer: Array, streams: Array, f: Callable[[Array, Array], Array], n: int | Array | None = None
) -> Array:
    """Stream s of `buffer` becomes f(s, old [1, ...]) for the first n of `streams`, one after the other.

    So that no more than a stream is moved at a time. A stream out of range changes nothing.
    """

    def one(i: Array | int, buffer: Array) -> Array:
        stream = jnp.clip(streams[i], 0, buffer.shape[0] - 1)
        old = lax.dynamic_index_in_dim(buffer, stream)
        new = jnp.where((streams[i] >= 0) & (streams[i] < buffer.shape[0]), f(stream, old), old)
        return lax.dynamic_update_index_in_dim(buffer, new, stream, 0)

    if len(streams) == 0:
        return buffer
    if len(streams) == 1 and n is None:
        return one(0, buffer)
    return lax.fori_loop(0, len(streams) if n is None else n, one, buffer)


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

    everyone = jnp.arange(cache.positions.shape[0])
    first = jnp.where((seq < 0) | cache.unified, 0, seq)
    n = jnp.where(seq < 0, len(everyone), 1)

    def of_layer(keys: Array, rope: RopeHparams | None) -> Array:
        if rope is None:
            return keys

        def rotated(stream: Array, old: Array) -> Array:
            by = lax.dynamic_index_in_dim(turn, stream)
            turned = rotate_further(old.swapaxes(1, 2), by, rope).swapaxes(1, 2)
            return jnp.where((by != 0)[:, None, :, None], turned, old)

        return _set_streams(keys, first + everyone, rotated, n)

    return tuple(of_layer(k, r) for k, r in zip(cache.keys, cache.ropes, strict=True))
