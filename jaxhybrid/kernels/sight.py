"""Which cells queries see, said by positions: a mask of queries times cells is never needed in memory."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array


class Sight(struct.PyTreeNode):
    """Query t of row b stands at starts[b] + t and sees the cells at positions up to its own.

    cells: int32 [B, S], the position of each cell, -1 where the row has nothing. starts: int32 [B].
    n_tokens: queries a row. window: positions a query sees, its own included; None for all.
    """

    cells: Array
    starts: Array
    n_tokens: int = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False, default=None)

    @property
    def n_cells(self) -> int:
        return self.cells.shape[1]

    @property
    def mask(self) -> Array:
        """bool [B, T, S]."""
        cells = self.cells[:, None]
        query = self.starts[:, None, None] + jnp.arange(self.n_tokens, dtype=jnp.int32)[:, None]
        mask = (cells >= 0) & (cells <= query)
        return mask if self.window is None else mask & (cells > query - self.window)
