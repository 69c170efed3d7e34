"""Grouped-query attention over whatever memory it is handed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxhybrid.hparams import AttentionHparams
from jaxhybrid.mixers.memory import KeyValues
from jaxhybrid.ops.linear import linear, precision_of
from jaxhybrid.ops.norms import rms_norm
from jaxhybrid.ops.rope import rotate
from jaxhybrid.params import Tree, matrix, vector


def spec(hp: AttentionHparams, d_model: int, norm: str = "ones") -> Tree:
    """norm: how weights of norms are initialised, which depends on what is added to them."""
    tree: Tree = {
        "q": matrix(hp.n_heads * hp.head_dim, d_model, "heads", "embed"),
        "k": matrix(hp.n_kv_heads * hp.head_dim, d_model, "kv_heads", "embed"),
        "v": matrix(hp.n_kv_heads * hp.head_dim, d_model, "kv_heads", "embed"),
        "out": matrix(d_model, hp.n_heads * hp.head_dim, "embed", "heads"),
    }
    if hp.bias:
        tree |= {
            "q_bias": vector(hp.n_heads * hp.head_dim, "heads"),
            "k_bias": vector(hp.n_kv_heads * hp.head_dim, "kv_heads"),
            "v_bias": vector(hp.n_kv_heads * hp.head_dim, "kv_heads"),
        }
    if hp.out_bias:
        tree["out_bias"] = vector(d_model, "embed")
    if hp.qk_norm_eps is not None:
        tree |= {"q_norm": vector(hp.head_dim, None, norm), "k_norm": vector(hp.head_dim, None, norm)}
    return tree


def apply(
    p: Tree,
    x: Array,
    memory: KeyValues,
    positions: Array,
    hp: AttentionHparams,
    norm_offset: float = 0.0,
) -> tuple[Array, KeyValues]:
    """x [B, T, D] at positions [B, T] to ([B, T, D], memory after the tokens).

    norm_offset: added to the weights of the norms of q and k, where there are any.
    """
    rows, n_tokens = x.shape[:2]

    def heads(name: str, n: int) -> Array:
        y = linear(x, p[name], p.get(f"{name}_bias"))
        return y.reshape(rows, n_tokens, n, hp.head_dim)

    q, k, v = heads("q", hp.n_heads), heads("k", hp.n_kv_heads), heads("v", hp.n_kv_heads)
    if hp.qk_norm_eps is not None:
        q = rms_norm(q, p["q_norm"], hp.qk_norm_eps, norm_offset)
        k = rms_norm(k, p["k_norm"], hp.qk_norm_eps, norm_offset)
    if hp.rope is not None:
        q, k = rotate(q, positions, hp.rope), rotate(k, positions, hp.rope)
    keys, values, mask, memory = memory.extend(k, v)
    y = attend(q, keys.astype(q.dtype), values.astype(q.dtype), mask, hp.scale)
    return linear(y.reshape(rows, n_tokens, -1), p["out"], p.get("out_bias")), memory


def attend(q: Array, keys: Array, values: Array, mask: Array, scale: float) -> Array:
    """softmax(scale q k) v in float32, head h of q using K/V head h // (H / KV heads).

    q: [B, T, H, K]. keys, values: [B or 1, KV heads, S, K]. mask: bool [B, T, S]; a query that sees
    nothing gets a finite, meaningless answer. Returns [B, T, H, K] in the dtype of q.
    """
    rows, n_tokens, n_heads, size = q.shape
    shared, n_kv = keys.shape[0] == 1 and rows > 1, keys.shape[1]
    q = q.reshape(rows, n_tokens, n_kv, n_heads // n_kv, size)
    options = {"precision": precision_of(q.dtype), "preferred_element_type": jnp.float32}
    cells = "hsd" if shared else "bhsd"
    k, v = (keys[0], values[0]) if shared else (keys, values)
    if n_tokens == 1:
        # keys on the left are read as they lie; on the right XLA's CPU compiler transposes all of them
        scores = jnp.einsum(f"{cells},bthgd->bhsgt", k, q, **options).transpose(0, 1, 3, 4, 2)
    else:
        scores = jnp.einsum(f"bthgd,{cells}->bhgts", q, k, **options)
    # select, never add: what lies in an unused cell must not matter, not even NaN
    scores = jnp.where(mask[:, None, None], scores * scale, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    y = jnp.einsum(f"bhgts,{cells}->bthgd", weights, v, **options)
    return y.astype(q.dtype).reshape(rows, n_tokens, n_heads, size)
