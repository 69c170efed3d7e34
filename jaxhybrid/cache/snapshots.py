"""Going back: checkpoints of one sequence, and the positions that it can be taken back to.

A recurrent state cannot be cut back, so going back needs the state that was. A snapshot is known by its
position, and used only for a sequence that has the very same past.
"""

from __future__ import annotations

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxhybrid.cache import attention as cells
from jaxhybrid.cache import cell_operations, slot_operations
from jaxhybrid.cache import recurrent as slots
from jaxhybrid.cache.hybrid import FOREVER, Cache, Int, known, positions_max
from jaxhybrid.cache.operation import operation
from jaxhybrid.errors import RefusedError


class Snapshot(struct.PyTreeNode):
    """The state of one sequence after its token at `position` (int32 [], -1: empty); no K/V.

    states: one dict a recurrent layer. seen: uint32 [2], digest of the tokens the state has seen. past:
    uint32 [children, 2], digests of the cells that were visible. lossy: bool [].
    """

    position: Array
    states: tuple[slots.State, ...]
    seen: Array
    past: Array
    lossy: Array


@operation
def checkpoint(cache: Cache, seq: Int) -> Snapshot:
    """A small value that `rewind` can later take the sequence back to; seq must be in the cache."""
    seq = jnp.clip(jnp.asarray(seq, jnp.int32), 0, cache.n_seq_max - 1)
    states, seen = (), jnp.zeros(2, jnp.uint32)
    if cache.recurrent is not None:
        states = slot_operations.state_of(cache.recurrent, seq)
        seen = cache.recurrent.digests[seq, 0]
    end = positions_max(cache)
    return Snapshot(
        position=end[seq], states=states, seen=seen, past=_past(cache, end)[seq], lossy=cache.lossy[seq]
    )


def _past(cache: Cache, ends: Array) -> Array:
    """uint32 [sequences, children, 2]"""
    found = [cells.history(child, ends) for child in cache.cell_children]
    return jnp.stack(found, axis=1) if found else jnp.zeros((cache.n_seq_max, 0, 2), jnp.uint32)


@operation
def try_rewind(cache: Cache, seq: Int, snapshot: Snapshot) -> tuple[Cache, Array]:
    """Take `seq` back to a snapshot: (cache, ok), jittable; refused unless its cells hold that very past."""
    seq = jnp.asarray(seq, jnp.int32)
    ok = known(cache, seq)
    seq = jnp.clip(seq, 0, cache.n_seq_max - 1)
    end = snapshot.position
    picked = jnp.arange(cache.n_seq_max) == seq
    past = _past(cache, jnp.full(cache.n_seq_max, end))[seq]
    ok = ok & jnp.all(past == snapshot.past)
    if cache.windowed is not None:
        ok = ok & ((end < 0) | cells.can_end_at(cache.windowed, end)[seq])
    recurrent = cache.recurrent
    if recurrent is not None:
        kept = slot_operations.put_state(recurrent, seq, snapshot.states, end, snapshot.seen, ok & (end >= 0))
        recurrent = slot_operations.detach(kept, picked & ok & (end < 0))
    cut = (picked & ok, end + 1, jnp.int32(FOREVER))
    cache = cache.with_cells(lambda child: cell_operations.seq_rm(child, *cut))
    lossy = jnp.where(picked & ok, snapshot.lossy, cache.lossy)
    return cache.replace(recurrent=recurrent, lossy=lossy), ok


def rewind(cache: Cache, seq: Int, snapshot: Snapshot) -> Cache:
    """Take `seq` back to a snapshot of it: newer cells are dropped, the state is put back.

    Raises RefusedError when the sequence no longer has the snapshot's past. Inside jit, where nothing can
    be raised, the cache is returned unchanged then; `try_rewind` tells.
    """
    after, ok = try_rewind(cache, seq, snapshot)
    if not isinstance(ok, jax.core.Tracer) and not bool(ok):
        if not bool(known(cache, seq)):
            raise RefusedError(f"sequence {int(seq)} is outside the cache's {cache.n_seq_max} sequences")
        raise RefusedError(
            f"sequence {int(seq)} no longer holds the past of the snapshot at position "
            f"{int(snapshot.position)}; take a new checkpoint, or compute the tokens again"
        )
    return after


def restorable_positions(cache: Cache, seq: int) -> list[int]:
    """Positions that the sequence can be made to end at exactly, without a checkpoint; the last is its end.

    `seq_rm(cache, seq, p + 1, -1)` does it. Going back to nothing is always possible and not listed.
    """
    if not 0 <= seq < cache.n_seq_max:
        return []
    end = int(positions_max(cache)[seq])
    if cache.recurrent is not None:
        found = np.asarray(cache.recurrent.positions[seq])
    else:
        child = cache.cell_children[0]
        found = (
            np.asarray(child.positions[0])[np.asarray(cells.held(child))[seq]]
            if child.unified
            else (np.asarray(child.positions[seq]))
        )
    found = {int(p) for p in found if 0 <= p <= end}
    if cache.windowed is not None and cache.windowed.lost is not None:
        assert cache.windowed.window is not None
        lost = int(cache.windowed.lost[seq])
        found = {p for p in found if lost < 0 or p >= lost + cache.windowed.window - 1}
    return sorted(found)
