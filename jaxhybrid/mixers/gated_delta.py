"""Gated delta net (arXiv:2412.06464) and Kimi delta attention (arXiv:2510.26692).

A convolution over [q | k | v], then the gated delta rule with q and k of length 1 (q / sqrt(K)) and
    log decay -exp(A_log) softplus(f + dt_bias), or bound * sigmoid(exp(A_log) (f + dt_bias)) where it is
    bounded ("safe"), f projected from the input;  beta = scale * sigmoid(W_b x)
    out = W_out (RMS(o) act(gate)), norm before gate, head by head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.hparams import GatedDeltaHparams
from jaxhybrid.mixers.delta_rule import DELTA_RULE, Inputs
from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recurrence import convolve, recur, valid_tokens
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.norms import l2_norm, rms_norm
from jaxhybrid.params import TensorSpec, Tree, matrix, vector


def spec(hp: GatedDeltaHparams, d_model: int) -> Tree:
    """`in_proj` stacks q, k, v, gate, beta and decay; see `GatedDeltaHparams.projections`."""
    tree: Tree = {
        "in_proj": matrix(sum(hp.projections), d_model, "heads", "embed"),
        "conv": TensorSpec((hp.conv_channels, hp.conv_kernel), ("heads", None), fan_in=hp.conv_kernel),
        "a_log": vector(hp.n_heads, "heads", "a_log"),
        "dt_bias": vector(hp.decays, "heads", "dt_bias"),
        "norm": vector(hp.value_dim, None, "ones"),
        "out": matrix(d_model, hp.values, "embed", "heads"),
    }
    if hp.gate_rank is not None:
        tree["gate_up"] = matrix(hp.values, hp.gate_rank, "heads", None)
    if hp.decay_rank is not None:
        tree["decay_up"] = matrix(hp.decays, hp.decay_rank, "heads", None)
    return tree


def apply(
    p: Tree,
    x: Array,
    memory: States,
    positions: Array,
    lengths: Array,
    hp: GatedDeltaHparams,
    form: str | None = None,
) -> tuple[Array, States]:
    """x [B, T, D], real tokens lengths [B] first in each row, to (y [B, T, D], memory after them).

    memory: states "conv" [., taps-1, C] and "delta" [., H, K, V]. positions do not matter. form: see `recur`.
    """
    del positions
    rows, n_tokens = x.shape[:2]
    keys, heads = hp.keys, (rows, n_tokens, hp.n_heads)
    widths = (hp.conv_channels, *hp.projections[3:])
    qkv, gate, beta, decay = jnp.split(linear(x, p["in_proj"]), np.cumsum(widths)[:-1], axis=-1)
    if hp.gate_rank is not None:
        gate = linear(gate, p["gate_up"])
    if hp.decay_rank is not None:
        decay = linear(decay, p["decay_up"])
    qkv, memory = convolve(memory, qkv, lengths, p["conv"], None)
    # padding is inert: nothing is written, nothing decays
    valid = valid_tokens(n_tokens, lengths)[:, :, None]
    qkv = jnp.where(valid, jax.nn.silu(qkv.astype(jnp.float32)), 0.0)
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    q, k = (l2_norm(t.reshape(rows, n_tokens, hp.n_key_heads, hp.key_dim)) for t in (q, k))
    beta = jnp.where(valid, hp.beta_scale * jax.nn.sigmoid(beta.astype(jnp.float32)), 0.0)
    log_a = jnp.where(valid, _log_decay(p, decay.astype(jnp.float32), hp), 0.0)
    inputs = Inputs(
        q=q * hp.key_dim**-0.5,
        k=k,
        v=v.reshape(*heads, hp.value_dim),
        log_a=log_a if hp.decay == "head" else log_a.reshape(*heads, hp.key_dim),
        beta=beta,
    )
    y, memory = recur(memory, "delta", DELTA_RULE, inputs, lengths, hp.chunk, form)
    act = jax.nn.silu if hp.gate == "silu" else jax.nn.sigmoid
    gate = act(gate.astype(jnp.float32)).reshape(y.shape)
    y = rms_norm(y, p["norm"], hp.norm_eps) * gate
    return linear(y.reshape(rows, n_tokens, -1).astype(x.dtype), p["out"]), memory


def _log_decay(p: Tree, f: Array, hp: GatedDeltaHparams) -> Array:
    """float32 [B, T, decays], at most 0."""
    rate = jnp.exp(p["a_log"].astype(jnp.float32))
    rate = jnp.repeat(rate, hp.decays // hp.n_heads)
    f = f + p["dt_bias"].astype(jnp.float32)
    if hp.decay == "safe_channel":
        return hp.decay_bound * jax.nn.sigmoid(rate * f)
    return -rate * jax.nn.softplus(f)
