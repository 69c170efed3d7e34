"""Bytes of trees, and those that a decode step cannot do without."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxhybrid.cache import Cache
from jaxhybrid.params import Params


def tree_bytes(tree: Any) -> int:
    """Of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def step_bytes(params: Params, cache: Cache) -> int:
    """Weights, all K/V and all states read, one cell of each stream and all states written."""
    moved = tree_bytes(params)
    for child in cache.cell_children:
        stored = tree_bytes((child.keys, child.values))
        moved += stored + stored // child.n_cells
    if cache.recurrent is not None:
        moved += 2 * tree_bytes(cache.recurrent.states)
    return moved
