"""Mamba-2 (state space duality, arXiv:2405.21060): sequential definition, chunked form, one token.

With heads h, group g(h), decay a_t = exp(-exp(A_log) dt_t):
    S_t = a_t S_{t-1} + dt_t x_t (outer) B_t        y_t = S_t C_t + D x_t
The state S is [B, H, P, N] in float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.hparams import Mamba2Hparams
from jaxhybrid.ops.causal_conv import causal_conv
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.norms import grouped_rms_norm
from jaxhybrid.params import TensorSpec, Tree, matrix, vector

State = dict[str, Array]
_HIGHEST = lax.Precision.HIGHEST


class Inputs(NamedTuple):
    """What the recurrence consumes, all float32 and already inert at padding (dt = 0)."""

    x: Array  # [B, T, H, P]
    b: Array  # [B, T, G, N]
    c: Array  # [B, T, G, N]
    dt: Array  # [B, T, H]
    log_a: Array  # [B, T, H], at most 0


def spec(hp: Mamba2Hparams, d_model: int) -> Tree:
    inner, channels = hp.d_inner, hp.conv_channels
    tree: Tree = {
        "in_proj": matrix(inner + channels + hp.n_heads, d_model, "mamba_inner", "embed"),
        "conv": TensorSpec(
            (channels, hp.conv_kernel), ("mamba_inner", None), fan_in=hp.conv_kernel
        ),
        "a_log": vector(hp.n_heads, "mamba_heads", "a_log"),
        "dt_bias": vector(hp.n_heads, "mamba_heads", "dt_bias"),
        "d": vector(hp.n_heads, "mamba_heads", "ones"),
        "norm": vector(inner, "mamba_inner", "ones"),
        "out": matrix(d_model, inner, "embed", "mamba_inner"),
    }
    if hp.conv_bias:
        tree["conv_bias"] = vector(channels, "mamba_inner")
    if hp.bias:
        tree["in_bias"] = vector(inner + channels + hp.n_heads, "mamba_inner")
        tree["out_bias"] = vector(d_model, "embed")
    return tree


def apply(
    p: Tree,
    x: Array,
    state: State,
    lengths: Array,
    hp: Mamba2Hparams,
    form: Callable[..., tuple[Array, Array]] | None = None,
) -> tuple[Array, State]:
    """x [B, T, D], real tokens lengths [B] first in each row, to (y [B, T, D], state after them).

    state: {"conv": [B, K-1, C], "ssm": [B, H, P, N]}. `form` is one of sequential, chunked,
    one_token; by default one_token for T = 1, else chunked. All three agree to float32 rounding.
    """
    rows, n_tokens = x.shape[:2]
    inner, channels, groups = hp.d_inner, hp.conv_channels, hp.n_groups * hp.state_size
    projected = linear(x, p["in_proj"], p.get("in_bias"))
    z, xbc, dt = jnp.split(projected, [inner, inner + channels], axis=-1)
    xbc, conv = causal_conv(xbc, state["conv"], lengths, p["conv"], p.get("conv_bias"))
    xbc = jax.nn.silu(xbc.astype(jnp.float32))
    u, b, c = jnp.split(xbc, [inner, inner + groups], axis=-1)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + p["dt_bias"].astype(jnp.float32))
    dt = jnp.clip(dt, hp.dt_min, hp.dt_max)
    # padding is inert: decay 1, input 0 (after softplus and clip, or it would still decay)
    valid = jnp.arange(n_tokens) < lengths[:, None]
    dt = jnp.where(valid[:, :, None], dt, 0.0)
    inputs = Inputs(
        x=u.reshape(rows, n_tokens, hp.n_heads, hp.head_dim),
        b=b.reshape(rows, n_tokens, hp.n_groups, hp.state_size),
        c=c.reshape(rows, n_tokens, hp.n_groups, hp.state_size),
        dt=dt,
        log_a=-jnp.exp(p["a_log"].astype(jnp.float32)) * dt,
    )
    if form is None:
        form = one_token if n_tokens == 1 else chunked
    y, ssm = form(inputs, state["ssm"].astype(jnp.float32), hp)
    y = y + p["d"].astype(jnp.float32)[:, None] * inputs.x
    y = y.reshape(rows, n_tokens, inner) * jax.nn.silu(z.astype(jnp.float32))
    y = grouped_rms_norm(y, p["norm"], hp.n_groups, hp.norm_eps).astype(x.dtype)
    new_state = {"conv": conv, "ssm": ssm.astype(state["ssm"].dtype)}
    return linear(y, p["out"], p.get("out_bias")), new_state


def sequential(inputs: Inputs, ssm: Array, hp: Mamba2Hparams) -> tuple[Array, Array]:
    """The definition, token after token. Returns (S C of every token [B, T, H, P], last state)."""
    per_group = hp.n_heads // hp.n_groups

    def token(s: Array, now: Inputs) -> tuple[Array, Array]:
        b, c = (jnp.repeat(g, per_group, axis=1) for g in (now.b, now.c))  # [B, H, N]
        update = (now.dt[..., None] * now.x)[..., None] * b[:, :, None]
        s = jnp.exp(now.log_a)[..., None, None] * s + update
        return s, jnp.einsum("bhpn,bhn->bhp", s, c, precision=_HIGHEST)

    ssm, y = lax.scan(token, ssm, jax.tree.map(lambda t: t.swapaxes(0, 1), inputs))
    return y.swapaxes(0, 1), ssm


def one_token(inputs: Inputs, ssm: Array, hp: Mamba2Hparams) -> tuple[Array, Array]:
    """T = 1. y = a (S C) + dt x (B . C) needs the old state only, so one pass over it serves both."""
    rows = ssm.shape[0]
    grouped = (rows, hp.n_groups, hp.n_heads // hp.n_groups)
    s = ssm.reshape(*grouped, hp.head_dim, hp.state_size)
    b, c = inputs.b[:, 0], inputs.c[:, 0]  # [B, G, N]
    a = jnp.exp(inputs.log_a).reshape(*grouped, 1)
    dx = (inputs.dt[..., None] * inputs.x).reshape(*grouped, hp.head_dim)
    y = a * jnp.einsum("bgrpn,bgn->bgrp", s, c, precision=_HIGHEST)
    y = y + dx * jnp.sum(b * c, axis=-1)[:, :, None, None]
    s = a[..., None] * s + dx[..., None] * b[:, :, None, None]
    return y.reshape(rows, 1, hp.n_heads, hp.head_dim), s.reshape(ssm.shape)


def chunked(inputs: Inputs, ssm: Array, hp: Mamba2Hparams) -> tuple[Array, Array]:
    """Matrix products inside chunks of `hp.chunk` tokens, a scan over chunks (section 6 of the paper).

    Decays inside a chunk are exp of differences of cumulative log decays, all at most 0.
    """
    rows, n_tokens = inputs.x.shape[:2]
    size = min(hp.chunk, n_tokens)
    n_chunks = -(-n_tokens // size)
    per_group = hp.n_heads // hp.n_groups

    def chunks(
        t: Array,
    ) -> Array:  # [B, T, ...] to [chunks, B, size, ...]; dt = 0 makes padding inert
        padding = [(0, 0), (0, n_chunks * size - n_tokens)] + [(0, 0)] * (t.ndim - 2)
        t = jnp.pad(t, padding).reshape(rows, n_chunks, size, *t.shape[2:])
        return t.swapaxes(0, 1)

    causal = jnp.tril(jnp.ones((size, size), bool))

    def chunk(s: Array, now: Inputs) -> tuple[Array, Array]:  # s: [B, G, R, P, N]
        u = (now.dt[..., None] * now.x).reshape(rows, size, hp.n_groups, per_group, hp.head_dim)
        total = jnp.cumsum(now.log_a, axis=1).reshape(rows, size, hp.n_groups, per_group)
        total = total.transpose(0, 2, 3, 1)  # [B, G, R, size]
        between = jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf)
        scores = jnp.einsum("btgn,bsgn->bgts", now.c, now.b, precision=_HIGHEST)
        weights = scores[:, :, None] * jnp.exp(between)  # [B, G, R, t, s]
        y = jnp.einsum("bgrts,bsgrp->btgrp", weights, u, precision=_HIGHEST)
        carried = jnp.einsum("btgn,bgrpn->btgrp", now.c, s, precision=_HIGHEST)
        y = y + jnp.exp(total).transpose(0, 3, 1, 2)[..., None] * carried
        to_end = jnp.exp(total[..., -1:] - total).transpose(0, 3, 1, 2)[..., None]
        added = jnp.einsum("bsgrp,bsgn->bgrpn", to_end * u, now.b, precision=_HIGHEST)
        s = jnp.exp(total[..., -1])[..., None, None] * s + added
        return s, y.reshape(rows, size, hp.n_heads, hp.head_dim)

    start = ssm.reshape(rows, hp.n_groups, per_group, hp.head_dim, hp.state_size)
    packed = jax.tree.map(chunks, inputs)
    if n_chunks == 1:
        s, y = chunk(start, jax.tree.map(lambda t: t[0], packed))
        return y, s.reshape(ssm.shape)
    s, y = lax.scan(chunk, start, packed)
    y = y.swapaxes(0, 1).reshape(rows, n_chunks * size, hp.n_heads, hp.head_dim)
    return y[:, :n_tokens], s.reshape(ssm.shape)
