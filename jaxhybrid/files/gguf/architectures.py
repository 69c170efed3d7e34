"""llama.cpp's architectures: which fields of config.json are which of its metadata, read both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.gguf.fields import (
    BASE,
    HEADS,
    MULTIPLIERS,
    NORM,
    SIZES,
    WIDTH,
    Config,
    Field,
    Meta,
    const,
    first,
    head_dim,
    of,
    ssm,
)
from jaxhybrid.files.gguf.rope import rope_config, rope_metadata
from jaxhybrid.hparams import Hparams


@dataclass(frozen=True)
class Architecture:
    """family: `model_type` of its configurations, or a choice of it. fields: what is renamed. config: the
    fields that need more than that. metadata: their inverse."""

    family: str | Callable[[Meta], str]
    fields: tuple[Field, ...]
    config: Callable[[Meta], Config] = lambda meta: {}
    metadata: Callable[[Hparams], Config] = rope_metadata


def _rope(meta: Meta) -> Config:
    return {"rope_parameters": rope_config(meta)}


def _llama(meta: Meta) -> Config:
    if meta.get("expert_count", default=0):
        raise CheckpointError(f"{meta.path}: {meta.arch} with experts is not supported")
    bias = meta.any_layer("attn_q.bias") or meta.any_layer("attn_output.bias")
    return {"attention_bias": bias, "mlp_bias": meta.any_layer("ffn_up.bias"), **_rope(meta)}


def _words(meta: Meta, attention: str, recurrent: str, interval: int = 0) -> list[str]:
    return [attention if n else recurrent for n in meta.heads_of_layers(interval)]


def _is_bamba(meta: Meta) -> bool:
    scaled = any(meta.get(key, float) is not None for key in ("embedding_scale", "logit_scale"))
    return meta.get("rope.scaling.finetuned", bool, True) and not scaled


def _granite_hybrid(meta: Meta) -> Config:
    words = _words(meta, "attention", "mamba")
    found: Config = {"layer_types": words, "attention_bias": meta.any_layer("attn_q.bias")}
    found |= {"mamba_d_head": "auto", "mamba_conv_bias": meta.any_layer("ssm_conv1d.bias"), **_rope(meta)}
    found["mamba_proj_bias"] = meta.any_layer("ssm_in.bias")
    inner, width = meta.get("ssm.inner_size", default=0), meta.need("embedding_length")
    if inner and width and inner % width == 0:
        found["mamba_expand"] = inner // width  # all that transformers looks at
    if _is_bamba(meta):
        found["attn_layer_indices"] = [i for i, word in enumerate(words) if word == "attention"]
        found["mlp_bias"] = meta.any_layer("ffn_up.bias")
        found["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        del found["layer_types"]
        return found
    rotates = meta.get("rope.scaling.finetuned", bool, True)
    width = meta.get("feed_forward_length")
    experts = meta.get("expert_count", default=0)
    found |= {
        "position_embedding_type": "rope" if rotates else "nope",
        "shared_intermediate_size": meta.get("expert_shared_feed_forward_length") if experts else width,
        "attention_multiplier": meta.get("attention.scale", float) or meta.head_dim() ** -0.5,
    }
    return found


def _granite_hybrid_metadata(hp: Hparams) -> Config:
    rotates = any(hp.rope_of(i) is not None for i in hp.attention_layer_indices)
    moe, shared = first(hp.moe), of("mlp", "d_ff")(hp)
    found = rope_metadata(hp) | {"rope.scaling.finetuned": rotates}
    found |= {"expert_count": 0, "feed_forward_length": shared} if moe is None else {
        "feed_forward_length": moe.d_ff,
        "expert_shared_feed_forward_length": shared,
    }  # fmt: skip
    if hp.family != "bamba":
        found |= {f.key: f.get(hp) for f in MULTIPLIERS}
    return found


EXPERTS = (
    Field("expert_count", "num_experts", of("moe", "n_experts")),
    Field("expert_used_count", "num_experts_per_tok", of("moe", "top_k")),
)
LOCAL_EXPERTS = (dataclasses.replace(EXPERTS[0], name="num_local_experts"), EXPERTS[1])
EXPERT_WIDTH = (Field("expert_feed_forward_length", "moe_intermediate_size", of("moe", "d_ff")),)
SCALED_EXPERTS = (
    Field("expert_weights_scale", "routed_scaling_factor", of("moe", "multiplier"), float),
    Field("expert_weights_norm", "norm_topk_prob", of("moe", "renormalise"), bool),
)
GROUPS = (
    Field("expert_group_count", "n_group", of("moe", "n_groups")),
    Field("expert_group_used_count", "topk_group", of("moe", "top_groups")),
)
SIGMOID = (Field("expert_gating_func", None, lambda hp: 2 if first(hp.moe) is not None else None),)
UNUSED = (Field("feed_forward_length", None, const(0)), Field("attention.head_count", None, const(0)))
"""What llama.cpp asks every model for."""


def _mamba(meta: Meta) -> Config:
    return {"use_conv_bias": meta.any_layer("ssm_conv1d.bias"), "use_bias": meta.any_layer("ssm_in.bias")}


def _mamba2(meta: Meta) -> Config:
    heads, inner, d = (meta.need(k) for k in ("ssm.time_step_rank", "ssm.inner_size", "embedding_length"))
    return _mamba(meta) | {"head_dim": inner // max(1, heads), "expand": inner // max(1, d)}


def _jamba(meta: Meta) -> Config:
    words = _words(meta, "attention", "mamba")
    sparse = [i for i in range(meta.n_layers) if meta.has(f"blk.{i}.ffn_gate_inp.weight")]
    attending = [i for i, word in enumerate(words) if word == "attention"]
    offset, period = _every(attending, meta.n_layers)
    first, step = _every(sparse, meta.n_layers)
    found: Config = {
        "attn_layer_offset": offset,
        "attn_layer_period": period,
        "mamba_expand": meta.need("ssm.inner_size") // max(1, meta.need("embedding_length")),
        "expert_layer_offset": first,
        "expert_layer_period": step,
        "mamba_conv_bias": meta.any_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.any_layer("ssm_in.bias"),
    }
    if attending != list(range(offset, meta.n_layers, period)):
        found["layers_block_type"] = words  # transformers knows evenly spaced ones only
    return found if sparse else found | {"num_experts": 1}


def _every(layers: list[int], n_layers: int) -> tuple[int, int]:
    """The first layer and the distance to the next, where such layers are evenly spaced."""
    first = layers[0] if layers else 0
    return first, max(first + 1, layers[1] - first if len(layers) > 1 else n_layers)


def _falcon_h1(meta: Meta) -> Config:
    # llama.cpp's graph gates before it norms
    return {
        "mamba_rms_norm": meta.any_layer("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": meta.any_layer("attn_q.bias"),
        "mlp_bias": meta.any_layer("ffn_up.bias"),
        "mamba_conv_bias": meta.any_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.any_layer("ssm_in.bias"),
        **_rope(meta),
    }


def _nemotron(meta: Meta) -> Config:
    widths = meta.each("feed_forward_length", meta.n_layers, 0)
    kinds = [
        "*" if kv else "M" if not ff else "E" if meta.has(f"blk.{i}.ffn_gate_inp.weight") else "-"
        for i, (kv, ff) in enumerate(zip(meta.heads_of_layers(), widths, strict=True))
    ]
    heads, inner = meta.need("ssm.time_step_rank"), meta.need("ssm.inner_size")
    eps = meta.get("attention.layer_norm_rms_epsilon", float) or meta.need(
        "attention.layer_norm_epsilon", float
    )
    return {
        "hybrid_override_pattern": "".join(kinds),
        "mamba_head_dim": inner // max(1, heads),
        "layer_norm_epsilon": eps,
        "use_conv_bias": meta.any_layer("ssm_conv1d.bias"),
        "use_bias": meta.any_layer("ssm_in.bias"),
        "attention_bias": meta.any_layer("attn_q.bias"),
        "mlp_bias": meta.any_layer("ffn_up.bias"),
    }


def _nemotron_metadata(hp: Hparams) -> Config:
    widths = [
        layer.moe.d_ff if layer.moe is not None else layer.mlp.d_ff if layer.mlp is not None else 0
        for layer in hp.layers
    ]
    dense = next((layer.mlp for layer in hp.layers if layer.mlp is not None and layer.moe is None), None)
    shared = next((layer.mlp for layer in hp.layers if layer.moe is not None), None)
    found: Config = {
        "feed_forward_length": widths,
        "attention.layer_norm_epsilon": hp.norm_eps,
        "attention.layer_norm_rms_epsilon": hp.norm_eps,
        "rope.dimension_count": head_dim(hp),
    }
    if dense is not None and shared is not None:
        raise CheckpointError("GGUF files of Nemotron-H hold MLPs or experts, not both; nothing was written")
    if shared is not None:
        found |= {"expert_shared_feed_forward_length": shared.d_ff, "expert_shared_count": 1}
    return found


def _lfm2(meta: Meta) -> Config:
    return {
        "layer_types": _words(meta, "full_attention", "conv"),
        "block_auto_adjust_ff_dim": False,
        "use_expert_bias": meta.any_layer("exp_probs_b.bias"),
        **_rope(meta),
    }


def _gemma3(meta: Meta) -> Config:
    n, d = meta.n_layers, meta.need("embedding_length")
    pattern = meta.each("attention.sliding_window_pattern", n, 6)
    local = [bool(p) if isinstance(p, bool) else (i + 1) % p != 0 for i, p in enumerate(pattern)]
    window = meta.get("attention.sliding_window", default=0)
    # Gemma 3 27B alone scales by the width of the model
    scalar = d / meta.need("attention.head_count") if n == 62 else meta.head_dim()
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or None,
        "layer_types": [("sliding" if one and window else "full") + "_attention" for one in local],
        "rope_parameters": {
            "full_attention": rope_config(meta),
            "sliding_attention": {"rope_theta": meta.get("rope.freq_base_swa", float, 10000.0)},
        },
        "final_logit_softcapping": meta.get("final_logit_softcapping", float) or None,
    }


def _gemma3_metadata(hp: Hparams) -> Config:
    local = [hp.is_windowed_layer(i) for i in range(hp.n_layers)]
    found = rope_metadata(hp) | {"attention.sliding_window": hp.window}
    if local != [(i + 1) % 6 != 0 for i in range(hp.n_layers)]:
        found["attention.sliding_window_pattern"] = local
    ropes = {rope.theta for i in range(hp.n_layers) if local[i] and (rope := hp.rope_of(i)) is not None}
    return found | ({"rope.freq_base_swa": ropes.pop()} if len(ropes) == 1 else {})


DELTA = (
    Field("ssm.conv_kernel", "linear_conv_kernel_dim", of("recurrent", "conv_kernel")),
    Field("ssm.state_size", "linear_key_head_dim", of("recurrent", "key_dim")),
    Field("ssm.group_count", "linear_num_key_heads", of("recurrent", "n_key_heads")),
    Field("ssm.time_step_rank", "linear_num_value_heads", of("recurrent", "n_heads")),
    Field("ssm.inner_size", None, of("recurrent", "values")),
)


def _qwen(meta: Meta) -> Config:
    return {
        "layer_types": _words(meta, "full_attention", "linear_attention", interval=4),
        "linear_value_head_dim": meta.need("ssm.inner_size") // max(1, meta.need("ssm.time_step_rank")),
        "attention_bias": False,
        **({} if meta.get("expert_count", default=0) else {"num_experts": 0}),
        **_rope(meta),
    }


def _qwen_metadata(hp: Hparams) -> Config:
    found = rope_metadata(hp)
    found["attention.recurrent_layers"] = [hp.is_recurrent_layer(i) for i in range(hp.n_layers)]
    if hp.family != "qwen3_next":
        # text alone has one position a token, so that the sections do not matter
        half = found["rope.dimension_count"] // 2
        found["rope.dimension_sections"] = [half - 2 * (half // 3), half // 3, half // 3, 0]
    if first(hp.moe) is not None:
        found["expert_shared_feed_forward_length"] = of("mlp", "d_ff")(hp)
    return found


SHARED = (Field("expert_shared_feed_forward_length", "shared_expert_intermediate_size", const(None)),)


def _kimi(meta: Meta) -> Config:
    layers = list(enumerate(meta.heads_of_layers(), 1))
    rotated = meta.need("rope.dimension_count")
    betas = (meta.tensors.get(f"blk.{i - 1}.ssm_beta.weight") for i, n in layers if not n)
    heads = next((beta.shape[0] for beta in betas if beta is not None), meta.need("attention.head_count"))
    return {
        "linear_attn_config": {
            "kda_layers": [i for i, n in layers if not n],
            "full_attn_layers": [i for i, n in layers if n],
            "num_heads": heads,
            "head_dim": meta.need("kda.head_dim"),
            "short_conv_kernel_size": meta.need("ssm.conv_kernel"),
        },
        "qk_nope_head_dim": meta.need("attention.key_length_mla") - rotated,
        "moe_renormalize": meta.get("expert_weights_norm", bool, True),
    }


def _kimi_metadata(hp: Hparams) -> Config:
    mla, delta, moe = (first(part) for part in (hp.attention, hp.recurrent, hp.moe))
    n_dense = sum(layer.moe is None for layer in hp.layers)
    dense = next((layer.mlp.d_ff for layer in hp.layers if layer.moe is None and layer.mlp is not None), 0)
    shared = next(
        (layer.mlp.d_ff for layer in hp.layers if layer.moe is not None and layer.mlp is not None), 0
    )
    return {
        "attention.head_count_kv": [int(hp.is_attention_layer(i)) for i in range(hp.n_layers)],
        "attention.key_length": mla.kv_rank + mla.rope_dim,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": mla.nope_dim + mla.rope_dim,
        "kda.head_dim": delta.key_dim,
        "ssm.conv_kernel": delta.conv_kernel,
        "feed_forward_length": dense,
        "leading_dense_block_count": n_dense,
        "expert_shared_count": shared // moe.d_ff,
    }


LATENT = (
    Field("attention.kv_lora_rank", "kv_lora_rank", of("attention", "kv_rank")),
    Field("attention.q_lora_rank", "q_lora_rank", of("attention", "q_rank")),
    Field("rope.dimension_count", "qk_rope_head_dim", of("attention", "rope_dim")),
    Field("attention.value_length_mla", "v_head_dim", of("attention", "value_dim")),
)
_MAMBA2_OF_GRANITE = ssm(
    kernel="mamba_d_conv",
    state="mamba_d_state",
    inner="mamba_d_ssm",
    heads="mamba_n_heads",
    groups="mamba_n_groups",
)
_NEMOTRON = Architecture(
    "nemotron_h",
    (
        *BASE, *HEADS, *SIZES, *EXPERT_WIDTH, *SCALED_EXPERTS, *GROUPS, *SIGMOID,
        Field("feed_forward_length", "intermediate_size", const(None)),
        Field("expert_count", "n_routed_experts", of("moe", "n_experts")), EXPERTS[1],
        Field("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", const(None)),
        Field("moe_latent_size", "moe_latent_size", of("moe", "latent")),
        *ssm(
            kernel="conv_kernel", state="ssm_state_size", inner="", heads="mamba_num_heads", groups="n_groups"
        ),
    ),
    _nemotron,
    _nemotron_metadata,
)  # fmt: skip
_QWEN_HEADS = (HEADS[0], dataclasses.replace(HEADS[1], get=of("attention", "n_kv_heads")))
_QWEN = (*BASE, *NORM, *_QWEN_HEADS, *SIZES, *DELTA)
_QWEN_EXPERTS = (*_QWEN, *EXPERTS, *EXPERT_WIDTH, *SHARED)
_LLAMA = (*BASE, *NORM, *HEADS, *SIZES, *WIDTH)
_LFM2_NORM = (dataclasses.replace(NORM[0], name="norm_eps"),)
_LFM2_CACHE = (Field("shortconv.l_cache", "conv_L_cache", of("recurrent", "conv_kernel")),)
_EPS2 = (dataclasses.replace(NORM[0], name="layer_norm_epsilon"),)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, _llama),
    "qwen3": Architecture("qwen3", _LLAMA, _llama),
    "granite": Architecture("granite", (*BASE, *NORM, *HEADS, *WIDTH, *MULTIPLIERS), _llama),
    "granitehybrid": Architecture(
        lambda meta: "bamba" if _is_bamba(meta) else "granitemoehybrid",
        (
            *BASE, *NORM, *HEADS, *LOCAL_EXPERTS, *_MAMBA2_OF_GRANITE,
            *(dataclasses.replace(f, get=const(None)) for f in (*WIDTH, *MULTIPLIERS)),
        ),
        _granite_hybrid,
        _granite_hybrid_metadata,
    ),
    "mamba": Architecture(
        lambda meta: "falcon_mamba" if meta.get("ssm.dt_b_c_rms", bool, False) else "mamba",
        (
            *BASE, *_EPS2, *UNUSED,
            *ssm(kernel="conv_kernel", state="state_size", inner="intermediate_size", rank="time_step_rank"),
            Field("ssm.dt_b_c_rms", None, lambda hp: hp.family == "falcon_mamba", bool),
        ),
        _mamba,
    ),
    "mamba2": Architecture(
        "mamba2",
        (
            *BASE, *_EPS2, *UNUSED,
            *ssm(kernel="conv_kernel", state="state_size", inner="", heads="num_heads", groups="n_groups"),
        ),
        _mamba2,
    ),
    "jamba": Architecture(
        "jamba",
        (
            *BASE, *NORM, *HEADS, *WIDTH, *EXPERTS,
            *ssm(kernel="mamba_d_conv", state="mamba_d_state", inner="", rank="mamba_dt_rank"),
        ),
        _jamba,
    ),
    "falcon-h1": Architecture(
        "falcon_h1", (*BASE, *NORM, *HEADS, *SIZES, *WIDTH, *_MAMBA2_OF_GRANITE), _falcon_h1
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "lfm2": Architecture("lfm2", (*BASE, *_LFM2_NORM, *HEADS, *WIDTH, *_LFM2_CACHE), _lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe",
        (
            *BASE, *_LFM2_NORM, *HEADS, *WIDTH, *_LFM2_CACHE,
            *EXPERTS, *EXPERT_WIDTH, *SCALED_EXPERTS, *SIGMOID,
            Field(
                "leading_dense_block_count",
                "num_dense_layers",
                lambda hp: sum(layer.moe is None for layer in hp.layers),
            ),
        ),
        _lfm2,
    ),
    "gemma3": Architecture("gemma3_text", _LLAMA, _gemma3, _gemma3_metadata),
    "qwen3next": Architecture("qwen3_next", (*_QWEN_EXPERTS, *WIDTH), _qwen, _qwen_metadata),
    "qwen35": Architecture("qwen3_5_text", (*_QWEN, *WIDTH), _qwen, _qwen_metadata),
    "qwen35moe": Architecture("qwen3_5_moe_text", _QWEN_EXPERTS, _qwen, _qwen_metadata),
    "kimi-linear": Architecture(
        "kimi_linear",
        (
            *BASE, *NORM, HEADS[0], *LATENT, *EXPERTS, *EXPERT_WIDTH, *SCALED_EXPERTS, *SIGMOID,
            Field("expert_group_count", "num_expert_group", of("moe", "n_groups")), GROUPS[1],
            Field("feed_forward_length", "intermediate_size", const(None)),
            Field("leading_dense_block_count", "first_k_dense_replace", const(None)),
            Field("expert_shared_count", "num_shared_experts", const(None)),
        ),
        _kimi,
        _kimi_metadata,
    ),
}  # fmt: skip
