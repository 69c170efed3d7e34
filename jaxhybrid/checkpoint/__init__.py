"""Models on disk."""

from jaxhybrid.checkpoint.load import load_params, save_params

__all__ = ["load_params", "save_params"]
