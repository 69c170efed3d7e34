"""OLMo Hybrid: gated delta nets normed before, attention normed after."""

from __future__ import annotations

from typing import Any

from jaxhybrid.families.kimi_linear import split_delta_tensors
from jaxhybrid.families.llama import attention_tensors, mlp_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, ends, layer_words, one, where
from jaxhybrid.families.qwen3_next import KINDS
from jaxhybrid.hparams import AttentionHparams, GatedDeltaHparams, Hparams, MlpHparams


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    default = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layers)]
    words = layer_words(c, n_layers, KINDS, default)
    heads, kv_heads = attention_heads(c)
    head_dim, bias, eps = d_model // heads, c.flag("attention_bias", False), c.number("rms_norm_eps", 1e-6)
    rotated = c.inner("rope_parameters").get("rope_theta", c.get("rope_theta")) is not None
    key_heads = c.integer("linear_num_key_heads", heads)
    key_dim = c.integer("linear_key_head_dim", int(0.75 * d_model / key_heads))
    return Hparams(
        family="olmo_hybrid",
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
            rope=c.rope(head_dim) if rotated else None,
            bias=bias,
            out_bias=bias,
            qk_norm_eps=eps,
            qk_norm_full=True,
        ),
        recurrent=GatedDeltaHparams(
            n_heads=c.integer("linear_num_value_heads", heads),
            n_key_heads=key_heads,
            key_dim=key_dim,
            value_dim=c.integer("linear_value_head_dim", 2 * key_dim),
            conv_kernel=c.integer("linear_conv_kernel_dim", 4),
            beta_scale=2.0 if c.flag("linear_allow_neg_eigval", True) else 1.0,
            norm_eps=1e-5,  # whatever rms_norm_eps says
        ),
        mlp=MlpHparams(c.integer("intermediate_size"), c.activation(recurrent=True)),
        norms=tuple("post" if word == "attention" else "pre" for word in words),
        norm_eps=eps,
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 65536),
    )


RENAMED = (
    (r"\.input_layernorm\.", ".attention_layer_norm."),
    (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
)
"""Two writers of these files name a layer's norms differently; each layer has one norm of either name."""


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.norm.weight")
    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found |= mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", layer.mlp, d)
        if isinstance(layer.recurrent, GatedDeltaHparams):
            found |= {
                f"{ours}.norm": one(f"{theirs}.attention_layer_norm.weight", d),
                f"{ours}.mlp_norm": one(f"{theirs}.feedforward_layer_norm.weight", d),
            }
            mixer = f"{theirs}.linear_attn"
            found |= split_delta_tensors(
                f"{ours}.gated_delta", mixer, layer.recurrent, projections, d, "o_proj"
            )
        else:
            found |= {
                f"{ours}.post_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
                f"{ours}.mlp_post_norm": one(f"{theirs}.post_feedforward_layernorm.weight", d),
            }
            found |= attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d)
    return found
