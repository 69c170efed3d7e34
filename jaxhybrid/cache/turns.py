"""Work on rows one after the other, where all at once would move more than they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax

Carry = TypeVar("Carry")


def in_turn(rows: Array, f: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
    """carry = f(row, carry) for the rows (int32 []) that are true in `rows`, bool [B], in order."""
    order = jnp.argsort(~rows, stable=True)
    return lax.fori_loop(0, jnp.sum(rows), lambda k, carry: f(order[k], carry), carry)
