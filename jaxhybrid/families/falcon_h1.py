"""Falcon-H1: Mamba-2 and attention side by side in every layer, with multipliers everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxhybrid.families import bamba
from jaxhybrid.families.granitemoehybrid import mamba2_hparams
from jaxhybrid.families.names import Fields, Source, attention_heads
from jaxhybrid.hparams import AttentionHparams, Hparams, Mamba2Hparams, MlpHparams


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    heads, kv_heads = attention_heads(c)
    head_dim = c.integer("head_dim", d_model // heads)
    bias, eps = c.flag("attention_bias", False), c.number("rms_norm_eps", 1e-5)
    gate, down = c.numbers("mlp_multipliers", 2, (1.0, 1.0))
    everywhere = tuple(range(n_layers))
    return Hparams(
        family="falcon_h1",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=everywhere,
        recurrent_layer_indices=everywhere,
        attention=AttentionHparams(
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=c.rope(head_dim),
            bias=bias,
            out_bias=bias,
            in_multiplier=c.number("attention_in_multiplier", 1.0),
            key_multiplier=c.number("key_multiplier", 1.0),
            out_multiplier=c.number("attention_out_multiplier", 1.0),
        ),
        recurrent=_mamba2(c, d_model, eps),
        mlp=MlpHparams(
            c.integer("intermediate_size"),
            c.activation(recurrent=True),
            c.flag("mlp_bias", False),
            gate_multiplier=gate,
            out_multiplier=down,
        ),
        norm_eps=eps,
        embedding_multiplier=c.number("embedding_multiplier", 1.0),
        logits_multiplier=c.number("lm_head_multiplier", 1.0),
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 8192),
    )


def _mamba2(c: Fields, d_model: int, eps: float) -> Mamba2Hparams:
    z, x, b, c_, dt = c.numbers("ssm_multipliers", 5, (1.0,) * 5)
    gated_norm = None
    if c.flag("mamba_rms_norm", False):
        gated_norm = "before" if c.flag("mamba_norm_before_gate", True) else "after"
    return dataclasses.replace(
        mamba2_hparams(c, d_model, eps),
        gated_norm=gated_norm,
        in_multiplier=c.number("ssm_in_multiplier", 1.0),
        out_multiplier=c.number("ssm_out_multiplier", 1.0),
        multipliers=(z, x, b, c_, dt),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    return bamba.tensors(hp)
