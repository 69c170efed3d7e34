"""Routed experts: the router, and the experts' products with few tokens and with many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.hparams import MoeHparams
from jaxhybrid.ops.activations import activation
from jaxhybrid.ops.linear import contract, linear
from jaxhybrid.ops.quantized import QuantizedMatrix, dense, quantized_product
from jaxhybrid.ops.ragged import ragged_linear
from jaxhybrid.params import TensorSpec, Tree, matrix, vector

_MOST_HIDDEN = 1 << 24
"""Hidden activations that `every_expert` holds at once; beyond, tokens go in blocks."""


def moe_spec(hp: MoeHparams, d_model: int) -> Tree:
    experts, ffn, width = hp.n_experts, hp.d_ff, hp.latent or d_model
    into = "gate_up" if hp.gated else "up"
    parts, axes = ((2,), (None,)) if hp.gated else ((), ())
    shapes = {into: (experts, *parts, ffn, width), "down": (experts, width, ffn)}
    names = {into: ("experts", *axes, "ffn", "embed"), "down": ("experts", "embed", "ffn")}
    spec: Tree = {"router": TensorSpec((experts, d_model), (None, "embed"), fan_in=d_model)}
    spec |= {
        name: TensorSpec(shape, names[name], fan_in=shape[-1], quantizable=True)
        for name, shape in shapes.items()
    }
    if hp.selection_bias:
        spec["selection_bias"] = vector(experts, None)
    if hp.latent is not None:
        spec["latent_down"] = matrix(hp.latent, d_model, None, "embed")
        spec["latent_up"] = matrix(d_model, hp.latent, "embed", None)
    return spec


def moe(p: Tree, x: Array, hp: MoeHparams) -> Array:
    """Top-k routed experts: x [B, T, D] to [B, T, D]."""
    tokens = x.reshape(-1, x.shape[-1])
    experts, weights = route(p, tokens, hp)
    if hp.latent is not None:
        tokens = linear(tokens, p["latent_down"])
    y = _experts(p, tokens, experts, hp)
    y = jnp.sum(y * weights[:, :, None], axis=1).astype(x.dtype)
    if hp.latent is not None:
        y = linear(y, p["latent_up"])
    return y.reshape(x.shape)


def route(p: Tree, tokens: Array, hp: MoeHparams) -> tuple[Array, Array]:
    """tokens [N, D] to the chosen experts, int32 [N, top_k], and their weights, float32 [N, top_k].

    Scores are compared in float32; equal ones go to the lower expert number. Groups are limited as in
    DeepSeek-V3 (arXiv:2412.19437).
    """
    logits = linear(tokens.astype(jnp.float32), p["router"].astype(jnp.float32))
    plain = not hp.selection_bias and hp.n_groups == 1 and hp.renormalise_eps == 0
    if hp.scores == "softmax" and hp.renormalise and plain:
        # a softmax over all, divided by the sum of the chosen, is a softmax over the chosen
        chosen, experts = lax.top_k(logits, hp.top_k)
        return experts, jax.nn.softmax(chosen, axis=-1) * hp.multiplier
    scores = jax.nn.softmax(logits, axis=-1) if hp.scores == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores + p["selection_bias"].astype(jnp.float32) if hp.selection_bias else scores
    if hp.n_groups > 1:
        by_group = ranked.reshape(len(tokens), hp.n_groups, -1)
        best_two = jnp.sum(lax.top_k(by_group, min(2, by_group.shape[-1]))[0], axis=-1)
        _, groups = lax.top_k(best_two, hp.top_groups)
        allowed = jnp.any(jax.nn.one_hot(groups, hp.n_groups, dtype=bool), axis=1)
        ranked = jnp.where(allowed[:, :, None], by_group, -jnp.inf).reshape(ranked.shape)
    _, experts = lax.top_k(ranked, hp.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if hp.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + hp.renormalise_eps)
    return experts, weights * hp.multiplier


def _experts(p: Tree, tokens: Array, experts: Array, hp: MoeHparams) -> Array:
    """float32 [tokens, top_k, width], what the chosen experts make of each token.

    Few tokens gather their experts' weights, many are sorted by expert. On a CPU computing all experts wins
    unless very few are wanted: its ragged product costs as much and is slow.
    """
    n_chosen = tokens.shape[0] * hp.top_k

    def usual(p: Tree, tokens: Array, experts: Array) -> Array:
        form = gathered_experts if n_chosen <= hp.n_experts else sorted_experts
        return form(p, tokens, experts, hp)

    def on_cpu(p: Tree, tokens: Array, experts: Array) -> Array:
        form = gathered_experts if 10 * n_chosen <= hp.n_experts else every_expert
        return form(p, tokens, experts, hp)

    if tokens.dtype != jnp.float32:
        return usual(p, tokens, experts)
    used = {name: p[name] for name in ("gate_up" if hp.gated else "up", "down")}
    return lax.platform_dependent(used, tokens, experts, cpu=on_cpu, default=usual)


def every_expert(p: Tree, tokens: Array, experts: Array, hp: MoeHparams) -> Array:
    """All experts of all tokens, then the chosen ones: two large products. float32 [tokens, top_k, width]."""
    n_tokens, n_experts = len(tokens), hp.n_experts
    size = max(1, min(n_tokens, _MOST_HIDDEN // (n_experts * hp.d_ff)))
    into, act = p["gate_up" if hp.gated else "up"], activation(hp.activation)

    def some(tokens: Array, experts: Array) -> Array:
        hidden = linear(tokens, into.reshape(-1, into.shape[-1]))
        hidden = hidden.reshape(len(tokens), n_experts, -1).swapaxes(0, 1)  # [experts, tokens, ...]
        if hp.gated:
            hidden = act(hidden[..., : hp.d_ff]) * hidden[..., hp.d_ff :]
        else:
            hidden = act(hidden)
        if isinstance(p["down"], QuantizedMatrix):
            y = lax.map(lambda expert: quantized_product(*expert), (hidden, p["down"]))
        else:
            y = contract("etf,edf->etd", hidden, p["down"].astype(hidden.dtype))
        return y[experts, jnp.arange(len(tokens))[:, None]]

    if size == n_tokens:
        return some(tokens, experts)
    n_blocks = -(-n_tokens // size)

    def blocks(t: Array) -> Array:
        t = jnp.pad(t, ((0, n_blocks * size - n_tokens), (0, 0)))
        return t.reshape(n_blocks, size, -1)

    y = lax.map(lambda block: some(*block), (blocks(tokens), blocks(experts)))
    return y.reshape(n_blocks * size, hp.top_k, -1)[:n_tokens]


def gathered_experts(p: Tree, tokens: Array, experts: Array, hp: MoeHparams) -> Array:
    """Few tokens: read only the chosen experts' weights. Returns float32 [tokens, top_k, width]."""
    act = activation(hp.activation)
    if hp.gated:
        both = contract("td,tkgfd->tkgf", tokens, dense(p["gate_up"][experts]))
        hidden = act(both[..., 0, :]) * both[..., 1, :]
    else:
        hidden = act(contract("td,tkfd->tkf", tokens, dense(p["up"][experts])))
    return contract("tkf,tkdf->tkd", hidden.astype(tokens.dtype), dense(p["down"][experts]))


def sorted_experts(p: Tree, tokens: Array, experts: Array, hp: MoeHparams) -> Array:
    """Many tokens: sort the pairs by expert, one ragged product each way. float32 [tokens, top_k, width]."""
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=hp.n_experts).astype(jnp.int32)
    rows, act = tokens[order // hp.top_k], activation(hp.activation)
    if hp.gated:
        both = ragged_linear(rows, dense(p["gate_up"]).reshape(hp.n_experts, 2 * hp.d_ff, -1), sizes)
        hidden = act(both[:, : hp.d_ff]) * both[:, hp.d_ff :]
    else:
        hidden = act(ragged_linear(rows, dense(p["up"]), sizes))
    y = ragged_linear(hidden.astype(tokens.dtype), dense(p["down"]), sizes)
    return jnp.zeros_like(y).at[order].set(y).reshape(*experts.shape, -1)
