"""Nemotron-H and Nemotron 3: one mixer, MLP or set of experts a layer, by a pattern."""

from __future__ import annotations

from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families.llama import attention_tensors, expert_tensors, mlp_tensors
from jaxhybrid.families.mamba2 import mixer_tensors
from jaxhybrid.families.names import (
    Fields,
    Source,
    attention_heads,
    ends,
    experts_per_token,
    one,
)
from jaxhybrid.hparams import (
    AttentionHparams,
    Hparams,
    Mamba2Hparams,
    MlpHparams,
    MoeHparams,
    resolve_layers,
)

_KIND_OF = {"-": "mlp", "E": "moe"}


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    words = c.get("layers_block_type", c.get("layer_types"))
    pattern = c.get("hybrid_override_pattern")
    if words is None and pattern is None:
        raise HparamsError("hybrid_override_pattern: missing from the configuration")
    n_layers = len(pattern if words is None else words)
    attention_layers, recurrent_layers = resolve_layers(
        n_layers,
        layer_types=words,
        pattern=pattern,
        field_names={"pattern": "hybrid_override_pattern", "layer_types": "layers_block_type"},
    )
    kinds = [_KIND_OF.get(str(w), str(w)) for w in (pattern if words is None else words)]
    heads, kv_heads = attention_heads(c)
    head_dim, eps = c.integer("head_dim", 128), c.number("layer_norm_epsilon", 1e-5)
    if c.get("sliding_window") is not None:
        raise HparamsError(f"sliding_window: {c.get('sliding_window')!r} is not supported")
    bias = c.flag("attention_bias", False)
    activation, mlp_bias = c.activation(field="mlp_hidden_act", default="relu2"), c.flag("mlp_bias", False)
    dense = MlpHparams(c.integer("intermediate_size", 21504), activation, mlp_bias, gated=False)
    shared = MlpHparams(
        c.integer("moe_shared_expert_intermediate_size", 7688), activation, mlp_bias, gated=False
    )
    moe = _moe(c, activation) if "moe" in kinds else None
    c.activation(recurrent=True, field="mamba_hidden_act")
    return Hparams(
        family="nemotron_h",
        n_layers=n_layers,
        d_model=c.integer("hidden_size"),
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=attention_layers,
        recurrent_layer_indices=recurrent_layers,
        attention=AttentionHparams(heads, kv_heads, head_dim, scale=head_dim**-0.5, bias=bias, out_bias=bias),
        recurrent=_mamba2(c, eps),
        mlp=tuple({"mlp": dense, "moe": shared}.get(kind) for kind in kinds),
        moe=tuple(moe if kind == "moe" else None for kind in kinds),
        norm_eps=eps,
        tie_embeddings=c.flag("tie_word_embeddings", False),
        residual_in_float32=c.flag("residual_in_fp32", False),
        context_length=c.integer("max_position_embeddings", 4096),
    )


def _mamba2(c: Fields, eps: float) -> Mamba2Hparams:
    dt_min, dt_max = c.pair("time_step_limit", (0.0, float("inf")))
    return Mamba2Hparams(
        n_heads=c.integer("mamba_num_heads", 128),
        head_dim=c.integer("mamba_head_dim", 64),
        state_size=c.integer("ssm_state_size", 128),
        n_groups=c.integer("n_groups", 8),
        conv_kernel=c.integer("conv_kernel", 4),
        dt_min=dt_min,
        dt_max=dt_max,
        norm_eps=eps,
        bias=c.flag("use_bias", False) or c.flag("mamba_proj_bias", False),
        conv_bias=c.flag("use_conv_bias", True),
    )


def _moe(c: Fields, activation: str) -> MoeHparams:
    n_experts = c.integer("n_routed_experts", 8)
    return MoeHparams(
        n_experts=n_experts,
        top_k=experts_per_token(c, n_experts, "n_routed_experts"),
        d_ff=c.integer("moe_intermediate_size"),
        activation=activation,
        gated=False,
        scores="sigmoid",
        selection_bias=True,
        n_groups=c.integer("n_group", 1),
        top_groups=c.integer("topk_group", 1),
        renormalise=c.flag("norm_topk_prob", True),
        renormalise_eps=1e-20,
        multiplier=c.number("routed_scaling_factor", 1.0),
        latent=c.get("moe_latent_size") and c.integer("moe_latent_size"),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"backbone.layers.{i}.mixer"
        norm = one(f"backbone.layers.{i}.norm.weight", d)
        found[f"{ours}.mlp_norm" if layer.mlp is not None else f"{ours}.norm"] = norm
        if layer.attention is not None:
            found |= attention_tensors(f"{ours}.attention", theirs, layer.attention, d)
        elif layer.recurrent is not None:
            found |= mixer_tensors(f"{ours}.mamba2", theirs, layer.recurrent, d)
        elif layer.moe is not None:
            found |= mlp_tensors(f"{ours}.mlp", f"{theirs}.shared_experts", layer.mlp, d)
            found |= expert_tensors(f"{ours}.moe", theirs, layer.moe, d)
            bias = one(f"{theirs}.gate.e_score_correction_bias", layer.moe.n_experts)
            found[f"{ours}.moe.selection_bias"] = bias
            if (latent := layer.moe.latent) is not None:
                found[f"{ours}.moe.latent_down"] = one(f"{theirs}.fc1_latent_proj.weight", latent, d)
                found[f"{ours}.moe.latent_up"] = one(f"{theirs}.fc2_latent_proj.weight", d, latent)
        else:
            found |= mlp_tensors(f"{ours}.mlp", theirs, layer.mlp, d)
    return found
