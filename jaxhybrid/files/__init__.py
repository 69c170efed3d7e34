"""Models, caches and sequences on disk."""

from jaxhybrid.files.cache_files import load_cache, load_sequence, save_cache, save_sequence
from jaxhybrid.files.load import load_params, save_params, write_gguf

__all__ = [
    "load_cache",
    "load_params",
    "load_sequence",
    "save_cache",
    "save_params",
    "save_sequence",
    "write_gguf",
]
