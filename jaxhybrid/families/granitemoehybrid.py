"""Granite 4: Mamba-2 and attention layers by a list, a shared MLP, experts in some models."""

from __future__ import annotations

from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families.llama import attention_tensors
from jaxhybrid.families.mamba2 import mixer_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, ends, experts_per_token, one
from jaxhybrid.hparams import (
    AttentionHparams,
    Hparams,
    Mamba2Hparams,
    MlpHparams,
    MoeHparams,
    Residual,
    resolve_layers,
)


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    attention_layers, recurrent_layers = resolve_layers(
        n_layers,
        layer_types=c.get("layer_types", c.get("layers_block_type")),
        attention_layer_indices=c.get("attention_layer_indices"),
    )
    activation, eps = c.activation(bool(recurrent_layers)), c.number("rms_norm_eps", 1e-6)
    n_experts = c.integer("num_local_experts", 0, least=0)
    residual = Residual(branch=c.number("residual_multiplier", 1.0))
    return Hparams(
        family="granitemoehybrid",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=attention_layers,
        recurrent_layer_indices=recurrent_layers,
        attention=_attention(c, d_model) if attention_layers else None,
        recurrent=mamba2_hparams(c, d_model, eps) if recurrent_layers else None,
        mlp=MlpHparams(c.integer("shared_intermediate_size", 1024), activation),
        moe=_moe(c, n_experts, activation) if n_experts else None,
        norm_eps=eps,
        embedding_multiplier=c.number("embedding_multiplier", 1.0),
        mixer_residual=residual,
        feed_forward_residual=residual,
        logits_multiplier=1 / c.number("logits_scaling", 1.0),
        tie_embeddings=c.flag("tie_word_embeddings", True),
        context_length=c.integer("max_position_embeddings", 2048),
    )


def _attention(c: Fields, d_model: int) -> AttentionHparams:
    heads, kv_heads = attention_heads(c)
    head_dim = d_model // heads
    kind = c.text("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise HparamsError(f"position_embedding_type: {kind!r} is neither 'nope' nor 'rope'")
    bias = c.flag("attention_bias", False)
    return AttentionHparams(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=c.number("attention_multiplier", 1.0),
        rope=c.rope(head_dim) if kind == "rope" else None,
        bias=bias,
        out_bias=bias,
    )


def mamba2_hparams(c: Fields, d_model: int, eps: float) -> Mamba2Hparams:
    """The mixer by the fields that Granite, Bamba and Falcon-H1 share."""
    heads = c.integer("mamba_n_heads", 128)
    inner = c.get("mamba_d_ssm")
    inner = c.integer("mamba_expand", 2) * d_model if inner is None else c.integer("mamba_d_ssm")
    head_dim = c.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim == "auto" else c.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise HparamsError(
            f"mamba_n_heads: {heads} heads of mamba_d_head={head_dim} do not make the width {inner} "
            "(mamba_expand * hidden_size, or mamba_d_ssm)"
        )
    dt_min, dt_max = c.pair("time_step_limit", (0.0, float("inf")))
    return Mamba2Hparams(
        n_heads=heads,
        head_dim=head_dim,
        state_size=c.integer("mamba_d_state", 256),
        n_groups=c.integer("mamba_n_groups", 1),
        conv_kernel=c.integer("mamba_d_conv", 4),
        dt_min=dt_min,
        dt_max=dt_max,
        norm_eps=eps,
        bias=c.flag("mamba_proj_bias", False),
        conv_bias=c.flag("mamba_conv_bias", True),
    )


def _moe(c: Fields, n_experts: int, activation: str) -> MoeHparams:
    top_k = experts_per_token(c, n_experts, "num_local_experts")
    return MoeHparams(n_experts, top_k, c.integer("intermediate_size"), activation)


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        assert layer.mlp is not None
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
            f"{ours}.mlp.gate_up": one(f"{theirs}.shared_mlp.input_linear.weight", 2 * layer.mlp.d_ff, d),
            f"{ours}.mlp.down": one(f"{theirs}.shared_mlp.output_linear.weight", d, layer.mlp.d_ff),
        }
        if layer.attention is not None:
            found |= attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d)
        if layer.recurrent is not None:
            found |= mixer_tensors(f"{ours}.mamba2", f"{theirs}.mamba", layer.recurrent, d)
        if layer.moe is not None:
            n, ff, experts = layer.moe.n_experts, layer.moe.d_ff, f"{theirs}.block_sparse_moe"
            found |= {
                f"{ours}.moe.router": one(f"{experts}.router.layer.weight", n, d),
                f"{ours}.moe.gate_up": one(f"{experts}.input_linear.weight", n, 2 * ff, d),
                f"{ours}.moe.down": one(f"{experts}.output_linear.weight", n, d, ff),
            }
    return found
