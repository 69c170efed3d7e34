"""RecurrentGemma (Griffin): two gated linear recurrences to each attention layer with a window."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jaxhybrid.families.llama import attention_tensors, mlp_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, ends, one
from jaxhybrid.hparams import AttentionHparams, Hparams, MlpHparams, RgLruHparams, resolve_layers


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    cycle = c.get("block_types") or ["recurrent", "recurrent", "attention"]
    words = c.get("layers_block_type", [cycle[i % len(cycle)] for i in range(n_layers)])
    attention_layers, recurrent_layers = resolve_layers(
        n_layers, layer_types=words, field_names={"layer_types": "block_types"}
    )
    heads, kv_heads = attention_heads(c)
    head_dim = d_model // heads
    return Hparams(
        family="recurrent_gemma",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=attention_layers,
        recurrent_layer_indices=recurrent_layers,
        attention=AttentionHparams(
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=c.rope(head_dim, partial=0.5),
            bias=c.flag("attention_bias", False),
            out_bias=True,
            window=c.integer("attention_window_size", 2048),
        ),
        recurrent=RgLruHparams(c.integer("lru_width", d_model), heads, c.integer("conv1d_width", 4)),
        mlp=MlpHparams(
            c.integer("intermediate_size") // 2,
            c.activation(field="hidden_activation", default="gelu_pytorch_tanh"),
            bias=True,
        ),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        embedding_multiplier=float(jnp.bfloat16(math.sqrt(d_model))),  # rounded whatever the dtype
        logits_soft_cap=c.number("logits_soft_cap", 30.0),
        tie_embeddings=c.flag("tie_word_embeddings", True),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.final_norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        mixer = f"{theirs}.temporal_block"
        found |= {
            f"{ours}.norm": one(f"{theirs}.temporal_pre_norm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.channel_pre_norm.weight", d),
            **mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp_block", layer.mlp, d),
        }
        if layer.attention is not None:
            found |= attention_tensors(f"{ours}.attention", mixer, layer.attention, d)
        if isinstance(layer.recurrent, RgLruHparams):
            found |= _recurrent_tensors(f"{ours}.rg_lru", mixer, layer.recurrent, d)
    return found


def _recurrent_tensors(ours: str, theirs: str, hp: RgLruHparams, d: int) -> dict[str, Source]:
    width, block = hp.width, hp.width // hp.n_blocks
    found = {
        f"{ours}.conv": one(f"{theirs}.conv_1d.weight", width, 1, hp.conv_kernel),
        f"{ours}.conv_bias": one(f"{theirs}.conv_1d.bias", width),
        f"{ours}.lambda": one(f"{theirs}.rg_lru.recurrent_param", width),
    }
    for name, linear, shape in (
        ("x", "linear_x", (width, d)),
        ("y", "linear_y", (width, d)),
        ("out", "linear_out", (d, width)),
    ):
        found[f"{ours}.{name}"] = one(f"{theirs}.{linear}.weight", *shape)
        found[f"{ours}.{name}_bias"] = one(f"{theirs}.{linear}.bias", shape[0])
    for name, gate in (("input_gate", "input_gate"), ("recurrence_gate", "recurrent_gate")):
        found[f"{ours}.{name}"] = one(f"{theirs}.rg_lru.{gate}_weight", hp.n_blocks, block, block)
        found[f"{ours}.{name}_bias"] = one(f"{theirs}.rg_lru.{gate}_bias", hp.n_blocks, block)
    return found
