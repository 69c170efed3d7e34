"""What recurrent mixers share: the three forms of a recurrence, and states in a memory going through one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recent import with_recent_states
from jaxhybrid.ops.causal_conv import causal_conv

Form = Callable[[Any, Array, int], tuple[Array, Array]]
"""(inputs, a pytree of float32 arrays [B, T, ...]; state float32 [B, ...]; chunk length) to (outputs
[B, T, ...], state). A token whose inputs are all zero is inert."""


class Recurrence(NamedTuple):
    """One recurrence in three forms that agree to float32 rounding.

    sequential: the definition, token after token. chunked: for many tokens at once. one_token: T = 1.
    """

    sequential: Form
    chunked: Form
    one_token: Form


def valid_tokens(n_tokens: int, lengths: Array) -> Array:
    """bool [B, T]: which tokens are real."""
    return jnp.arange(n_tokens) < lengths[:, None]


def convolve(
    memory: States, x: Array, lengths: Array, weight: Array, bias: Array | None
) -> tuple[Array, States]:
    """`causal_conv` of x [B, T, C] over the memory's state "conv"."""
    n_states = memory.n_states

    def f(history: Array, new: tuple[Array, Array]) -> tuple[Array, Array]:
        return causal_conv(new[0], history, new[1], weight, bias, n_states)

    return memory.advance("conv", f, (x, lengths))


def recur(
    memory: States,
    name: str,
    recurrence: Recurrence,
    inputs: Any,
    lengths: Array,
    chunk: int,
    form: str | None = None,
) -> tuple[Array, States]:
    """The memory's state `name` goes through inputs [B, T, ...]: (outputs [B, T, ...], memory).

    form: the name of one, by default one_token for T = 1 and chunked otherwise.
    """
    n_states, n_tokens = memory.n_states, jnp.shape(inputs[0])[1]
    chosen: Form = getattr(recurrence, form or ("one_token" if n_tokens == 1 else "chunked"))

    def f(state: Array, new: tuple[Any, Array]) -> tuple[Array, Array]:
        state, (tokens, real) = state.astype(jnp.float32), new
        if n_states == 1:
            return chosen(tokens, state, chunk)
        many, one = (lambda t, s, f=f: f(t, s, chunk) for f in (chosen, recurrence.one_token))
        return with_recent_states(many, one, tokens, state, real, n_states)

    return memory.advance(name, f, (inputs, lengths))
