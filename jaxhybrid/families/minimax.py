"""MiniMax-Text-01 and M1: lightning attention and attention, experts, the residual from the normed stream."""

from __future__ import annotations

from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families.llama import attention_tensors, expert_tensors
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
from jaxhybrid.families.qwen3_next import KINDS
from jaxhybrid.hparams import AttentionHparams, Hparams, LightningHparams, MoeHparams, Residual

IGNORED = tuple(
    rf"model\.layers\.\d+\.self_attn\.{name}"
    for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
)
"""Constants that some files hold."""


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    words = layer_words(c, n_layers, KINDS, _default_words(c, n_layers))
    heads, kv_heads = attention_heads(c)
    head_dim, eps = c.integer("head_dim", d_model // heads), c.number("rms_norm_eps", 1e-5)
    n_experts = c.integer("num_local_experts", 8)
    if c.get("sliding_window") is not None:
        raise HparamsError(f"sliding_window: {c.get('sliding_window')!r} is not supported")
    rotary = c.integer("rotary_dim", head_dim)

    def depth(i: int) -> float:
        """Later layers forget more slowly."""
        return 1 - i / (n_layers - 1 + 1e-5) + 1e-5

    def residual(*kinds: str) -> Residual:
        """The factors' fields have two spellings."""
        alpha, beta = (
            next((c.number(f) for kind in kinds if c.get(f := f"{kind}_{which}_factor") is not None), 1.0)
            for which in ("alpha", "beta")
        )
        return Residual(stream=alpha, branch=beta, from_norm=True)

    full = residual("full_attn", "layernorm_full_attention")
    linear = residual("linear_attn", "layernorm_linear_attention")
    return Hparams(
        family="minimax",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=where(words, "attention"),
        recurrent_layer_indices=where(words, "recurrent"),
        attention=AttentionHparams(
            heads, kv_heads, head_dim, scale=head_dim**-0.5, rope=c.rope(head_dim, partial=rotary / head_dim)
        ),
        recurrent=tuple(LightningHparams(heads, head_dim, depth(i)) for i in range(n_layers)),
        moe=MoeHparams(
            n_experts,
            experts_per_token(c, n_experts, "num_local_experts"),
            c.integer("intermediate_size"),
            c.activation(recurrent=True),
        ),
        mixer_residual=tuple(full if word == "attention" else linear for word in words),
        feed_forward_residual=residual("mlp", "layernorm_mlp"),
        norm_eps=eps,
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 131072),
    )


def _default_words(c: Fields, n_layers: int) -> list[str]:
    numbers = c.get("attn_type_list")
    if numbers is None:
        return ["full_attention" if (i + 1) % 2 == 0 else "linear_attention" for i in range(n_layers)]
    return ["full_attention" if number else "linear_attention" for number in c.integers("attn_type_list")]


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
            **expert_tensors(f"{ours}.moe", f"{theirs}.block_sparse_moe", layer.moe, d, ("w1", "w3", "w2")),
        }
        mixer = f"{theirs}.self_attn"
        if layer.attention is not None:
            found |= attention_tensors(f"{ours}.attention", mixer, layer.attention, d)
        if isinstance(layer.recurrent, LightningHparams):
            inner = layer.recurrent.n_heads * layer.recurrent.head_dim
            found |= {
                f"{ours}.lightning.qkv": one(f"{mixer}.qkv_proj.weight", 3 * inner, d),
                f"{ours}.lightning.gate": one(f"{mixer}.output_gate.weight", inner, d),
                f"{ours}.lightning.norm": one(f"{mixer}.norm.weight", inner),
                f"{ours}.lightning.out": one(f"{mixer}.out_proj.weight", d, inner),
            }
    return found
