"""The gated delta rule (arXiv:2412.06464), with a decay for each head or for each key channel.

With heads h, group g(h) of keys and queries, decay a_t (a scalar, or a diagonal over key channels):
    S = a_t S_{t-1}      S_t = S + k_t (outer) beta_t (v_t - S^T k_t)      o_t = S_t^T q_t
The state S is [B, H, K, V].
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from jaxhybrid.kernels import state as kernels
from jaxhybrid.mixers.chunks import apart, cumulative_decay, scan_chunks, scan_tokens
from jaxhybrid.mixers.recurrence import Recurrence

_HIGHEST = lax.Precision.HIGHEST
_BLOCK = 16
"""Tokens between which decays by channel are formed one by one; see `_decayed_products`."""


class Inputs(NamedTuple):
    """All float32, all zero at padding."""

    q: Array  # [B, T, G, K]
    k: Array  # [B, T, G, K], of length 1
    v: Array  # [B, T, H, V]
    log_a: Array  # [B, T, H] or [B, T, H, K], at most 0
    beta: Array  # [B, T, H]


def _sequential(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    del chunk
    per_group = inputs.v.shape[2] // inputs.k.shape[2]

    def token(s: Array, now: Inputs) -> tuple[Array, Array]:
        q, k = (jnp.repeat(g, per_group, axis=1) for g in (now.q, now.k))  # [B, H, K]
        log_a = now.log_a if now.log_a.ndim == 3 else now.log_a[..., None]
        s = jnp.exp(log_a)[..., None] * s
        error = now.v - jnp.einsum("bhkv,bhk->bhv", s, k, precision=_HIGHEST)
        s = s + k[..., None] * (now.beta[..., None] * error)[:, :, None]
        return s, jnp.einsum("bhkv,bhk->bhv", s, q, precision=_HIGHEST)

    return scan_tokens(token, state, inputs)


def _one_token(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    """Both products with the old state at once, then one elementwise pass that writes the new one.

    S_t^T q = (a S)^T q + (k q) beta (v - (a S)^T k).
    """
    del chunk
    per_group = inputs.v.shape[2] // inputs.k.shape[2]
    q, k = (jnp.repeat(g[:, 0], per_group, axis=1) for g in (inputs.q, inputs.k))  # [B, H, K]
    log_a = inputs.log_a[:, 0]
    a = jnp.exp(log_a if log_a.ndim == 3 else log_a[..., None])  # [B, H, K or 1]
    read = jnp.einsum("bhnk,bhkv->bhnv", jnp.stack([a * k, a * q], axis=2), state, precision=_HIGHEST)
    error = inputs.beta[:, 0, :, None] * (inputs.v[:, 0] - read[:, :, 0])
    y = read[:, :, 1] + jnp.sum(k * q, axis=-1, keepdims=True) * error
    return y[:, None], a[..., None] * state + k[..., None] * error[:, :, None]


def _chunked(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    """The errors of a chunk solve a triangular system; the rest is matrix products (arXiv:2406.06484).

    With G_t the log decay from the chunk's start and u_t the error that token t writes,
        u_t + beta_t sum_{s<t} (k_t e^(G_t - G_s) k_s) u_s = beta_t (v_t - (e^G_t k_t)^T S).
    """
    rows, heads, n_keys, n_values = state.shape
    groups = inputs.k.shape[2]
    per_group = heads // groups

    def one_chunk(s: Array, now: Inputs) -> tuple[Array, Array]:  # s: [B, G, R, K, V]
        n = now.q.shape[1]

        def by_head(t: Array) -> Array:  # [B, n, H, ...] to [B, G, R, n, ...]
            t = t.reshape(rows, n, groups, per_group, *t.shape[3:])
            return t.transpose(0, 2, 3, 1, *range(4, t.ndim))

        q, k = (t.transpose(0, 2, 1, 3)[:, :, None] for t in (now.q, now.k))  # [B, G, 1, n, K]
        v, beta = by_head(now.v), by_head(now.beta)[..., None]
        log_a = by_head(now.log_a if now.log_a.ndim == 4 else now.log_a[..., None])  # [B, G, R, n, K or 1]
        sums = cumulative_decay(log_a, 3)
        total = sums[0] + sums[1]
        from_start = jnp.exp(total)
        to_end = jnp.exp(apart(sums[:, :, :, :, -1:], sums))
        above = jnp.tril(beta * _decayed_products(k, k, sums), -1)
        seen = jnp.tril(_decayed_products(q, k, sums))
        carried = jnp.einsum("bgrtk,bgrkv->bgrtv", k * from_start, s, precision=_HIGHEST)
        u = solve_triangular(above, beta * (v - carried), lower=True, unit_diagonal=True)
        y = jnp.einsum("bgrtk,bgrkv->bgrtv", q * from_start, s, precision=_HIGHEST)
        y = y + jnp.einsum("bgrts,bgrsv->bgrtv", seen, u, precision=_HIGHEST)
        added = jnp.einsum("bgrsk,bgrsv->bgrkv", k * to_end, u, precision=_HIGHEST)
        s = from_start[..., -1, :, None] * s + added
        return s, y.transpose(0, 3, 1, 2, 4).reshape(rows, n, heads, n_values)

    start = state.reshape(rows, groups, per_group, n_keys, n_values)
    y, end = scan_chunks(one_chunk, start, inputs, chunk)
    return y, end.reshape(state.shape)


def _decayed_products(left: Array, right: Array, sums: Array) -> Array:
    """sum_k left[t, k] exp(G_t[k] - G_s[k]) right[s, k] for s <= t; what is above is meaningless.

    left, right: [B, G, 1, n, K]. sums: as `cumulative_decay` gives them, [2, B, G, R, n, K or 1]. Returns
    [B, G, R, n, n].
    """
    if sums.shape[-1] == 1:
        g = sums[..., 0]
        between = jnp.exp(_at_most_0(apart(g[..., :, None], g[..., None, :])))
        return jnp.einsum("...tk,...sk->...ts", left, right, precision=_HIGHEST) * between
    shape, n = sums.shape[1:], sums.shape[-2]

    # few dimensions: XLA's CPU compiler crashes on the gradient of a sum over one of eight
    def flat(t: Array) -> Array:
        return jnp.broadcast_to(t, shape).reshape(-1, *shape[-2:])

    whole = _products_by_channel(flat(left), flat(right), sums.reshape(2, -1, *shape[-2:]))
    return whole.reshape(*shape[:-1], n)


def _products_by_channel(left: Array, right: Array, sums: Array) -> Array:
    """The same for decays by channel: left and right [N, n, K], sums [2, N, n, K], to [N, n, n].

    Such a decay stands inside the sum over channels. exp(G_t) exp(-G_s) would overflow, so between blocks of
    tokens it is split at the start of the later block, where both factors are at most 1, and inside a
    block it is formed for each pair.
    """
    n = right.shape[-2]
    size = min(_BLOCK, n)
    n_blocks = -(-n // size)
    filled = n_blocks * size

    def blocks(t: Array) -> Array:  # [..., n, K] to [..., blocks, size, K]
        t = jnp.pad(t, [(0, 0)] * (t.ndim - 2) + [(0, filled - n), (0, 0)])
        return t.reshape(*t.shape[:-2], n_blocks, size, t.shape[-1])

    lefts, rights, g = blocks(left), blocks(right), blocks(sums)  # [N, blocks, size, K]
    pairs = jnp.exp(_at_most_0(apart(g[..., :, None, :], g[..., None, :, :])))
    inside = jnp.sum(lefts[..., :, None, :] * rights[..., None, :, :] * pairs, axis=-1)
    # the sums just before each block; the first has nothing before it
    before = jnp.concatenate([jnp.zeros_like(g[..., :1, -1, :]), g[..., :-1, -1, :]], axis=-2)
    since = jnp.exp(_at_most_0(apart(g, before[..., None, :])))
    until = jnp.exp(_at_most_0(apart(before[..., None, :], g.reshape(2, -1, 1, filled, g.shape[-1]))))
    earlier = jnp.arange(filled) < size * jnp.arange(n_blocks)[:, None]
    until = jnp.where(earlier[..., None], until, 0.0)  # [N, blocks, n, K]
    every = rights.reshape(-1, 1, filled, rights.shape[-1])
    across = jnp.einsum("nbtk,nbsk->nbts", lefts * since, every * until, precision=_HIGHEST)
    across = across.reshape(*across.shape[:-1], n_blocks, size)
    same = jnp.eye(n_blocks, dtype=across.dtype)[:, None, :, None]
    whole = across + inside[..., :, :, None, :] * same
    return whole.reshape(-1, filled, filled)[..., :n, :n]


def _at_most_0(log_a: Array) -> Array:
    """Of slope 1 at 0, where jnp.minimum has 1/2."""
    return jnp.where(log_a > 0, 0.0, log_a)


DELTA_RULE = Recurrence(
    sequential=_sequential, chunked=_chunked, one_token=partial(kernels.delta_rule, _one_token)
)
