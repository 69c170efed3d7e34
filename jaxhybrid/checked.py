"""The cache operations for the host: they raise RefusedError with the reason instead of returning a flag.

    cache = jaxhybrid.checked.seq_rm(cache, 0, 5, -1)

Same names and arguments as the pure operations of `jaxhybrid`; each returns the new cache. The cache that
was passed in is valid in any case.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxhybrid.cache import operations
from jaxhybrid.cache.cell_operations import room_to_move
from jaxhybrid.cache.hybrid import Cache, known, seq_pos_max
from jaxhybrid.cache.snapshots import restorable_positions, rewind
from jaxhybrid.errors import RefusedError

__all__ = ["fork", "rewind", "seq_add", "seq_cp", "seq_div", "seq_keep", "seq_rm"]


def seq_rm(cache: Cache, seq: int, p0: int = -1, p1: int = -1, lossy: bool = False) -> Cache:
    """Remove the tokens of `seq` in [p0, p1)."""
    _check_known(cache, seq, everyone=True)
    after, ok = operations.seq_rm(cache, seq, p0, p1, lossy)
    if bool(ok):
        return after
    for one in _meant(cache, seq):
        _, fine = operations.seq_rm(cache, one, p0, p1, lossy)
        if not bool(fine):
            raise RefusedError(f"seq_rm: {_why_not(cache, one, p0, p1)}")
    raise AssertionError("a refusal has a sequence")


def seq_cp(cache: Cache, src: int, dst: int, p0: int = -1, p1: int = -1, lossy: bool = False) -> Cache:
    """dst becomes the tokens of src in [p0, p1)."""
    _check_known(cache, src)
    _check_known(cache, dst)
    after, ok = operations.seq_cp(cache, src, dst, p0, p1, lossy)
    if bool(ok):
        return after
    if p0 > 0 and cache.recurrent is not None:
        raise RefusedError(
            f"seq_cp: the recurrent state of sequence {src} has seen what comes before position {p0}; "
            "copy from the start, or give lossy=True"
        )
    raise RefusedError(f"seq_cp: {_why_not(cache, src, p1, -1)}")


def seq_add(cache: Cache, seq: int, p0: int, p1: int, delta: int, lossy: bool = False) -> Cache:
    """Move the positions of `seq` in [p0, p1) by `delta`."""
    _check_known(cache, seq, everyone=True)
    after, ok = operations.seq_add(cache, seq, p0, p1, delta, lossy)
    if bool(ok):
        return after
    raise RefusedError(f"seq_add: {_why_not_moved(cache, seq, p0, p1)}")


def seq_div(cache: Cache, seq: int, p0: int, p1: int, d: int, lossy: bool = False) -> Cache:
    """Divide the positions of `seq` in [p0, p1) by `d`."""
    _check_known(cache, seq, everyone=True)
    if d < 1:
        raise RefusedError(f"seq_div: {d} must be at least 1")
    after, ok = operations.seq_div(cache, seq, p0, p1, d, lossy)
    if bool(ok):
        return after
    raise RefusedError(f"seq_div: {_why_not_moved(cache, seq, p0, p1)}")


def seq_keep(cache: Cache, seq: int) -> Cache:
    """Drop every other sequence."""
    _check_known(cache, seq, everyone=True)
    return operations.seq_keep(cache, seq)


def fork(cache: Cache, src: int, dsts: Iterable[int]) -> Cache:
    """Every sequence in `dsts` becomes a copy of `src`."""
    targets = [int(dst) for dst in dsts]
    for seq in (src, *targets):
        _check_known(cache, seq)
    return operations.fork(cache, src, targets)


# ------------------------------------------------------------------------------------------ reasons


def _check_known(cache: Cache, seq: int, everyone: bool = False) -> None:
    if not bool(known(cache, seq, everyone)):
        also = ", or -1 for all" if everyone else ""
        raise RefusedError(
            f"sequence {seq} is outside the cache's {cache.n_seq_max} sequences: give 0 to "
            f"{cache.n_seq_max - 1}{also}"
        )


def _meant(cache: Cache, seq: int) -> Iterable[int]:
    return range(cache.n_seq_max) if seq == -1 else (seq,)


def _why_not(cache: Cache, seq: int, p0: int, p1: int) -> str:
    """Why a sequence cannot lose [p0, p1)."""
    end = int(seq_pos_max(cache, seq))
    if 0 <= p1 <= end:
        return (
            f"sequence {seq} has a recurrent state at position {end}, which cannot forget a range before it; "
            "lossy=True drops it from attention alone"
        )
    there = restorable_positions(cache, seq)
    shown = ", ".join(map(str, there[-8:]))
    remedy = (
        "take a checkpoint there beforehand"
        if cache.recurrent is None
        else "create the cache with a larger n_rollback, or take a checkpoint there beforehand"
    )
    return (
        f"sequence {seq} cannot be taken back to position {max(p0, 0) - 1}: it can end exactly at "
        f"{shown or 'no position'}; {remedy}"
    )


def _why_not_moved(cache: Cache, seq: int, p0: int, p1: int) -> str:
    low, high = max(p0, 0), np.iinfo(np.int32).max if p1 < 0 else p1
    for child in cache.cell_children:
        if not bool(room_to_move(child, np.int32(seq), np.int32(low), np.int32(high))):  # type: ignore[arg-type]
            return (
                f"sequence {seq} shares cells that would have to be copied, and too few of "
                f"{child.n_cells} are free; raise n_ctx or remove a sequence"
            )
    return (
        f"[{low}, {p1 if p1 >= 0 else 'end'}) would move part of the history of a recurrent state and not "
        "its tail; lossy=True moves it in attention alone"
    )
