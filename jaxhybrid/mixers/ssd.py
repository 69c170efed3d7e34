"""State space duality (arXiv:2405.21060): a scalar decay a head and a rank-1 update.

With heads h, group g(h) and decay a_t:
    S_t = a_t S_{t-1} + u_t (outer) b_t        y_t = S_t c_t
The state S is [B, H, P, N]. Mamba-2 and lightning attention are this recurrence.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.kernels import scan
from jaxhybrid.mixers.chunks import apart, cumulative_decay, scan_chunks, scan_tokens
from jaxhybrid.mixers.recurrence import Recurrence

_HIGHEST = lax.Precision.HIGHEST


class Inputs(NamedTuple):
    """All float32, all zero at padding."""

    u: Array  # [B, T, H, P]
    b: Array  # [B, T, G, N]
    c: Array  # [B, T, G, N]
    log_a: Array  # [B, T, H], at most 0


def _sequential(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    del chunk
    per_group = inputs.u.shape[2] // inputs.b.shape[2]

    def token(s: Array, now: Inputs) -> tuple[Array, Array]:
        b, c = (jnp.repeat(g, per_group, axis=1) for g in (now.b, now.c))  # [B, H, N]
        s = jnp.exp(now.log_a)[..., None, None] * s + now.u[..., None] * b[:, :, None]
        return s, jnp.einsum("bhpn,bhn->bhp", s, c, precision=_HIGHEST)

    return scan_tokens(token, state, inputs)


def _one_token(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    """One elementwise pass over the state, then one batched product of the new state with c.

    XLA does the pass in place as long as both readers of the new state take it in the shape it has.
    """
    del chunk
    rows, heads, size, width = state.shape
    groups = inputs.b.shape[2]
    b = jnp.repeat(inputs.b[:, 0], heads // groups, axis=1)  # [B, H, N]
    s = jnp.exp(inputs.log_a)[:, 0, :, None, None] * state + inputs.u[:, 0, ..., None] * b[:, :, None]
    by_group = s.reshape(rows, groups, heads // groups * size, width)
    y = jnp.einsum("bgmn,bgn->bgm", by_group, inputs.c[:, 0], precision=_HIGHEST)
    return y.reshape(rows, 1, heads, size), s


def _chunked(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    """Matrix products inside chunks, a scan over chunks (section 6 of the paper)."""
    rows, heads, size, width = state.shape
    groups = inputs.b.shape[2]
    per_group = heads // groups

    def one_chunk(s: Array, now: Inputs) -> tuple[Array, Array]:  # s: [B, G, R, P, N]
        n = now.u.shape[1]
        causal = jnp.tril(jnp.ones((n, n), bool))
        u = now.u.reshape(rows, n, groups, per_group, size)
        sums = cumulative_decay(now.log_a, 1).reshape(2, rows, n, groups, per_group).transpose(0, 1, 3, 4, 2)
        total = sums[0] + sums[1]  # [B, G, R, n]
        between = jnp.where(causal, apart(sums[..., :, None], sums[..., None, :]), -jnp.inf)
        scores = jnp.einsum("btgn,bsgn->bgts", now.c, now.b, precision=_HIGHEST)
        weights = scores[:, :, None] * jnp.exp(between)  # [B, G, R, t, s]
        y = jnp.einsum("bgrts,bsgrp->btgrp", weights, u, precision=_HIGHEST)
        carried = jnp.einsum("btgn,bgrpn->btgrp", now.c, s, precision=_HIGHEST)
        y = y + jnp.exp(total).transpose(0, 3, 1, 2)[..., None] * carried
        to_end = jnp.exp(apart(sums[..., -1:], sums)).transpose(0, 3, 1, 2)[..., None]
        added = jnp.einsum("bsgrp,bsgn->bgrpn", to_end * u, now.b, precision=_HIGHEST)
        s = jnp.exp(total[..., -1])[..., None, None] * s + added
        return s, y.reshape(rows, n, heads, size)

    start = state.reshape(rows, groups, per_group, size, width)
    y, end = scan_chunks(one_chunk, start, inputs, chunk)
    return y, end.reshape(state.shape)


SSD = Recurrence(
    sequential=_sequential,
    chunked=partial(scan.ssd, _chunked, cumulative_decay),
    one_token=_one_token,
)
