"""Jamba: Mamba with normed inputs, an attention layer in eight, experts in every other layer."""

from __future__ import annotations

from typing import Any

from jaxhybrid.families import bamba
from jaxhybrid.families.llama import expert_tensors
from jaxhybrid.families.mamba import dt_rank, mixer_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, experts_per_token
from jaxhybrid.hparams import (
    AttentionHparams,
    Hparams,
    Mamba1Hparams,
    MlpHparams,
    MoeHparams,
    resolve_layers,
)


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    attention_layers, recurrent_layers = resolve_layers(
        n_layers,
        period=c.integer("attn_layer_period", 8),
        offset=c.integer("attn_layer_offset", 4, least=0),
        layer_types=c.get("layers_block_type", c.get("layer_types")),
        field_names={"period": "attn_layer_period", "offset": "attn_layer_offset"},
    )
    heads, kv_heads = attention_heads(c)
    head_dim, eps = d_model // heads, c.number("rms_norm_eps", 1e-6)
    activation, d_ff = c.activation(recurrent=True), c.integer("intermediate_size")
    n_experts = c.integer("num_experts", 16)
    every, first = c.integer("expert_layer_period", 2), c.integer("expert_layer_offset", 1, least=0)
    sparse = [n_experts > 1 and i % every == first for i in range(n_layers)]
    moe = None
    if any(sparse):
        top_k = experts_per_token(c, n_experts, "num_experts")
        moe = MoeHparams(n_experts, top_k, d_ff, activation, renormalise=False)
    return Hparams(
        family="jamba",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=attention_layers,
        recurrent_layer_indices=recurrent_layers,
        attention=AttentionHparams(heads, kv_heads, head_dim, scale=head_dim**-0.5),
        recurrent=Mamba1Hparams(
            d_inner=c.integer("mamba_expand", 2) * d_model,
            state_size=c.integer("mamba_d_state", 16),
            dt_rank=dt_rank(c, "mamba_dt_rank", d_model),
            conv_kernel=c.integer("mamba_d_conv", 4),
            inner_norm="weighted",
            norm_eps=eps,
            bias=c.flag("mamba_proj_bias", False),
            conv_bias=c.flag("mamba_conv_bias", True),
        ),
        mlp=tuple(None if is_sparse else MlpHparams(d_ff, activation) for is_sparse in sparse),
        moe=tuple(moe if is_sparse else None for is_sparse in sparse),
        norm_eps=eps,
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 262144),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    found = bamba.tensors(hp)
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        if layer.recurrent is not None:
            found |= mixer_tensors(f"{ours}.mamba1", f"{theirs}.mamba", layer.recurrent, hp.d_model)
        if layer.moe is not None:
            found |= expert_tensors(
                f"{ours}.moe", f"{theirs}.feed_forward", layer.moe, hp.d_model, router="router"
            )
    return found
