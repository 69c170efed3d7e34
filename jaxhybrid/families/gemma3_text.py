"""Gemma 3, the text part: attention in every layer, most with a sliding window."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families.llama import attention_tensors, mlp_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, ends, layer_words, one
from jaxhybrid.hparams import AttentionHparams, Hparams, MlpHparams, RopeHparams


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    heads, kv_heads = attention_heads(c)
    head_dim = c.integer("head_dim", 256)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if c.get(field) is not None:
            raise HparamsError(f"{field}: {c.get(field)!r} is not supported")
    if c.flag("use_bidirectional_attention", False):
        raise HparamsError(
            "use_bidirectional_attention: true is not supported, a cache needs causal attention"
        )
    bias, eps = c.flag("attention_bias", False), c.number("rms_norm_eps", 1e-6)
    full_rope, local_rope = _ropes(c, head_dim)
    full = AttentionHparams(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        rope=full_rope,
        bias=bias,
        out_bias=bias,
        qk_norm_eps=eps,
        qk_norm_offset=1.0,
    )
    local = dataclasses.replace(full, rope=local_rope, window=c.integer("sliding_window", 4096))
    return Hparams(
        family="gemma3_text",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=tuple(range(n_layers)),
        attention=tuple(local if is_local else full for is_local in _local_layers(c, n_layers)),
        mlp=MlpHparams(c.integer("intermediate_size"), c.text("hidden_activation", "gelu_pytorch_tanh")),
        norms="both",
        norm_eps=eps,
        norm_offset=1.0,
        embedding_multiplier=math.sqrt(d_model),
        tie_embeddings=c.flag("tie_word_embeddings", True),
        context_length=c.integer("max_position_embeddings", 131072),
    )


def _local_layers(c: Fields, n_layers: int) -> list[bool]:
    """Which layers have the window: by `layer_types`, or all but every n-th."""
    pattern = c.integer("sliding_window_pattern", c.get("_sliding_window_pattern", 6))
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(n_layers)]
    known = {"sliding_attention": "window", "full_attention": "all"}
    return [word == "window" for word in layer_words(c, n_layers, known, default)]


def _ropes(c: Fields, head_dim: int) -> tuple[RopeHparams, RopeHparams]:
    """Of layers without and with a window: two bases, and scaling for the first only."""
    nested = c.get("rope_parameters")
    if isinstance(nested, Mapping) and "full_attention" in nested:
        kinds = [nested["full_attention"], nested.get("sliding_attention", {"rope_theta": 10000.0})]
        full, local = (Fields({"rope_parameters": kind}).rope(head_dim) for kind in kinds)
        return full, local
    full = Fields(
        {
            "rope_theta": c.number("rope_theta", 1_000_000.0),
            "rope_scaling": c.get("rope_scaling", nested),
        }
    ).rope(head_dim)
    return full, RopeHparams(dim=head_dim, theta=c.number("rope_local_base_freq", 10000.0))


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.post_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.pre_feedforward_layernorm.weight", d),
            f"{ours}.mlp_post_norm": one(f"{theirs}.post_feedforward_layernorm.weight", d),
            **attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d),
            **mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", layer.mlp, d),
        }
    return found
