"""Bamba: Mamba-2 layers and rotated attention layers by a list, an MLP after each."""

from __future__ import annotations

from typing import Any

from jaxhybrid.families.granitemoehybrid import mamba2_hparams
from jaxhybrid.families.llama import attention_tensors, mlp_tensors
from jaxhybrid.families.mamba2 import mixer_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, ends, one
from jaxhybrid.hparams import AttentionHparams, Hparams, MlpHparams, resolve_layers


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    given = c.get("attn_layer_indices")
    words = c.get("layers_block_type", c.get("layer_types"))
    attention_layers, recurrent_layers = resolve_layers(
        n_layers,
        attention_layer_indices=[] if given is None and words is None else given,
        layer_types=words,
        field_names={"attention_layer_indices": "attn_layer_indices"},
    )
    heads, kv_heads = attention_heads(c)
    head_dim, bias, eps = d_model // heads, c.flag("attention_bias", False), c.number("rms_norm_eps", 1e-5)
    return Hparams(
        family="bamba",
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
            bias=bias,
            out_bias=bias,
        ),
        recurrent=mamba2_hparams(c, d_model, eps),
        mlp=MlpHparams(
            c.integer("intermediate_size"), c.activation(recurrent=True), c.flag("mlp_bias", False)
        ),
        norm_eps=eps,
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 262144),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    """Also of Falcon-H1 and Jamba, whose layers have the same names."""
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.final_layernorm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.pre_ff_layernorm.weight", d),
        }
        if layer.mlp is not None:
            found |= mlp_tensors(f"{ours}.mlp", f"{theirs}.feed_forward", layer.mlp, d)
        if layer.attention is not None:
            found |= attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d)
        if layer.recurrent is not None and layer.recurrent.kind == "mamba2":
            found |= mixer_tensors(f"{ours}.mamba2", f"{theirs}.mamba", layer.recurrent, d)
    return found
