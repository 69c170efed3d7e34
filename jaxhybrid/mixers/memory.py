"""What mixers need of a memory, and the memories of a model that runs without a cache.

A mixer knows nothing of cells, slots or sequences. It hands its new rows to a memory and gets back what
it may look at; a cache provides memories of the same form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxhybrid.kernels.sight import Sight

KeyValues = TypeVar("KeyValues", bound="KeyValueMemory")
States = TypeVar("States", bound="StateMemory")
Advance = Callable[[Array, Any], tuple[Array, Array]]
"""(states [R, ...], rows [R, ...]) to (outputs [R, ...], states): the same function for every row. A row
that is zero throughout is inert: its state stays as it is."""


class KeyValueMemory(Protocol):
    """The memory of an attention layer."""

    def extend(self: KeyValues, keys: Array, values: Array) -> tuple[Array, Array, Sight, KeyValues]:
        """Remember keys and values [B, T, KV heads, head size] of the new tokens.

        Returns everything the queries may look at: keys and values [R, KV heads, at least S, head size] with
        R either B or 1 (shared by all rows), which of the first S cells they see, and the memory after the
        tokens.
        """
        ...


class StateMemory(Protocol):
    """The memory of a recurrent layer: named states.

    n_states: how many states of a row are wanted, after its last token, after the one before it, and so
    on. With 1, `f` returns states [R, ...], with more [R, n_states, ...], newest first; what it gives for a
    token before the row's first is not used.
    """

    @property
    def n_states(self) -> int: ...

    def advance(self: States, name: str, f: Advance, rows: Any) -> tuple[Array, States]:
        """Apply `f` to the states `name` and the new rows (a pytree of arrays [B, ...]).

        Returns f's outputs [B, ...] and the memory with the new states. The memory chooses the order
        in which rows meet states, and may add inert rows.
        """
        ...


class Causal(struct.PyTreeNode):
    """No memory: the tokens at hand attend to themselves. valid: bool [B, T], False for padding."""

    valid: Array
    window: int | None = struct.field(pytree_node=False, default=None)

    def extend(self, keys: Array, values: Array) -> tuple[Array, Array, Sight, Causal]:
        rows, n_tokens = self.valid.shape
        cells = jnp.where(self.valid, jnp.arange(n_tokens, dtype=jnp.int32), -1)
        sight = Sight(cells, jnp.zeros(rows, jnp.int32), n_tokens, self.window)
        return keys.swapaxes(1, 2), values.swapaxes(1, 2), sight, self


class RowStates(struct.PyTreeNode):
    """The state of each row, in order: {name: [B, ...]}."""

    states: dict[str, Array]
    n_states = 1

    def advance(self, name: str, f: Advance, rows: Any) -> tuple[Array, RowStates]:
        y, state = f(self.states[name], rows)
        return y, self.replace(states=self.states | {name: state.astype(self.states[name].dtype)})
