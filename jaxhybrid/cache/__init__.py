"""What a model remembers: immutable values and pure operations on them."""

from jaxhybrid.cache.create import create_cache
from jaxhybrid.cache.hybrid import Cache, can_shift, is_lossy, seq_pos_max, seq_pos_min, state_bytes
from jaxhybrid.cache.operations import (
    clear,
    fork,
    gather,
    roll_back,
    seq_add,
    seq_cp,
    seq_div,
    seq_keep,
    seq_rm,
)
from jaxhybrid.cache.snapshots import Snapshot, checkpoint, restorable_positions, rewind, try_rewind

__all__ = [
    "Cache",
    "Snapshot",
    "can_shift",
    "checkpoint",
    "clear",
    "create_cache",
    "fork",
    "gather",
    "is_lossy",
    "restorable_positions",
    "rewind",
    "roll_back",
    "seq_add",
    "seq_cp",
    "seq_div",
    "seq_keep",
    "seq_pos_max",
    "seq_pos_min",
    "seq_rm",
    "state_bytes",
    "try_rewind",
]
