"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), over a memory of latents.

A token stores one normed latent c and one key part r shared by all heads. With W_k, W_v a head's maps out of
the latent, its score is q_n W_k c + q_r r and its output W_v (sum of weighted c). Many queries expand the
latents into keys and values first (`expanded`), few move into the latent space (`absorbed`): the same sums.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array

from jaxhybrid.hparams import MlaHparams
from jaxhybrid.mixers.attention import scores_of, weighted_values
from jaxhybrid.mixers.memory import KeyValues
from jaxhybrid.ops.linear import contract, linear
from jaxhybrid.ops.norms import rms_norm
from jaxhybrid.ops.rope import rotate
from jaxhybrid.params import TensorSpec, Tree, matrix, vector

Form = Callable[[Array, Array, Array, Array, Array, Array, MlaHparams], Array]


def spec(hp: MlaHparams, d_model: int) -> Tree:
    """`kv_up` holds a head's keys, then its values."""
    queries = hp.n_heads * (hp.nope_dim + hp.rope_dim)
    up = (hp.n_heads, hp.nope_dim + hp.value_dim, hp.kv_rank)
    tree: Tree = {
        "kv_down": matrix(hp.kv_rank + hp.rope_dim, d_model, None, "embed"),
        "kv_norm": vector(hp.kv_rank, None, "ones"),
        "kv_up": TensorSpec(up, ("heads", None, None), fan_in=hp.kv_rank),
        "out": matrix(d_model, hp.n_heads * hp.value_dim, "embed", "heads"),
    }
    if hp.q_rank is None:
        tree["q"] = matrix(queries, d_model, "heads", "embed")
    else:
        tree |= {
            "q_down": matrix(hp.q_rank, d_model, None, "embed"),
            "q_norm": vector(hp.q_rank, None, "ones"),
            "q_up": matrix(queries, hp.q_rank, "heads", None),
        }
    if hp.gate:
        tree["gate"] = matrix(hp.n_heads, d_model, "heads", "embed")
    return tree


def apply(
    p: Tree,
    x: Array,
    memory: KeyValues,
    positions: Array,
    lengths: Array,
    hp: MlaHparams,
    form: Form | None = None,
) -> tuple[Array, KeyValues]:
    """x [B, T, D] at positions [B, T] to ([B, T, D], memory after the tokens).

    lengths: real tokens of each row, which the memory knows already. form: `expanded` or `absorbed`, by
    default the one of fewer products.
    """
    del lengths
    rows, n_tokens = x.shape[:2]
    if hp.q_rank is None:
        q = linear(x, p["q"])
    else:
        q = linear(rms_norm(linear(x, p["q_down"]), p["q_norm"], hp.norm_eps), p["q_up"])
    q = q.reshape(rows, n_tokens, hp.n_heads, -1)
    q_nope, q_rope = q[..., : hp.nope_dim], q[..., hp.nope_dim :]
    down = linear(x, p["kv_down"])
    latent = rms_norm(down[..., : hp.kv_rank], p["kv_norm"], hp.norm_eps)[:, :, None]
    shared = down[..., None, hp.kv_rank :]
    if hp.rope is not None:
        q_rope, shared = rotate(q_rope, positions, hp.rope), rotate(shared, positions, hp.rope)
    keys, latents, sight, memory = memory.extend(shared, latent)
    keys, latents = (cells[:, :, : sight.n_cells].astype(x.dtype) for cells in (keys, latents))
    chosen = form or _cheaper(n_tokens, sight.n_cells, hp)
    y = chosen(q_nope, q_rope, keys, latents, sight.mask, p["kv_up"], hp)
    if hp.gate:
        y = y * jax.nn.sigmoid(linear(x, p["gate"]))[..., None]
    return linear(y.reshape(rows, n_tokens, -1), p["out"]), memory


def _cheaper(n_tokens: int, n_cells: int, hp: MlaHparams) -> Form:
    """By the number of products of one head."""
    up = hp.nope_dim + hp.value_dim
    absorbing = n_tokens * (n_cells * 2 * hp.kv_rank + hp.kv_rank * up)
    expanding = n_cells * (n_tokens * up + hp.kv_rank * up)
    return absorbed if absorbing <= expanding else expanded


def absorbed(
    q_nope: Array, q_rope: Array, keys: Array, latents: Array, mask: Array, up: Array, hp: MlaHparams
) -> Array:
    """Queries [B, T, H, .], keys [R, 1, S, rope_dim], latents [R, 1, S, kv_rank] to [B, T, H, value_dim]."""
    up_k, up_v = up[:, : hp.nope_dim].astype(q_nope.dtype), up[:, hp.nope_dim :].astype(q_nope.dtype)
    moved = contract("bthd,hdr->bthr", q_nope, up_k).astype(q_nope.dtype)
    scores = scores_of(moved, latents) + scores_of(q_rope, keys)
    mixed = weighted_values(scores, latents, mask, hp.scale)
    return contract("bthr,hvr->bthv", mixed, up_v).astype(q_nope.dtype)


def expanded(
    q_nope: Array, q_rope: Array, keys: Array, latents: Array, mask: Array, up: Array, hp: MlaHparams
) -> Array:
    """The same by keys and values of every head."""
    both = contract("bsr,hdr->bhsd", latents[:, 0], up.astype(q_nope.dtype))
    both = both.astype(q_nope.dtype)
    own, values = both[..., : hp.nope_dim], both[..., hp.nope_dim :]
    shared = scores_of(q_rope, keys)  # [B, 1, H, T, S]
    scores = scores_of(q_nope, own) + shared.swapaxes(1, 2)
    return weighted_values(scores, values, mask, hp.scale)
