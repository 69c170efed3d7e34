"""Cutting a sequence into chunks, and decays between tokens of a chunk without loss of precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_NO_TRACE = -110.0  # exp of it is 0 in float32


def scan_chunks(
    f: Callable[[Array, Any], tuple[Array, Array]], state: Array, inputs: Any, size: int
) -> tuple[Array, Array]:
    """`f(state, inputs of one chunk [B, size, ...])` over all of [B, T, ...]: (outputs [B, T, ...], state).

    The last chunk is filled with zeros, which are inert.
    """
    rows, n_tokens = jax.tree.leaves(inputs)[0].shape[:2]
    size = min(size, n_tokens)
    n_chunks = -(-n_tokens // size)

    def chunks(t: Array) -> Array:  # [B, T, ...] to [chunks, B, size, ...]
        padding = [(0, 0), (0, n_chunks * size - n_tokens)] + [(0, 0)] * (t.ndim - 2)
        return jnp.pad(t, padding).reshape(rows, n_chunks, size, *t.shape[2:]).swapaxes(0, 1)

    packed = jax.tree.map(chunks, inputs)
    if n_chunks == 1:
        state, y = f(state, jax.tree.map(lambda t: t[0], packed))
        return y, state
    state, y = lax.scan(f, state, packed)
    y = y.swapaxes(0, 1).reshape(rows, n_chunks * size, *y.shape[3:])
    return y[:, :n_tokens], state


def scan_tokens(
    f: Callable[[Array, Any], tuple[Array, Array]], state: Array, inputs: Any
) -> tuple[Array, Array]:
    """`f(state, inputs of one token [B, ...])` over all of [B, T, ...]: (outputs [B, T, ...], state)."""
    state, y = lax.scan(f, state, jax.tree.map(lambda t: t.swapaxes(0, 1), inputs))
    return y.swapaxes(0, 1), state


def cumulative_decay(log_a: Array, axis: int) -> Array:
    """Sums of log decays up to each token, in two parts stacked first; see `apart`.

    A decay from s to t is exp of a difference of such sums. Rounding in long sums would drown weak decays
    that follow strong ones, so the sums are kept as multiples of 1/64, which float32 adds exactly, and
    the rest, which stays small.
    """
    log_a = jnp.maximum(log_a, _NO_TRACE)
    coarse = lax.stop_gradient(jnp.round(log_a * 64) / 64)
    return jnp.cumsum(jnp.stack([coarse, log_a - coarse]), axis=axis + 1)


def apart(later: Array, earlier: Array) -> Array:
    """Log decay from `earlier` to `later`, both as `cumulative_decay` gives them."""
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def linear_scan(a: Array, b: Array, start: Array) -> Array:
    """h_t = a_t h_{t-1} + b_t for all t at once: a, b [B, T, ...], the h before them [B, ...]; h [B, T, ...].

    a lies in [0, 1], so that no product overflows.
    """

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    products, sums = lax.associative_scan(combine, (a, b), axis=1)
    return sums + products * start[:, None]
