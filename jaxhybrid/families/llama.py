"""Llama 2 and 3 and what shares their format: attention in every layer."""

from __future__ import annotations

from typing import Any

from jaxhybrid.families.names import Fields, Source, checked_heads, one
from jaxhybrid.hparams import AttentionHparams, Hparams, MlpHparams


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", heads)
    checked_heads(heads, kv_heads)
    head_dim = c.integer("head_dim", d_model // heads)
    bias = c.flag("attention_bias", False)
    return Hparams(
        family="llama",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=tuple(range(n_layers)),
        attention=AttentionHparams(
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=c.rope(head_dim),
            bias=bias,
            out_bias=bias,
        ),
        mlp=MlpHparams(c.integer("intermediate_size"), c.activation(), c.flag("mlp_bias", False)),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 2048),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    d, vocab = hp.d_model, hp.vocab_size
    found = {
        "embed.weight": one("model.embed_tokens.weight", vocab, d),
        "norm.weight": one("model.norm.weight", d),
    }
    if not hp.tie_embeddings:
        found["head.weight"] = one("lm_head.weight", vocab, d)
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        assert layer.mlp is not None
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
            **attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d),
            **mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", layer.mlp, d),
        }
    return found


def attention_tensors(ours: str, theirs: str, hp: AttentionHparams | None, d: int) -> dict[str, Source]:
    """q_proj, k_proj, v_proj and o_proj, with their biases where there are any."""
    assert hp is not None
    q, kv = hp.n_heads * hp.head_dim, hp.n_kv_heads * hp.head_dim
    found = {
        f"{ours}.q": one(f"{theirs}.q_proj.weight", q, d),
        f"{ours}.k": one(f"{theirs}.k_proj.weight", kv, d),
        f"{ours}.v": one(f"{theirs}.v_proj.weight", kv, d),
        f"{ours}.out": one(f"{theirs}.o_proj.weight", d, q),
    }
    if hp.bias:
        found |= {
            f"{ours}.q_bias": one(f"{theirs}.q_proj.bias", q),
            f"{ours}.k_bias": one(f"{theirs}.k_proj.bias", kv),
            f"{ours}.v_bias": one(f"{theirs}.v_proj.bias", kv),
        }
    if hp.out_bias:
        found[f"{ours}.out_bias"] = one(f"{theirs}.o_proj.bias", d)
    return found


def mlp_tensors(ours: str, theirs: str, hp: MlpHparams, d: int) -> dict[str, Source]:
    """gate_proj, up_proj and down_proj, with their biases where there are any."""
    found = {
        f"{ours}.gate_up": Source((f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"), (hp.d_ff, d)),
        f"{ours}.down": one(f"{theirs}.down_proj.weight", d, hp.d_ff),
    }
    if hp.bias:
        found |= {
            f"{ours}.gate_up_bias": Source(
                (f"{theirs}.gate_proj.bias", f"{theirs}.up_proj.bias"), (hp.d_ff,)
            ),
            f"{ours}.down_bias": one(f"{theirs}.down_proj.bias", d),
        }
    return found
