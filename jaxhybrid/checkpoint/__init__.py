"""Models, caches and sequences on disk."""

from jaxhybrid.checkpoint.cache_files import load_cache, load_sequence, save_cache, save_sequence
from jaxhybrid.checkpoint.load import load_params, save_params

__all__ = [
    "load_cache",
    "load_params",
    "load_sequence",
    "save_cache",
    "save_params",
    "save_sequence",
]
