"""Grouped-query attention over whatever memory it is handed."""

from __future__ import annotations

from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxhybrid.hparams import AttentionHparams
from jaxhybrid.ops.linear import linear, precision_of
from jaxhybrid.ops.rope import rotate
from jaxhybrid.params import Tree, matrix, vector

Memory = TypeVar("Memory", bound="KeyValueMemory")


class KeyValueMemory(Protocol):
    """What an attention layer needs of its memory; a cache provides one, `Causal` is one without."""

    def extend(self: Memory, keys: Array, values: Array) -> tuple[Array, Array, Array, Memory]:
        """Remember keys and values [B, T, KV heads, head size] of the new tokens.

        Returns everything the queries may look at: keys and values [R, KV heads, S, head size] with R
        either B or 1 (shared by all rows), a boolean mask [B, T, S], and the memory after the tokens.
        """
        ...


class Causal(struct.PyTreeNode):
    """No memory: the tokens at hand attend to themselves. positions and valid: [B, T]."""

    valid: Array

    def extend(self, keys: Array, values: Array) -> tuple[Array, Array, Array, Causal]:
        n_tokens = keys.shape[1]
        causal = jnp.tril(jnp.ones((n_tokens, n_tokens), bool))
        mask = causal & self.valid[:, None, :]
        return keys.swapaxes(1, 2), values.swapaxes(1, 2), mask, self


def spec(hp: AttentionHparams, d_model: int) -> Tree:
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
    return tree


def apply(
    p: Tree, x: Array, memory: Memory, positions: Array, hp: AttentionHparams
) -> tuple[Array, Memory]:
    """x [B, T, D] at positions [B, T] to ([B, T, D], memory after the tokens)."""
    rows, n_tokens = x.shape[:2]

    def heads(name: str, n: int) -> Array:
        y = linear(x, p[name], p.get(f"{name}_bias"))
        return y.reshape(rows, n_tokens, n, hp.head_dim)

    q, k, v = heads("q", hp.n_heads), heads("k", hp.n_kv_heads), heads("v", hp.n_kv_heads)
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
    if shared:
        scores = jnp.einsum("bthgd,hsd->bhgts", q, keys[0], **options)
    else:
        scores = jnp.einsum("bthgd,bhsd->bhgts", q, keys, **options)
    # select, never add: what lies in an unused cell must not matter, not even NaN
    scores = jnp.where(mask[:, None, None], scores * scale, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if shared:
        y = jnp.einsum("bhgts,hsd->bthgd", weights, values[0], **options)
    else:
        y = jnp.einsum("bhgts,bhsd->bthgd", weights, values, **options)
    return y.astype(q.dtype).reshape(rows, n_tokens, n_heads, size)
