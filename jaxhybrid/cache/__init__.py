"""What a model remembers: immutable values and pure operations on them."""

from jaxhybrid.cache.create import create_cache
from jaxhybrid.cache.hybrid import (
    Cache,
    clear,
    fork,
    is_lossy,
    seq_cp,
    seq_keep,
    seq_pos_max,
    seq_pos_min,
    seq_rm,
    state_bytes,
)

__all__ = [
    "Cache",
    "clear",
    "create_cache",
    "fork",
    "is_lossy",
    "seq_cp",
    "seq_keep",
    "seq_pos_max",
    "seq_pos_min",
    "seq_rm",
    "state_bytes",
]
