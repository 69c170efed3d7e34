"""Mamba-2 (arXiv:2405.21060): a convolution, then state space duality with decay exp(-exp(A_log) dt).

u_t = dt_t x_t      y_t = S_t C_t + D x_t      out = W_out RMS_group(y silu(z))
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.hparams import Mamba2Hparams
from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recurrence import convolve, recur, valid_tokens
from jaxhybrid.mixers.ssd import SSD, Inputs
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.norms import grouped_rms_norm
from jaxhybrid.ops.scale import times
from jaxhybrid.params import TensorSpec, Tree, matrix, vector


def spec(hp: Mamba2Hparams, d_model: int) -> Tree:
    inner, channels = hp.d_inner, hp.conv_channels
    tree: Tree = {
        "in_proj": matrix(inner + channels + hp.n_heads, d_model, "mamba_inner", "embed"),
        "conv": TensorSpec((channels, hp.conv_kernel), ("mamba_inner", None), fan_in=hp.conv_kernel),
        "a_log": vector(hp.n_heads, "mamba_heads", "a_log"),
        "dt_bias": vector(hp.n_heads, "mamba_heads", "dt_bias"),
        "d": vector(hp.n_heads, "mamba_heads", "ones"),
        "out": matrix(d_model, inner, "embed", "mamba_inner"),
    }
    if hp.gated_norm is not None:
        tree["norm"] = vector(inner, "mamba_inner", "ones")
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
    positions: Array,
    lengths: Array,
    hp: Mamba2Hparams,
    form: str | None = None,
) -> tuple[Array, States]:
    """x [B, T, D], real tokens lengths [B] first in each row, to (y [B, T, D], memory after them).

    memory: states "conv" [., K-1, C] and "ssm" [., H, P, N]. positions do not matter. form: see `recur`.
    """
    del positions
    rows, n_tokens = x.shape[:2]
    inner, channels, groups = hp.d_inner, hp.conv_channels, hp.n_groups * hp.state_size
    projected = linear(times(x, hp.in_multiplier), p["in_proj"], p.get("in_bias"))
    if hp.multipliers is not None:
        widths = (inner, inner, groups, groups, hp.n_heads)
        projected = projected * jnp.asarray(np.repeat(hp.multipliers, widths), projected.dtype)
    z, xbc, dt = jnp.split(projected, [inner, inner + channels], axis=-1)
    xbc, memory = convolve(memory, xbc, lengths, p["conv"], p.get("conv_bias"))
    xbc = jax.nn.silu(xbc.astype(jnp.float32))
    u, b, c = jnp.split(xbc, [inner, inner + groups], axis=-1)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + p["dt_bias"].astype(jnp.float32))
    if hp.dt_floor is not None and n_tokens > 1:
        dt = jnp.maximum(dt, hp.dt_floor)
    dt = jnp.clip(dt, hp.dt_min, hp.dt_max)
    # padding is inert: decay 1, input 0 (after softplus and clip, or it would still decay)
    dt = jnp.where(valid_tokens(n_tokens, lengths)[:, :, None], dt, 0.0)
    u = u.reshape(rows, n_tokens, hp.n_heads, hp.head_dim)
    inputs = Inputs(
        u=dt[..., None] * u,
        b=b.reshape(rows, n_tokens, hp.n_groups, hp.state_size),
        c=c.reshape(rows, n_tokens, hp.n_groups, hp.state_size),
        log_a=-jnp.exp(p["a_log"].astype(jnp.float32)) * dt,
    )
    y, memory = recur(memory, "ssm", SSD, inputs, lengths, hp.chunk, form)
    y = (y + p["d"].astype(jnp.float32)[:, None] * u).reshape(rows, n_tokens, inner)
    gate = jax.nn.silu(z.astype(jnp.float32))
    if hp.gated_norm != "before":
        y = y * gate
    if hp.gated_norm is not None:
        y = grouped_rms_norm(y, p["norm"], hp.n_groups, hp.norm_eps)
    if hp.gated_norm == "before":
        y = y * gate
    y = linear(y.astype(x.dtype), p["out"], p.get("out_bias"))
    return times(y, hp.out_multiplier), memory
