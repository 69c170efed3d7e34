"""Lightning attention (arXiv:2401.04658), as MiniMax-01 (arXiv:2501.08313) has it.

S_t = exp(-slope_h) S_{t-1} + v_t (outer) k_t      o_t = S_t q_t      q, k, v = silu(W x)
out = W_out (RMS(o) sigmoid(W_gate x))
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxhybrid.hparams import LightningHparams
from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recurrence import recur, valid_tokens
from jaxhybrid.mixers.ssd import SSD, Inputs
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.norms import rms_norm
from jaxhybrid.params import Tree, matrix, vector


def spec(hp: LightningHparams, d_model: int) -> Tree:
    """`qkv` holds [n_heads, 3 head_dim]: a head's q, k and v."""
    inner = hp.n_heads * hp.head_dim
    return {
        "qkv": matrix(3 * inner, d_model, "heads", "embed"),
        "gate": matrix(inner, d_model, "heads", "embed"),
        "norm": vector(inner, "heads", "ones"),
        "out": matrix(d_model, inner, "embed", "heads"),
    }


def apply(
    p: Tree,
    x: Array,
    memory: States,
    positions: Array,
    lengths: Array,
    hp: LightningHparams,
    form: str | None = None,
) -> tuple[Array, States]:
    """x [B, T, D], real tokens lengths [B] first in each row, to (y [B, T, D], memory after them).

    memory: state "kv" [., H, value size, key size]. positions do not matter. form: see `recur`.
    """
    del positions
    rows, n_tokens = x.shape[:2]
    qkv = jax.nn.silu(linear(x, p["qkv"]).astype(jnp.float32))
    valid = valid_tokens(n_tokens, lengths)[:, :, None]
    qkv = jnp.where(valid, qkv, 0.0).reshape(rows, n_tokens, hp.n_heads, 3 * hp.head_dim)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    log_a = jnp.where(valid, -jnp.asarray(hp.slopes, jnp.float32), 0.0)
    y, memory = recur(memory, "kv", SSD, Inputs(u=v, b=k, c=q, log_a=log_a), lengths, hp.chunk, form)
    y = rms_norm(y.reshape(rows, n_tokens, -1), p["norm"], hp.norm_eps)
    y = y * jax.nn.sigmoid(linear(x, p["gate"]).astype(jnp.float32))
    return linear(y.astype(x.dtype), p["out"]), memory
