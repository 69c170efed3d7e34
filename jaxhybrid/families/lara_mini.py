"""LARA mini: gated delta nets, rotated windows and full attention without positions, experts everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxhybrid.families.llama import attention_tensors, mlp_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, ends, layer_words, one, where
from jaxhybrid.families.qwen3_next import delta_hparams, delta_tensors, moe_hparams
from jaxhybrid.hparams import AttentionHparams, GatedDeltaHparams, Hparams

_KINDS = {"linear_attention": "recurrent", "sliding_attention": "sliding", "full_attention": "full"}

_PATTERN = (
    "linear_attention",
    "sliding_attention",
    "linear_attention",
    "full_attention",
    "sliding_attention",
)
"""Of a configuration without a list."""


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    words = layer_words(c, n_layers, _KINDS, [_PATTERN[i % len(_PATTERN)] for i in range(n_layers)])
    heads, kv_heads = attention_heads(c)
    head_dim, bias, eps = (
        c.integer("head_dim", 128),
        c.flag("attention_bias", False),
        c.number("rms_norm_eps", 1e-6),
    )
    full = AttentionHparams(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        out_bias=bias,
        qk_norm_eps=eps,
    )
    sliding = dataclasses.replace(full, rope=c.rope(head_dim), window=c.integer("sliding_window", 512))
    moe, shared = moe_hparams(c, c.activation(recurrent=True), sigmoid_gate=False)
    return Hparams(
        family="lara_mini",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=where(words, "full", "sliding"),
        recurrent_layer_indices=where(words, "recurrent"),
        attention=tuple({"full": full, "sliding": sliding}.get(word) for word in words),
        recurrent=delta_hparams(c, eps),
        mlp=shared,
        moe=moe,
        norm_eps=eps,
        tie_embeddings=c.flag("tie_word_embeddings", True),
        context_length=c.integer("max_position_embeddings", 131072),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        assert layer.moe is not None
        n, ff = layer.moe.n_experts, layer.moe.d_ff
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
            f"{ours}.moe.router": one(f"{theirs}.mlp.gate.weight", n, d),
            f"{ours}.moe.gate_up": one(f"{theirs}.mlp.experts.gate_up_proj", n, 2 * ff, d),
            f"{ours}.moe.down": one(f"{theirs}.mlp.experts.down_proj", n, d, ff),
            **mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp.shared_expert", layer.mlp, d),
        }
        if layer.attention is not None:
            found |= attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d)
        if isinstance(layer.recurrent, GatedDeltaHparams):
            mixer, delta = f"{theirs}.linear_attn", f"{ours}.gated_delta"
            found |= delta_tensors(delta, mixer, layer.recurrent, d, norm="out_norm")
            found[f"{delta}.in_proj"] = one(f"{mixer}.in_proj.weight", sum(layer.recurrent.projections), d)
    return found
