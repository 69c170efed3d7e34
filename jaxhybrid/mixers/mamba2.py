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
from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recent import with_recent_states
from jaxhybrid.ops.causal_conv import causal_conv
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.norms import grouped_rms_norm
from jaxhybrid.params import TensorSpec, Tree, matrix, vector

_HIGHEST = lax.Precision.HIGHEST
_NO_TRACE = -110.0  # exp of it is 0 in float32


class Inputs(NamedTuple):
    """What the recurrence consumes, all float32 and already inert at padding (dt = 0)."""

    x: Array  # [B, T, H, P]
    b: Array  # [B, T, G, N]
    c: Array  # [B, T, G, N]
    dt: Array  # [B, T, H]
    log_a: Array  # [B, T, H], at most 0


Form = Callable[[Inputs, Array, Mamba2Hparams], tuple[Array, Array]]


def spec(hp: Mamba2Hparams, d_model: int) -> Tree:
    inner, channels = hp.d_inner, hp.conv_channels
    tree: Tree = {
        "in_proj": matrix(inner + channels + hp.n_heads, d_model, "mamba_inner", "embed"),
        "conv": TensorSpec((channels, hp.conv_kernel), ("mamba_inner", None), fan_in=hp.conv_kernel),
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
    memory: States,
    lengths: Array,
    hp: Mamba2Hparams,
    form: Form | None = None,
) -> tuple[Array, States]:
    """x [B, T, D], real tokens lengths [B] first in each row, to (y [B, T, D], memory after them).

    memory: states "conv" [., K-1, C] and "ssm" [., H, P, N]. `form` is one of sequential, chunked,
    one_token; by default one_token for T = 1, else chunked. All three agree to float32 rounding.
    """
    rows, n_tokens, n_states = x.shape[0], x.shape[1], memory.n_states
    inner, channels, groups = hp.d_inner, hp.conv_channels, hp.n_groups * hp.state_size
    projected = linear(x, p["in_proj"], p.get("in_bias"))
    z, xbc, dt = jnp.split(projected, [inner, inner + channels], axis=-1)

    def convolve(history: Array, new: tuple[Array, Array]) -> tuple[Array, Array]:
        return causal_conv(new[0], history, new[1], p["conv"], p.get("conv_bias"), n_states)

    xbc, memory = memory.advance("conv", convolve, (xbc, lengths))
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
    chosen = form or (one_token if n_tokens == 1 else chunked)

    def recur(ssm: Array, new: tuple[Inputs, Array]) -> tuple[Array, Array]:
        ssm, (tokens, real) = ssm.astype(jnp.float32), new
        if n_states == 1:
            return chosen(tokens, ssm, hp)
        many, one = (lambda t, s, f=f: f(t, s, hp) for f in (chosen, one_token))
        return with_recent_states(many, one, tokens, ssm, real, n_states)

    y, memory = memory.advance("ssm", recur, (inputs, lengths))
    y = y + p["d"].astype(jnp.float32)[:, None] * inputs.x
    y = y.reshape(rows, n_tokens, inner) * jax.nn.silu(z.astype(jnp.float32))
    y = grouped_rms_norm(y, p["norm"], hp.n_groups, hp.norm_eps).astype(x.dtype)
    return linear(y, p["out"], p.get("out_bias")), memory


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
    """T = 1: one elementwise pass over the state, then one batched product of the new state with C.

    XLA does the pass in place as long as both readers of the new state take it in the shape it has.
    """
    rows, per_group = ssm.shape[0], hp.n_heads // hp.n_groups
    b = jnp.repeat(inputs.b[:, 0], per_group, axis=1)  # [B, H, N]
    dx = (inputs.dt[..., None] * inputs.x)[:, 0]  # [B, H, P]
    s = jnp.exp(inputs.log_a)[:, 0, :, None, None] * ssm + dx[..., None] * b[:, :, None]
    by_group = s.reshape(rows, hp.n_groups, per_group * hp.head_dim, hp.state_size)
    y = jnp.einsum("bgmn,bgn->bgm", by_group, inputs.c[:, 0], precision=_HIGHEST)
    return y.reshape(rows, 1, hp.n_heads, hp.head_dim), s


def chunked(inputs: Inputs, ssm: Array, hp: Mamba2Hparams) -> tuple[Array, Array]:
    """Matrix products inside chunks of `hp.chunk` tokens, a scan over chunks (section 6 of the paper).

    A decay from s to t is exp of a difference of cumulative log decays. Rounding in long sums would drown
    weak decays that follow strong ones, so the sums are kept in two parts: multiples of 1/64, which
    float32 adds exactly, and the rest, which stays small.
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
        log_a = jnp.maximum(now.log_a, _NO_TRACE)
        coarse = lax.stop_gradient(jnp.round(log_a * 64) / 64)
        parts = jnp.cumsum(jnp.stack([coarse, log_a - coarse]), axis=2)
        parts = parts.reshape(2, rows, size, hp.n_groups, per_group).transpose(0, 1, 3, 4, 2)
        total = parts[0] + parts[1]  # [B, G, R, size]
        apart = parts[..., :, None] - parts[..., None, :]
        between = jnp.where(causal, apart[0] + apart[1], -jnp.inf)
        scores = jnp.einsum("btgn,bsgn->bgts", now.c, now.b, precision=_HIGHEST)
        weights = scores[:, :, None] * jnp.exp(between)  # [B, G, R, t, s]
        y = jnp.einsum("bgrts,bsgrp->btgrp", weights, u, precision=_HIGHEST)
        carried = jnp.einsum("btgn,bgrpn->btgrp", now.c, s, precision=_HIGHEST)
        y = y + jnp.exp(total).transpose(0, 3, 1, 2)[..., None] * carried
        to_end = jnp.exp(jnp.sum(parts[..., -1:] - parts, axis=0)).transpose(0, 3, 1, 2)[..., None]
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
