"""LFM2, LFM2-MoE and LFM3: short convolutions and attention by a list."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxhybrid.families.llama import attention_tensors, expert_tensors, mlp_tensors
from jaxhybrid.families.names import (
    Fields,
    Source,
    attention_heads,
    ends,
    experts_per_token,
    layer_words,
    one,
    where,
)
from jaxhybrid.hparams import AttentionHparams, Hparams, MlpHparams, MoeHparams, ShortConvHparams

_KINDS = {"conv": "conv", "full_attention": "full", "sliding_attention": "sliding"}
_MLP = ("w1", "w3", "w2")


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    family = c.text("model_type")
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    words = layer_words(c, n_layers, _KINDS, _default_words(c, family, n_layers))
    full, sliding = _attention(c, family, d_model)
    d_ff = _ff_width(c, family)
    n_dense = c.integer("num_dense_layers", 2, least=0) if family == "lfm2_moe" else n_layers
    moe = _moe(c) if n_dense < n_layers else None
    tied = c.flag("tie_word_embeddings", c.flag("tie_embedding", True))
    return Hparams(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=where(words, "full", "sliding"),
        recurrent_layer_indices=where(words, "conv"),
        attention=tuple({"full": full, "sliding": sliding}.get(word) for word in words),
        recurrent=ShortConvHparams(d_model, c.integer("conv_L_cache", 3), c.flag("conv_bias", False)),
        mlp=tuple(MlpHparams(d_ff) if i < n_dense else None for i in range(n_layers)),
        moe=tuple(moe if i >= n_dense else None for i in range(n_layers)),
        norms="both" if family == "lfm3" and c.flag("use_sandwich_norm", True) else "pre",
        norm_eps=c.number("norm_eps", 1e-5),
        tie_embeddings=tied,
        context_length=c.integer("max_position_embeddings", 128000),
    )


def _default_words(c: Fields, family: str, n_layers: int) -> list[str] | None:
    if family == "lfm3":
        return [
            "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i else "conv"
            for i in range(n_layers)
        ]
    attending = c.get("full_attn_idxs")
    if attending is None:
        return None
    return ["full_attention" if i in c.integers("full_attn_idxs") else "conv" for i in range(n_layers)]


def _attention(c: Fields, family: str, d_model: int) -> tuple[AttentionHparams, AttentionHparams]:
    """Of layers that see everything, and of those with a window (LFM3)."""
    heads, kv_heads = attention_heads(c)
    head_dim = c.integer("head_dim", 128 if family == "lfm3" else d_model // heads)
    bias = c.flag("attention_bias", False) if family == "lfm3" else False
    plain = AttentionHparams(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        out_bias=bias,
        qk_norm_eps=c.number("norm_eps", 1e-5),
    )
    if family != "lfm3":
        full = dataclasses.replace(plain, rope=c.rope(head_dim, theta=1_000_000.0))
        return full, full
    ropes = c.inner("rope_parameters")
    kinds = [
        ropes.get("full_attention")
        or {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        ropes.get("sliding_attention") or {"rope_theta": 10000.0},
    ]
    full_rope, sliding_rope = (Fields({"rope_parameters": kind}).rope(head_dim) for kind in kinds)
    gated = dataclasses.replace(plain, gate="head" if c.flag("use_attention_gate", True) else None)
    return (
        dataclasses.replace(gated, rope=full_rope),
        dataclasses.replace(gated, rope=sliding_rope, window=c.integer("sliding_window", 256)),
    )


def _ff_width(c: Fields, family: str) -> int:
    """LFM2 states the width before the two thirds of a gated MLP, and rounds up."""
    d_ff = c.integer("intermediate_size", c.get("block_ff_dim"))
    if family != "lfm2" or not c.flag("block_auto_adjust_ff_dim", True):
        return d_ff
    multiple = c.integer("block_multiple_of", 256)
    d_ff = int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * d_ff / 3))
    return multiple * ((d_ff + multiple - 1) // multiple)


def _moe(c: Fields) -> MoeHparams:
    n_experts = c.integer("num_experts")
    return MoeHparams(
        n_experts=n_experts,
        top_k=experts_per_token(c, n_experts, "num_experts"),
        d_ff=c.integer("moe_intermediate_size"),
        scores="sigmoid",
        selection_bias=c.flag("use_expert_bias", True),
        renormalise=c.flag("norm_topk_prob", True),
        renormalise_eps=1e-6,
        multiplier=c.number("routed_scaling_factor", 1.0),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.embedding_norm.weight")
    third = hp.family == "lfm3"
    names: dict[str, Any] = {} if third else {"out": "out_proj", "norms": ("q_layernorm", "k_layernorm")}
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found |= {
            f"{ours}.norm": one(f"{theirs}.operator_norm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.ffn_norm.weight", d),
        }
        if layer.norms == "both":
            found |= {
                f"{ours}.post_norm": one(f"{theirs}.post_operator_norm.weight", d),
                f"{ours}.mlp_post_norm": one(f"{theirs}.post_ffn_norm.weight", d),
            }
        if layer.attention is not None:
            found |= attention_tensors(
                f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d, **names
            )
        if isinstance(layer.recurrent, ShortConvHparams):
            found |= _conv_tensors(f"{ours}.short_conv", f"{theirs}.conv", layer.recurrent, d)
        if layer.mlp is not None:
            found |= mlp_tensors(f"{ours}.mlp", f"{theirs}.feed_forward", layer.mlp, d, _MLP)
        if layer.moe is not None:
            found |= expert_tensors(f"{ours}.moe", f"{theirs}.feed_forward", layer.moe, d, _MLP)
            if layer.moe.selection_bias:
                bias = one(f"{theirs}.feed_forward.expert_bias", layer.moe.n_experts)
                found[f"{ours}.moe.selection_bias"] = bias
    return found


def _conv_tensors(ours: str, theirs: str, hp: ShortConvHparams, d: int) -> dict[str, Source]:
    found = {
        f"{ours}.in_proj": one(f"{theirs}.in_proj.weight", 3 * hp.width, d),
        f"{ours}.conv": one(f"{theirs}.conv.weight", hp.width, 1, hp.conv_kernel),
        f"{ours}.out": one(f"{theirs}.out_proj.weight", d, hp.width),
    }
    if hp.bias:
        found |= {
            f"{ours}.in_bias": one(f"{theirs}.in_proj.bias", 3 * hp.width),
            f"{ours}.conv_bias": one(f"{theirs}.conv.bias", hp.width),
            f"{ours}.out_bias": one(f"{theirs}.out_proj.bias", d),
        }
    return found
