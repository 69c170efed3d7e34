"""Grouped-query attention over whatever memory it is handed."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxhybrid.hparams import AttentionHparams
from jaxhybrid.kernels import attention as kernels
from jaxhybrid.kernels import products
from jaxhybrid.mixers.memory import KeyValues
from jaxhybrid.ops.adapter import adapter_spec, with_adapter
from jaxhybrid.ops.linear import contract, linear
from jaxhybrid.ops.norms import rms_norm
from jaxhybrid.ops.rope import rotate
from jaxhybrid.ops.scale import times
from jaxhybrid.params import Tree, matrix, vector


def spec(hp: AttentionHparams, d_model: int) -> Tree:
    """With a gate for each element, `q` holds [n_heads, 2 head_dim]: a head's query, then its gate."""
    d_in = hp.d_in or d_model
    n_kv = hp.n_kv_heads * hp.head_dim
    widths = {"q": hp.n_heads * hp.head_dim, "k": n_kv, "v": n_kv}
    axes = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    n_queries = widths["q"] * (2 if hp.gate == "element" else 1)
    tree: Tree = {
        "q": matrix(n_queries, d_in, "heads", "embed"),
        "k": matrix(widths["k"], d_in, "kv_heads", "embed"),
        "v": matrix(widths["v"], d_in, "kv_heads", "embed"),
        "out": matrix(d_model, widths["q"], "embed", "heads"),
    }
    if hp.bias:
        tree |= {
            f"{name}_bias": vector(n_queries if name == "q" else widths[name], axes[name]) for name in widths
        }
    if hp.out_bias:
        tree["out_bias"] = vector(d_model, "embed")
    if hp.qk_norm_eps is not None:
        init = "zeros" if hp.qk_norm_offset else "ones"
        sizes = widths if hp.qk_norm_full else {"q": hp.head_dim, "k": hp.head_dim}
        tree |= {f"{name}_norm": vector(sizes[name], None, init) for name in ("q", "k")}
    if hp.gate == "head":
        tree["gate"] = matrix(hp.n_heads, d_in, "heads", "embed")
    return tree


def adapters_spec(hp: AttentionHparams, d_model: int) -> Tree:
    """What `apply` finds beside its own parameters when there are adapters."""
    if hp.adapter_rank is None:
        return {}
    d_in, n_kv = hp.d_in or d_model, hp.n_kv_heads * hp.head_dim
    widths = {"q": hp.n_heads * hp.head_dim, "k": n_kv, "v": n_kv}
    return {f"{name}_adapter": adapter_spec(n, d_in, hp.adapter_rank) for name, n in widths.items()}


def apply(
    p: Tree, x: Array, memory: KeyValues, positions: Array, lengths: Array, hp: AttentionHparams
) -> tuple[Array, KeyValues]:
    """x [B, T, d_in] at positions [B, T] to ([B, T, D], memory after the tokens).

    lengths: real tokens of each row, which the memory knows already.
    """
    del lengths
    rows, n_tokens = x.shape[:2]
    x = times(x, hp.in_multiplier)

    def projected(name: str) -> Array:
        return with_adapter(p, name, x, linear(x, p[name], p.get(f"{name}_bias")))

    def heads(y: Array, name: str, n: int) -> Array:
        if hp.qk_norm_eps is None or name == "v":
            return y.reshape(rows, n_tokens, n, hp.head_dim)
        if not hp.qk_norm_full:
            y = y.reshape(rows, n_tokens, n, hp.head_dim)
        y = rms_norm(y, p[f"{name}_norm"], hp.qk_norm_eps, hp.qk_norm_offset)
        return y.reshape(rows, n_tokens, n, hp.head_dim)

    q, gate = projected("q"), None
    if hp.gate == "element":
        q, gate = jnp.split(q.reshape(rows, n_tokens, hp.n_heads, -1), 2, axis=-1)
        q = q.reshape(rows, n_tokens, -1)
    elif hp.gate == "head":
        gate = linear(x, p["gate"])[..., None]
    q = heads(q, "q", hp.n_heads)
    k = heads(times(projected("k"), hp.key_multiplier), "k", hp.n_kv_heads)
    v = heads(projected("v"), "v", hp.n_kv_heads)
    if hp.rope is not None:
        q, k = rotate(q, positions, hp.rope), rotate(k, positions, hp.rope)
    keys, values, sight, memory = memory.extend(k, v)
    y = kernels.attend(attend, q, keys, values, sight, hp.scale)
    if gate is not None:
        y = y * jax.nn.sigmoid(gate)
    y = linear(y.reshape(rows, n_tokens, -1), p["out"], p.get("out_bias"))
    return times(y, hp.out_multiplier), memory


def attend(q: Array, keys: Array, values: Array, mask: Array, scale: float) -> Array:
    """softmax(scale q k) v in float32, head h of q using K/V head h // (H / KV heads).

    q: [B, T, H, K]. keys, values: [B or 1, KV heads, S, K]. mask: bool [B, T, S]; a query that sees
    nothing gets a finite, meaningless answer. Returns [B, T, H, K] in the dtype of q.
    """
    return weighted_values(scores_of(q, keys), values, mask, scale)


def scores_of(q: Array, keys: Array) -> Array:
    """q [B, T, H, K] times keys [B or 1, KV heads, S, K]: float32 [B, KV heads, H / KV heads, T, S]."""
    rows, n_tokens, n_heads, size = q.shape
    n_kv = keys.shape[1]
    q = q.reshape(rows, n_tokens, n_kv, n_heads // n_kv, size).transpose(0, 2, 3, 1, 4)
    shape = q.shape[:4]
    # one batch dimension, cells on the right: else XLA's CPU compiler transposes all keys
    q, keys_by_head = _by_head(q, keys), keys.reshape(-1, *keys.shape[2:])
    scores = products.multiply(partial(contract, "nqd,nsd->nqs"), q, keys_by_head)
    return _by_row(scores, keys, shape)


def weighted_values(scores: Array, values: Array, mask: Array, scale: float) -> Array:
    """softmax(scale scores) over the cells of mask [B, T, S] times values [B or 1, KV heads, S, V].

    scores: as `scores_of` gives them. Returns [B, T, H, V] in the dtype of the values.
    """
    rows, n_kv, per_kv, n_tokens, _ = scores.shape
    # select, never add: what lies in an unused cell must not matter, not even NaN
    scores = jnp.where(mask[:, None, None], scores * scale, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    y = contract("nqs,nsd->nqd", _by_head(weights, values), values.reshape(-1, *values.shape[2:]))
    y = _by_row(y, values, weights.shape[:4]).transpose(0, 3, 1, 2, 4)
    return y.astype(values.dtype).reshape(rows, n_tokens, n_kv * per_kv, values.shape[-1])


def _by_head(x: Array, cells: Array) -> Array:
    """x [B, KV heads, ...] to one matrix for each head of the cells [B or 1, KV heads, ...]."""
    if cells.shape[0] == 1 and len(x) > 1:
        x = x.swapaxes(0, 1)
    return x.reshape(cells.shape[0] * cells.shape[1], -1, x.shape[-1])


def _by_row(y: Array, cells: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_by_head`: y to [*shape, ...], shape beginning with B, KV heads."""
    if cells.shape[0] == 1 and shape[0] > 1:
        return y.reshape(shape[1], shape[0], *shape[2:], y.shape[-1]).swapaxes(0, 1)
    return y.reshape(*shape, y.shape[-1])
