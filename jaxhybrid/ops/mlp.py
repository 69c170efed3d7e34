"""Feed-forward blocks: the gated MLP and routed experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.hparams import MlpHparams, MoeHparams
from jaxhybrid.ops.activations import activation
from jaxhybrid.ops.linear import linear, precision_of
from jaxhybrid.ops.ragged import ragged_linear
from jaxhybrid.params import TensorSpec, Tree, matrix, vector


def mlp_spec(hp: MlpHparams, d_model: int) -> Tree:
    """`gate_up` stacks both input matrices, so that a mesh can split the ffn axis of each."""
    spec: Tree = {
        "gate_up": TensorSpec((2, hp.d_ff, d_model), (None, "ffn", "embed"), fan_in=d_model),
        "down": matrix(d_model, hp.d_ff, "embed", "ffn"),
    }
    if hp.bias:
        spec["gate_up_bias"] = TensorSpec((2, hp.d_ff), (None, "ffn"), init="zeros", float32=True)
        spec["down_bias"] = vector(d_model, "embed")
    return spec


def mlp(p: Tree, x: Array, hp: MlpHparams) -> Array:
    """down(act(gate x) * up x): x [..., D] to [..., D] (GLU variants, arXiv:2002.05202)."""
    bias = p["gate_up_bias"].reshape(-1) if hp.bias else None
    both = linear(x, p["gate_up"].reshape(2 * hp.d_ff, -1), bias)
    hidden = activation(hp.activation)(both[..., : hp.d_ff]) * both[..., hp.d_ff :]
    return linear(hidden, p["down"], p.get("down_bias"))


def moe_spec(hp: MoeHparams, d_model: int) -> Tree:
    experts, ffn = hp.n_experts, hp.d_ff
    return {
        "router": matrix(experts, d_model, None, "embed"),
        "gate_up": TensorSpec((experts, 2, ffn, d_model), ("experts", None, "ffn", "embed"), fan_in=d_model),
        "down": TensorSpec((experts, d_model, ffn), ("experts", "embed", "ffn"), fan_in=ffn),
    }


def moe(p: Tree, x: Array, hp: MoeHparams) -> Array:
    """Top-k routed experts: x [B, T, D] to [B, T, D].

    The router's logits are compared in float32; equal logits go to the lower expert number.
    """
    tokens = x.reshape(-1, x.shape[-1])
    scores = linear(tokens.astype(jnp.float32), p["router"].astype(jnp.float32))
    chosen, experts = lax.top_k(scores, hp.top_k)  # [tokens, top_k]
    weights = jax.nn.softmax(chosen, axis=-1)
    if tokens.shape[0] * hp.top_k <= hp.n_experts:
        y = _gathered_experts(p, tokens, experts, hp)
    else:
        y = _sorted_experts(p, tokens, experts, hp)
    y = jnp.sum(y * weights[:, :, None], axis=1)
    return y.astype(x.dtype).reshape(x.shape)


def _gathered_experts(p: Tree, tokens: Array, experts: Array, hp: MoeHparams) -> Array:
    """Few tokens: read only the chosen experts' weights. Returns float32 [tokens, top_k, D]."""
    options = {"precision": precision_of(tokens.dtype), "preferred_element_type": jnp.float32}
    both = jnp.einsum("td,tkgfd->tkgf", tokens, p["gate_up"][experts], **options)
    hidden = (activation(hp.activation)(both[..., 0, :]) * both[..., 1, :]).astype(tokens.dtype)
    return jnp.einsum("tkf,tkdf->tkd", hidden, p["down"][experts], **options)


def _sorted_experts(p: Tree, tokens: Array, experts: Array, hp: MoeHparams) -> Array:
    """Many tokens: sort the pairs by expert, one ragged product each way. float32 [tokens, top_k, D]."""
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=hp.n_experts).astype(jnp.int32)
    rows = tokens[order // hp.top_k]
    both = ragged_linear(rows, p["gate_up"].reshape(hp.n_experts, 2 * hp.d_ff, -1), sizes)
    hidden = activation(hp.activation)(both[:, : hp.d_ff]) * both[:, hp.d_ff :]
    y = ragged_linear(hidden.astype(tokens.dtype), p["down"], sizes)
    return jnp.zeros_like(y).at[order].set(y).reshape(*experts.shape, -1)
