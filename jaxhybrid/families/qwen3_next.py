"""Qwen3-Next and Qwen3.5: gated delta nets and gated attention, experts in most models."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxhybrid.families.llama import attention_tensors, expert_tensors, mlp_tensors
from jaxhybrid.families.names import (
    Fields,
    Source,
    attention_heads,
    ends,
    experts_per_token,
    layer_words,
    one,
    rows,
    where,
)
from jaxhybrid.hparams import AttentionHparams, GatedDeltaHparams, Hparams, MlpHparams, MoeHparams

KINDS = {"linear_attention": "recurrent", "full_attention": "attention"}


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    interval = c.integer("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n_layers)]
    words = layer_words(c, n_layers, KINDS, default)
    heads, kv_heads = attention_heads(c)
    head_dim, eps, bias = (
        c.integer("head_dim", 256),
        c.number("rms_norm_eps", 1e-6),
        c.flag("attention_bias", False),
    )
    activation = c.activation(recurrent=True)
    sparse = _sparse_layers(c, n_layers)
    dense = None if all(sparse) else MlpHparams(c.integer("intermediate_size"), activation)
    moe, shared = moe_hparams(c, activation, sigmoid_gate=True) if any(sparse) else (None, None)
    return Hparams(
        family=c.text("model_type"),
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=where(words, "attention"),
        recurrent_layer_indices=where(words, "recurrent"),
        attention=AttentionHparams(
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=c.rope(head_dim, partial=0.25),
            bias=bias,
            out_bias=bias,
            qk_norm_eps=eps,
            qk_norm_offset=1.0,
            gate="element",
        ),
        recurrent=delta_hparams(c, eps),
        mlp=tuple(shared if is_sparse else dense for is_sparse in sparse),
        moe=tuple(moe if is_sparse else None for is_sparse in sparse),
        norm_eps=eps,
        norm_offset=1.0,
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 32768),
    )


def delta_hparams(c: Fields, eps: float) -> GatedDeltaHparams:
    """The mixer by the fields that Qwen and LARA share."""
    return GatedDeltaHparams(
        n_heads=c.integer("linear_num_value_heads", 32),
        n_key_heads=c.integer("linear_num_key_heads", 16),
        key_dim=c.integer("linear_key_head_dim", 128),
        value_dim=c.integer("linear_value_head_dim", 128),
        conv_kernel=c.integer("linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )


def moe_hparams(c: Fields, activation: str, sigmoid_gate: bool) -> tuple[MoeHparams, MlpHparams]:
    """Routed experts, and the one that every token takes."""
    n_experts = c.integer("num_experts")
    routed = MoeHparams(
        n_experts,
        experts_per_token(c, n_experts, "num_experts"),
        c.integer("moe_intermediate_size"),
        activation,
        renormalise=c.flag("norm_topk_prob", True),
    )
    width = c.integer("shared_expert_intermediate_size")
    return routed, MlpHparams(width, activation, sigmoid_gate=sigmoid_gate)


def _sparse_layers(c: Fields, n_layers: int) -> list[bool]:
    """Which layers have experts."""
    if c.integer("num_experts", 0, least=0) == 0:
        return [False] * n_layers
    step, dense = c.integer("decoder_sparse_step", 1), c.integers("mlp_only_layers", [])
    return [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
        }
        if layer.attention is not None:
            found |= attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d)
        if isinstance(layer.recurrent, GatedDeltaHparams):
            mixer = f"{theirs}.linear_attn"
            packed = hp.family == "qwen3_next"
            project = _packed_projection if packed else _projection
            found |= delta_tensors(f"{ours}.gated_delta", mixer, layer.recurrent, d)
            found[f"{ours}.gated_delta.in_proj"] = project(mixer, layer.recurrent, d)
        if layer.moe is None:
            found |= mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", layer.mlp, d)
        else:
            found |= expert_tensors(f"{ours}.moe", f"{theirs}.mlp", layer.moe, d)
            found |= mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp.shared_expert", layer.mlp, d)
            found[f"{ours}.mlp.sigmoid_gate"] = one(f"{theirs}.mlp.shared_expert_gate.weight", 1, d)
    return found


def delta_tensors(
    ours: str, theirs: str, hp: GatedDeltaHparams, d: int, norm: str = "norm", out: str = "out_proj"
) -> dict[str, Source]:
    """A gated delta net without its input projections, with one convolution for q, k and v."""
    return {
        f"{ours}.conv": one(f"{theirs}.conv1d.weight", hp.conv_channels, 1, hp.conv_kernel),
        f"{ours}.a_log": one(f"{theirs}.A_log", hp.n_heads),
        f"{ours}.dt_bias": one(f"{theirs}.dt_bias", hp.decays),
        f"{ours}.norm": one(f"{theirs}.{norm}.weight", hp.value_dim),
        f"{ours}.out": one(f"{theirs}.{out}.weight", d, hp.values),
    }


def _projection(theirs: str, hp: GatedDeltaHparams, d: int) -> Source:
    """Qwen3.5: [q | k | v], the gate, beta and the decay one by one."""
    parts = {"qkv": hp.conv_channels, "z": hp.values, "b": hp.n_heads, "a": hp.n_heads}
    return rows([(f"{theirs}.in_proj_{name}.weight", n) for name, n in parts.items()], d)


def _packed_projection(theirs: str, hp: GatedDeltaHparams, d: int) -> Source:
    """Qwen3-Next: for each key head its q, k, values and gates, and its betas and decays."""
    per_key = hp.n_heads // hp.n_key_heads
    sizes = [hp.key_dim, hp.key_dim, per_key * hp.value_dim, per_key * hp.value_dim]
    first = np.arange(hp.n_key_heads * sum(sizes)).reshape(hp.n_key_heads, -1)
    second = first.size + np.arange(2 * hp.n_heads).reshape(hp.n_key_heads, -1)
    parts = np.split(first, np.cumsum(sizes)[:-1], axis=1) + np.split(second, 2, axis=1)
    order = np.concatenate([part.reshape(-1) for part in parts])
    names = [(f"{theirs}.in_proj_qkvz.weight", first.size), (f"{theirs}.in_proj_ba.weight", second.size)]
    source = rows(names, d)
    return Source(source.names, source.shapes, tuple(int(i) for i in order))
