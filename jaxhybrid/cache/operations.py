"""Operations on whole sequences of a cache, on all its children or on none.

Every operation is pure, jitted, and compiles once for any numbers. Ranges are half-open [p0, p1) with p0 < 0
for 0 and p1 < 0 for infinity; sequence -1 is every sequence. Where an operation can be refused it
returns (cache, ok); when ok is false the cache is the one that was given. `jaxhybrid.checked` has the
same operations for the host, which raise and say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.cache import attention as cells
from jaxhybrid.cache import cell_operations, slot_operations
from jaxhybrid.cache import recurrent as slots
from jaxhybrid.cache.hybrid import FOREVER, Cache, Int, chosen, known, positions_max
from jaxhybrid.cache.operation import operation


@partial(operation, static=("data",))
def clear(cache: Cache, data: bool = False) -> Cache:
    """Empty every sequence. With `data` (static) the buffers become zero too."""
    recurrent = None if cache.recurrent is None else slot_operations.clear(cache.recurrent, data)
    cache = cache.with_cells(lambda child: cell_operations.clear(child, data))
    return cache.replace(recurrent=recurrent, lossy=jnp.zeros_like(cache.lossy))


@operation
def seq_rm(cache: Cache, seq: Int, p0: Int, p1: Int, lossy: bool | Array = False) -> tuple[Cache, Array]:
    """Remove the tokens of `seq` in [p0, p1).

    A recurrent state cannot be cut back: where there is one, the range must cover the whole sequence,
    lie beyond its end, or reach over the end from a position whose state before it is still remembered
    (`n_rollback`). A sliding window can be cut back only as far as it has not dropped what is seen then.
    With `lossy` a range before the tail is dropped from the attention children alone, a window is cut
    back with what it has, and the sequence is marked.
    """
    p0, p1 = _range(p0, p1)
    picked, ok = chosen(cache, seq), known(cache, seq, everyone=True)
    marked, recurrent = cache.lossy, cache.recurrent
    end = positions_max(cache)
    first = _first(cache)
    whole = ((p0 == 0) | (p0 <= first)) & (p1 > end) & (end >= 0)
    if recurrent is not None:
        end = slots.tail(recurrent)
        beyond = (p0 > end) | (p0 >= p1)  # so is every range of an empty sequence
        whole = ~beyond & ((p0 == 0) | (p0 <= first)) & (p1 > end)
        middle = ~beyond & (p1 <= end)
        column = slot_operations.column_at(recurrent, p0 - 1)
        back = ~beyond & ~whole & (p1 > end)
        can = beyond | whole | (back & (column < recurrent.n_remembered)) | (middle & lossy)
        ok = ok & jnp.all(can | ~picked)
        marked = marked | middle
    if cache.windowed is not None:
        cut = ~whole & (p0 <= end) & (p0 < p1) & (p1 > end)
        exact = ~cut | cells.can_end_at(cache.windowed, p0 - 1)
        ok = ok & jnp.all(exact | lossy | ~picked)
        marked = marked | ~exact
    touched = ok & picked
    if recurrent is not None:
        recurrent = slot_operations.roll_back(recurrent, touched & back, column)
        recurrent = slot_operations.forget_between(recurrent, touched & middle, p0, p1)
        recurrent = slot_operations.detach(recurrent, touched & whole)
    cache = cache.with_cells(lambda child: cell_operations.seq_rm(child, touched, p0, p1))
    marked = jnp.where(touched, marked & ~whole, cache.lossy)
    return cache.replace(recurrent=recurrent, lossy=marked), ok


@operation
def roll_back(cache: Cache, ends: Array) -> tuple[Cache, Array]:
    """Every sequence s forgets what comes after position ends[s] (int32 [sequences]); -1 is all.

    A sequence that ends there or before stays as it is. Refused, and nothing is changed, unless all are
    exact. What a speculative decoder does after each round; no state is copied.
    """
    tail = positions_max(cache)
    cut = ends < tail
    ok, recurrent = jnp.bool_(True), cache.recurrent
    emptied = ends < jnp.maximum(_first(cache), 0)
    if recurrent is not None:
        column = jnp.where(emptied, recurrent.n_remembered, slot_operations.column_at(recurrent, ends))
        ok = ok & jnp.all(~cut | emptied | (column < recurrent.n_remembered))
    if cache.windowed is not None:
        ok = ok & jnp.all(~cut | emptied | cells.can_end_at(cache.windowed, ends))
    cut = cut & ok
    if recurrent is not None:
        recurrent = slot_operations.roll_back(recurrent, cut, column)
    forever = jnp.int32(FOREVER)
    cache = cache.with_cells(lambda child: cell_operations.seq_rm(child, cut, ends + 1, forever))
    return cache.replace(recurrent=recurrent, lossy=cache.lossy & ~(cut & emptied)), ok


@operation
def seq_cp(
    cache: Cache, src: Int, dst: Int, p0: Int, p1: Int, lossy: bool | Array = False
) -> tuple[Cache, Array]:
    """dst becomes the tokens of src in [p0, p1); what dst held is dropped. src = dst changes nothing.

    Cells of a unified cache and recurrent states are shared and copied on write. Where there is a state
    the range must begin at the start of the sequence, and end at its tail or where a state is remembered;
    with `lossy` dst gets the tail's state whatever the range, and is marked.
    """
    dst = jnp.asarray(dst, jnp.int32)
    ok = known(cache, dst)
    return _copy(cache, src, jnp.reshape(dst, 1), p0, p1, lossy, ok)


def fork(cache: Cache, src: Int, dsts: Array | Iterable[int]) -> Cache:
    """Every sequence in `dsts` becomes a copy of `src`. Ids outside the cache are ignored."""
    ids = dsts if isinstance(dsts, Array | np.ndarray) else tuple(dsts)
    return _fork(cache, src, jnp.asarray(ids, jnp.int32))


@operation
def _fork(cache: Cache, src: Int, dsts: Array) -> Cache:
    return _copy(cache, src, jnp.reshape(dsts, -1), -1, -1, False, jnp.bool_(True))[0]


def _copy(
    cache: Cache, src: Int, dsts: Array, p0: Int, p1: Int, lossy: bool | Array, ok: Array
) -> tuple[Cache, Array]:
    p0, p1 = _range(p0, p1)
    src = jnp.asarray(src, jnp.int32)
    ok = ok & known(cache, src)
    source = jnp.clip(src, 0, cache.n_seq_max - 1)
    itself = jnp.all(dsts == src)
    mark, recurrent = cache.lossy[source], cache.recurrent
    end, first = positions_max(cache)[source], _first(cache)[source]
    column = jnp.int32(0)
    if recurrent is not None:
        tail = slots.tail(recurrent)[source]
        short = (tail >= 0) & (p1 <= tail)
        found = slot_operations.column_at(recurrent, p1 - 1)[source]
        head = (tail >= 0) & (p0 > jnp.maximum(first, 0))
        exact = ~head & (~short | (found < recurrent.n_remembered))
        column = jnp.where(exact & short, found, 0)
        # nothing of the sequence is in range: dst becomes empty, which is exact
        nothing = (tail >= 0) & ((p1 <= p0) | (p1 <= jnp.maximum(first, 0)) | (p0 > tail))
        column = jnp.where(nothing, recurrent.n_remembered, column)
        ok = ok & (exact | nothing | lossy | itself)
        mark = mark | ~(exact | nothing)
    if cache.windowed is not None:
        short = (end >= 0) & (p1 <= end)
        exact = ~short | cells.can_end_at(cache.windowed, p1 - 1)[source]
        ok = ok & (exact | lossy | itself)
        mark = mark | ~exact
    inside = (dsts >= 0) & (dsts < cache.n_seq_max) & (dsts != src)
    targets = jnp.where(ok & inside, dsts, cache.n_seq_max)  # out of range: nothing is written
    if recurrent is not None:
        recurrent = slot_operations.share(recurrent, source, targets, column)
    cache = cache.with_cells(lambda child: cell_operations.seq_cp(child, source, targets, p0, p1))
    marked = cache.lossy.at[targets].set(mark, mode="drop")
    return cache.replace(recurrent=recurrent, lossy=marked), ok


@operation
def gather(cache: Cache, parents: Array) -> Cache:
    """Sequence s becomes what sequence parents[s] (int32 [sequences]) was: how beams survive.

    States and the cells of a unified cache are shared; with a stream per sequence K/V are copied.
    """
    parents = jnp.clip(jnp.asarray(parents, jnp.int32), 0, cache.n_seq_max - 1)
    recurrent = None if cache.recurrent is None else slot_operations.gather(cache.recurrent, parents)
    cache = cache.with_cells(lambda child: cell_operations.gather(child, parents))
    return cache.replace(recurrent=recurrent, lossy=cache.lossy[parents])


@operation
def seq_keep(cache: Cache, seq: Int) -> Cache:
    """Drop every other sequence from all children. An unknown id changes nothing; -1 keeps all."""
    others = ~chosen(cache, seq) & known(cache, seq, everyone=True)
    recurrent = None if cache.recurrent is None else slot_operations.detach(cache.recurrent, others)
    everything = (jnp.int32(0), jnp.int32(FOREVER))
    cache = cache.with_cells(lambda child: cell_operations.seq_rm(child, others, *everything))
    return cache.replace(recurrent=recurrent, lossy=cache.lossy & ~others)


@operation
def seq_add(
    cache: Cache, seq: Int, p0: Int, p1: Int, delta: Int, lossy: bool | Array = False
) -> tuple[Cache, Array]:
    """Move the positions of `seq` in [p0, p1) by `delta`; what falls below 0 is dropped.

    Refused where a recurrent state's history would move without its tail, unless `lossy`; and where a
    unified cache has no free cells to copy those that another sequence shares.
    """
    delta = jnp.asarray(delta, jnp.int32)
    return _move(cache, seq, p0, p1, lambda p: p + delta, delta == 0, lossy)


@operation
def seq_div(
    cache: Cache, seq: Int, p0: Int, p1: Int, d: Int, lossy: bool | Array = False
) -> tuple[Cache, Array]:
    """Divide the positions of `seq` in [p0, p1) by the whole number `d`, rounding down.

    Several tokens may then stand at one position. Refused as `seq_add` is, and for d < 1.
    """
    d = jnp.asarray(d, jnp.int32)
    positive = jnp.maximum(d, 1)
    moved, ok = _move(cache, seq, p0, p1, lambda p: p // positive, d <= 1, lossy)
    return moved, ok & (d >= 1)


def _move(
    cache: Cache,
    seq: Int,
    p0: Int,
    p1: Int,
    to: Callable[[Array], Array],
    nothing: Array,
    lossy: bool | Array,
) -> tuple[Cache, Array]:
    p0, p1 = _range(p0, p1)
    p1 = jnp.where(nothing, p0, p1)
    picked, ok = chosen(cache, seq), known(cache, seq, everyone=True)
    seq = jnp.asarray(seq, jnp.int32)
    marked, recurrent = cache.lossy, cache.recurrent
    fell = jnp.zeros(cache.n_seq_max, bool)
    if recurrent is not None:
        end = slots.tail(recurrent)
        reaches = (p0 <= end) & (end < p1)
        part = (end >= 0) & (p0 < p1) & ~reaches & _moves_any(cache, p0, p1)
        ok = ok & jnp.all(~part | lossy | ~picked)
        dropped = _drops_any(cache, p0, p1, to)
        marked = marked | part | dropped
        # a tail that falls below 0 takes the sequence with it
        fell = (end >= 0) & reaches & (to(end) < 0)
    for child in cache.cell_children:
        ok = ok & cell_operations.room_to_move(child, seq, p0, p1)
    stop = jnp.where(ok, p1, p0)
    if recurrent is not None:
        recurrent = slot_operations.move(recurrent, picked, p0, stop, to)
        recurrent = slot_operations.detach(recurrent, ok & picked & fell)

    def moved(child: cells.AttentionCache) -> cells.AttentionCache:
        child = cell_operations.move(child, seq, p0, stop, to)
        return cell_operations.seq_rm(child, ok & picked & fell, jnp.int32(0), jnp.int32(FOREVER))

    cache = cache.with_cells(moved)
    marked = jnp.where(ok & picked, marked & ~fell, cache.lossy)
    return cache.replace(recurrent=recurrent, lossy=marked), ok


def _moves_any(cache: Cache, p0: Array, p1: Array) -> Array:
    """bool [sequences]: whether a range holds cells, or, without cells, could be part of the past."""
    if not cache.cell_children:
        return jnp.broadcast_to(p0 < slots.tail(_recurrent(cache)), (cache.n_seq_max,))
    return _any_cell(cache, lambda p: (p >= p0) & (p < p1))


def _drops_any(cache: Cache, p0: Array, p1: Array, to: Callable[[Array], Array]) -> Array:
    return _any_cell(cache, lambda p: (p >= p0) & (p < p1) & (to(p) < 0))


def _any_cell(cache: Cache, test: Callable[[Array], Array]) -> Array:
    found = jnp.zeros(cache.n_seq_max, bool)
    for child in cache.cell_children:
        found = found | jnp.any(cells.held(child) & test(child.positions), axis=1)
    return found


def _first(cache: Cache) -> Array:
    """int32 [sequences]: where each sequence begins, -1 where that is not known."""
    if cache.attention is None:
        return jnp.full(cache.n_seq_max, -1, jnp.int32)
    return cells.pos_min(cache.attention)


def _recurrent(cache: Cache) -> slots.RecurrentCache:
    assert cache.recurrent is not None
    return cache.recurrent


def _range(p0: Int, p1: Int) -> tuple[Array, Array]:
    p0, p1 = jnp.asarray(p0, jnp.int32), jnp.asarray(p1, jnp.int32)
    return jnp.maximum(p0, 0), jnp.where(p1 < 0, FOREVER, p1)
