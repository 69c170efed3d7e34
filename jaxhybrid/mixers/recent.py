"""The states after each of the last tokens of a row, for caches that can be rolled back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Form = Callable[[Any, Array], tuple[Array, Array]]
"""(tokens [B, T, ...], state [B, ...]) to (outputs [B, T, ...], state); all-zero tokens are inert."""


def with_recent_states(
    many: Form, one: Form, tokens: Any, state: Array, lengths: Array, n: int
) -> tuple[Array, Array]:
    """Outputs [B, T, ...] and the states [B, n, ...] after the last n tokens of each row, newest first.

    tokens: a pytree of arrays [B, T, ...]; lengths: int32 [B], real tokens of each row; 1 <= n <= T. All
    but the last n tokens go through `many` at once, the last n through `one`, token after token. States
    before a row's first token are the one it began with.
    """
    n_tokens = jax.tree.leaves(tokens)[0].shape[1]
    split = (lengths - n)[:, None]  # [B, 1], the first token that goes one by one; below 0 in short rows
    index = split + jnp.arange(n)

    def last(t: Array) -> Array:
        return _only(jnp.take_along_axis(t, _over(jnp.maximum(index, 0), t), axis=1), index >= 0)

    parts: list[Array] = []
    first = n_tokens - n
    if first > 0:
        early = jnp.arange(first) < split
        y, state = many(jax.tree.map(lambda t: _only(t[:, :first], early), tokens), state)
        parts.append(y)

    def token(s: Array, now: Any) -> tuple[Array, tuple[Array, Array]]:
        y, s = one(jax.tree.map(lambda t: t[:, None], now), s)
        return s, (y[:, 0], s)

    by_token = jax.tree.map(lambda t: last(t).swapaxes(0, 1), tokens)
    _, (y, states) = lax.scan(token, state, by_token)
    parts.append(y.swapaxes(0, 1))
    column = jnp.arange(n_tokens)
    order = jnp.clip(jnp.where(column < split, column, first + column - split), 0, n_tokens - 1)
    y = jnp.concatenate(parts, axis=1)
    return jnp.take_along_axis(y, _over(order, y), axis=1), states[::-1].swapaxes(0, 1)


def _over(index: Array, t: Array) -> Array:
    return index.reshape(*index.shape, *(1,) * (t.ndim - 2))


def _only(t: Array, keep: Array) -> Array:
    return jnp.where(_over(keep, t), t, 0)
