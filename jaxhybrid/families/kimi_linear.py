"""Kimi Linear and Ling/Ring 3 (bailing_hybrid): Kimi delta attention and latent attention, experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families.llama import expert_tensors, mlp_tensors
from jaxhybrid.families.names import Fields, Source, ends, experts_per_token, layer_words, one, rows, where
from jaxhybrid.families.qwen3_next import KINDS
from jaxhybrid.hparams import GatedDeltaHparams, Hparams, MlaHparams, MlpHparams, MoeHparams


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    family = c.text("model_type")
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    words = _words(c, family, n_layers)
    eps, activation = c.number("rms_norm_eps", 1e-5 if family == "kimi_linear" else 1e-6), c.activation(True)
    n_dense = c.integer("first_k_dense_replace", 1 if family == "kimi_linear" else 2, least=0)
    kinds = c.get("mlp_layer_types", ["dense" if i < n_dense else "sparse" for i in range(n_layers)])
    known = {"dense": "dense", "sparse": "sparse"}
    kinds = layer_words(Fields({"layer_types": kinds}), n_layers, known, None)
    moe, shared = _moe(c, activation) if "sparse" in kinds else (None, None)
    dense = MlpHparams(c.integer("intermediate_size"), activation)
    return Hparams(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=where(words, "attention"),
        recurrent_layer_indices=where(words, "recurrent"),
        attention=_latent_attention(c, family),
        recurrent=_delta(c, family, eps),
        mlp=tuple({"dense": dense, "sparse": shared}[kind] for kind in kinds),
        moe=tuple({"sparse": moe}.get(kind) for kind in kinds),
        norm_eps=eps,
        tie_embeddings=False,  # transformers keeps a head of its own whatever the configuration says
        context_length=c.integer("max_position_embeddings", c.integer("model_max_length", 262144)),
    )


def _words(c: Fields, family: str, n_layers: int) -> list[str]:
    """By a list of words; or Kimi lists layers, counted from 1, and Ling says how many make a group."""
    if family == "bailing_hybrid":
        group = c.integer("layer_group_size", 6)
        default = ["linear_attention" if (i + 1) % group else "full_attention" for i in range(n_layers)]
        return layer_words(c, n_layers, KINDS, default)
    linear = c.inner("linear_attn_config")
    if linear.get("kda_layers") is None:
        return layer_words(c, n_layers, KINDS, None)
    recurrent, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if sorted(recurrent + full) != list(range(1, n_layers + 1)):
        raise HparamsError(
            f"linear_attn_config: kda_layers and full_attn_layers must name layers 1 to {n_layers} once each"
        )
    default = ["linear_attention" if i + 1 in recurrent else "full_attention" for i in range(n_layers)]
    words = layer_words(c, n_layers, KINDS, default)
    if words != [KINDS[word] for word in default]:
        raise HparamsError("layer_types: contradicts linear_attn_config")
    return words


def _latent_attention(c: Fields, family: str) -> MlaHparams:
    nope, shared = c.integer("qk_nope_head_dim", 128), c.integer("qk_rope_head_dim", 64)
    rope = None
    if family == "bailing_hybrid":
        rope = dataclasses.replace(c.rope(shared, theta=6_000_000.0), interleaved=True)
    return MlaHparams(
        n_heads=c.integer("num_attention_heads"),
        kv_rank=c.integer("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=shared,
        value_dim=c.integer("v_head_dim", 128),
        scale=(nope + shared) ** -0.5,
        rope=rope,
        q_rank=None if c.get("q_lora_rank") is None else c.integer("q_lora_rank"),
        gate=family == "bailing_hybrid",
    )


def _delta(c: Fields, family: str, eps: float) -> GatedDeltaHparams:
    if family == "kimi_linear":
        linear = c.inner("linear_attn_config")
        heads = linear.integer("num_heads", c.integer("linear_num_heads", 32))
        size = linear.integer("head_dim", c.integer("linear_head_dim", 128))
        taps = linear.integer("short_conv_kernel_size", c.integer("linear_conv_kernel_dim", 4))
        return GatedDeltaHparams(
            heads, heads, size, size, taps, decay="channel", decay_rank=size, gate="sigmoid", gate_rank=size,
            norm_eps=eps,
        )  # fmt: skip
    if not c.flag("kda_safe_gate", True):
        raise HparamsError("kda_safe_gate: false is not supported")
    heads = c.integer("linear_num_heads", c.integer("num_attention_heads"))
    size = c.integer("linear_head_dim", c.integer("head_dim", 128))
    return GatedDeltaHparams(
        n_heads=heads,
        n_key_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_kernel=c.integer("short_conv_kernel_size", 4),
        decay="safe_channel",
        decay_bound=c.number("kda_lower_bound", -5.0),
        gate="sigmoid",
        norm_eps=eps,
    )


def _moe(c: Fields, activation: str) -> tuple[MoeHparams, MlpHparams]:
    """Routed experts, and those that every token takes, as one MLP. Fields have two spellings."""
    n_experts = c.integer("num_experts", c.get("num_local_experts"))
    field = "num_experts_per_token" if c.get("num_experts_per_token") is not None else "num_experts_per_tok"
    d_ff = c.integer("moe_intermediate_size")
    routed = MoeHparams(
        n_experts=n_experts,
        top_k=experts_per_token(c, n_experts, "num_experts", field),
        d_ff=d_ff,
        activation=activation,
        scores="sigmoid",
        selection_bias=True,
        n_groups=c.integer("num_expert_group", c.integer("n_group", 1)),
        top_groups=c.integer("topk_group", 1),
        renormalise=c.flag("moe_renormalize", c.flag("norm_topk_prob", True)),
        renormalise_eps=1e-20,
        multiplier=c.number("routed_scaling_factor", 1.0),
    )
    n_shared = c.integer("num_shared_experts", c.integer("n_shared_experts", 1))
    return routed, MlpHparams(n_shared * d_ff, activation)


def tensors(hp: Hparams) -> dict[str, Source]:
    d, kimi = hp.d_model, hp.family == "kimi_linear"
    embed = "model.embed_tokens.weight" if kimi else "model.word_embeddings.weight"
    found = ends(hp, embed, "model.norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        mixer = f"{theirs}.self_attn" if kimi else f"{theirs}.attention"
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
        }
        if isinstance(layer.attention, MlaHparams):
            out = "o_proj" if kimi else "dense"
            found |= _latent_tensors(f"{ours}.mla", mixer, layer.attention, d, out)
        if isinstance(layer.recurrent, GatedDeltaHparams):
            delta = _low_rank_delta_tensors if kimi else _delta_tensors
            found |= delta(f"{ours}.gated_delta", mixer, layer.recurrent, d)
        if layer.moe is None:
            found |= mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", layer.mlp, d)
            continue
        experts = f"{theirs}.block_sparse_moe" if kimi else f"{theirs}.mlp"
        names = ("w1", "w3", "w2") if kimi else ("gate_proj", "up_proj", "down_proj")
        bias = "e_score_correction_bias" if kimi else "expert_bias"
        found |= expert_tensors(f"{ours}.moe", experts, layer.moe, d, names)
        found |= mlp_tensors(f"{ours}.mlp", f"{experts}.shared_experts", layer.mlp, d)
        found[f"{ours}.moe.selection_bias"] = one(f"{experts}.gate.{bias}", layer.moe.n_experts)
    return found


def _latent_tensors(ours: str, theirs: str, hp: MlaHparams, d: int, out: str) -> dict[str, Source]:
    queries = hp.n_heads * (hp.nope_dim + hp.rope_dim)
    up = hp.n_heads * (hp.nope_dim + hp.value_dim)
    found = {
        f"{ours}.kv_down": one(f"{theirs}.kv_a_proj_with_mqa.weight", hp.kv_rank + hp.rope_dim, d),
        f"{ours}.kv_norm": one(f"{theirs}.kv_a_layernorm.weight", hp.kv_rank),
        f"{ours}.kv_up": one(f"{theirs}.kv_b_proj.weight", up, hp.kv_rank),
        f"{ours}.out": one(f"{theirs}.{out}.weight", d, hp.n_heads * hp.value_dim),
    }
    if hp.q_rank is None:
        found[f"{ours}.q"] = one(f"{theirs}.q_proj.weight", queries, d)
    else:
        found |= {
            f"{ours}.q_down": one(f"{theirs}.q_a_proj.weight", hp.q_rank, d),
            f"{ours}.q_norm": one(f"{theirs}.q_a_layernorm.weight", hp.q_rank),
            f"{ours}.q_up": one(f"{theirs}.q_b_proj.weight", queries, hp.q_rank),
        }
    if hp.gate:
        found[f"{ours}.gate"] = one(f"{theirs}.g_proj.weight", hp.n_heads, d)
    return found


def split_delta_tensors(
    ours: str, theirs: str, hp: GatedDeltaHparams, projections: tuple[str, ...], d: int, out: str
) -> dict[str, Source]:
    """A gated delta net with a convolution each for q, k and v, and its input projections in order."""
    widths = (hp.keys, hp.keys, hp.values)
    convs = [(f"{theirs}.{name}_conv1d.weight", n) for name, n in zip("qkv", widths, strict=True)]
    names = [f"{theirs}.{name}.weight" for name in projections]
    return {
        f"{ours}.in_proj": rows(zip(names, hp.projections, strict=True), d),
        f"{ours}.conv": rows(convs, 1, hp.conv_kernel),
        f"{ours}.a_log": one(f"{theirs}.A_log", hp.n_heads),
        f"{ours}.dt_bias": one(f"{theirs}.dt_bias", hp.decays),
        f"{ours}.norm": one(f"{theirs}.o_norm.weight", hp.value_dim),
        f"{ours}.out": one(f"{theirs}.{out}.weight", d, hp.values),
    }


def _delta_tensors(ours: str, theirs: str, hp: GatedDeltaHparams, d: int) -> dict[str, Source]:
    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj")
    return split_delta_tensors(ours, theirs, hp, projections, d, "dense")


def _low_rank_delta_tensors(ours: str, theirs: str, hp: GatedDeltaHparams, d: int) -> dict[str, Source]:
    assert hp.gate_rank is not None and hp.decay_rank is not None
    projections = ("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj")
    return split_delta_tensors(ours, theirs, hp, projections, d, "o_proj") | {
        f"{ours}.a_log": one(f"{theirs}.A_log", 1, 1, hp.n_heads, 1),
        f"{ours}.gate_up": one(f"{theirs}.g_b_proj.weight", hp.values, hp.gate_rank),
        f"{ours}.decay_up": one(f"{theirs}.f_b_proj.weight", hp.decays, hp.decay_rank),
    }
