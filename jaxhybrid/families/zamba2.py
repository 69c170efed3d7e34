"""Zamba and Zamba2: Mamba layers, some of which read a transformer block that they share."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxhybrid.errors import HparamsError
from jaxhybrid.families.llama import attention_tensors, mlp_tensors
from jaxhybrid.families.mamba import dt_rank
from jaxhybrid.families.mamba2 import mixer_tensors
from jaxhybrid.families.names import Fields, Source, attention_heads, ends, one
from jaxhybrid.hparams import (
    AttentionHparams,
    Hparams,
    Mamba1Hparams,
    Mamba2Hparams,
    MlpHparams,
    RecurrentHparams,
    resolve_layers,
)


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    family = c.text("model_type")
    second = family == "zamba2"
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    words = _words(c, second, n_layers)
    attention_layers, recurrent_layers = resolve_layers(
        n_layers, layer_types=words, field_names={"layer_types": "layers_block_type"}
    )
    heads, kv_heads = attention_heads(c)
    head_dim = 2 * d_model // heads if second else c.integer("attention_head_dim", 2 * d_model // heads)
    if c.flag("add_bias_linear", False):
        raise HparamsError("add_bias_linear: true is not supported")
    rank = c.integer("adapter_rank", 128) if second else None
    n_blocks = c.integer("num_mem_blocks", 1) if second else 1
    attending = c.flag("use_shared_attention_adapter", False) if second else False
    rotated = c.flag("use_mem_rope", False) if second else False
    return Hparams(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=attention_layers,
        recurrent_layer_indices=recurrent_layers,
        attention=AttentionHparams(
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=(head_dim / 2) ** -0.5,
            rope=c.rope(head_dim) if rotated else None,
            d_in=2 * d_model,
            adapter_rank=rank if attending else None,
        ),
        recurrent=_mamba2(c, d_model) if second else _mamba1(c, d_model),
        shared_blocks=tuple(
            attention_layers.index(i) % n_blocks if i in attention_layers else None for i in range(n_layers)
        ),
        shared_mlp=MlpHparams(
            c.integer("intermediate_size", 4 * d_model),
            c.activation(default="gelu"),
            adapter_rank=rank,
        ),
        norm_eps=c.number("rms_norm_eps", 1e-5),
        tie_embeddings=c.flag("tie_word_embeddings", True),
        context_length=c.integer("max_position_embeddings", 4096),
    )


def _words(c: Fields, second: bool, n_layers: int) -> list[str]:
    words = c.get("layers_block_type", c.get("layer_types"))
    if words is not None:
        return words
    if second:
        hybrid = c.integers("hybrid_layer_ids")
        return ["hybrid" if i in hybrid else "mamba" for i in range(n_layers)]
    period, offset = c.integer("attn_layer_period", 6), c.integer("attn_layer_offset", 4, least=0)
    return ["hybrid" if i % period == offset else "mamba" for i in range(n_layers)]


def _mamba1(c: Fields, d_model: int) -> Mamba1Hparams:
    c.activation(recurrent=True, field="hidden_mamba_act")
    return Mamba1Hparams(
        d_inner=c.integer("mamba_expand", 2) * d_model,
        state_size=c.integer("mamba_d_state", 16),
        dt_rank=dt_rank(c, "mamba_dt_rank", d_model),
        conv_kernel=c.integer("mamba_d_conv", 4),
        n_heads=c.integer("n_mamba_heads", 2),
        bias=c.flag("mamba_proj_bias", False),
        conv_bias=c.flag("mamba_conv_bias", True),
    )


def _mamba2(c: Fields, d_model: int) -> Mamba2Hparams:
    heads = c.integer("n_mamba_heads", 8)
    dt_min, dt_max = c.pair("time_step_limit", (0.0, float("inf")))
    return Mamba2Hparams(
        n_heads=heads,
        head_dim=c.integer("mamba_expand", 2) * d_model // heads,
        state_size=c.integer("mamba_d_state", 64),
        n_groups=c.integer("mamba_ngroups", 1),
        conv_kernel=c.integer("mamba_d_conv", 4),
        dt_min=dt_min,
        dt_max=dt_max,
        norm_eps=1e-5,  # whatever rms_norm_eps says
        conv_bias=c.flag("use_conv_bias", True),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    d, second = hp.d_model, hp.family == "zamba2"
    found = ends(hp, "model.embed_tokens.weight", "model.final_layernorm.weight")
    first_user: dict[int, str] = {}
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        decoder, block = theirs, hp.shared_block_of(i)
        if block is not None:
            decoder = f"{theirs}.mamba_decoder"
            name = "shared_transformer" if second else "shared_transf"
            weights = first_user.setdefault(block, f"{theirs}.{name}")
            number = hp.attention_layer_indices.index(i)
            found[f"{ours}.shared.out"] = one(f"{theirs}.linear.weight", d, d)
            found |= _adapter_tensors(f"{ours}.shared", weights, number, hp, i)
        found[f"{ours}.norm"] = one(f"{decoder}.input_layernorm.weight", d)
        mixer = mixer_tensors if second else _mamba1_tensors
        found |= mixer(f"{ours}.{'mamba2' if second else 'mamba1'}", f"{decoder}.mamba", layer.recurrent, d)
    for block, theirs in first_user.items():
        found |= _shared_tensors(f"shared.{block}", theirs, hp)
    return found


def _shared_tensors(ours: str, theirs: str, hp: Hparams) -> dict[str, Source]:
    """A block's weights, which lie in the first layer that uses it."""
    d, mlp = hp.d_model, hp.shared_mlp
    assert mlp is not None and isinstance(hp.attention, AttentionHparams)
    feed = f"{theirs}.feed_forward"
    found = {
        f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", 2 * d),
        f"{ours}.mlp_norm": one(f"{theirs}.pre_ff_layernorm.weight", d),
        **attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", hp.attention, d),
        **mlp_tensors(f"{ours}.mlp", feed, mlp, d),
    }
    if hp.family == "zamba2":
        found[f"{ours}.mlp.gate_up"] = one(f"{feed}.gate_up_proj.weight", 2 * mlp.d_ff, d)
    return found


def _adapter_tensors(ours: str, theirs: str, number: int, hp: Hparams, i: int) -> dict[str, Source]:
    """What layer `i`, the `number`-th to use a shared block, adds to its weights."""
    d, mlp, attention = hp.d_model, hp.shared_mlp, hp.layers[i].attention
    assert mlp is not None and isinstance(attention, AttentionHparams)
    found: dict[str, Source] = {}

    def adapter(path: str, name: str, n_out: int, n_in: int, rank: int) -> None:
        found[f"{path}.down"] = one(f"{theirs}.{name}.{number}.0.weight", rank, n_in)
        found[f"{path}.up"] = one(f"{theirs}.{name}.{number}.1.weight", n_out, rank)

    if (rank := mlp.adapter_rank) is not None:
        path = f"{ours}.mlp.gate_up_adapter"
        adapter(path, "feed_forward.gate_up_proj_adapter_list", 2 * mlp.d_ff, d, rank)
    if (rank := attention.adapter_rank) is not None:
        inner, kv = attention.n_heads * attention.head_dim, attention.n_kv_heads * attention.head_dim
        for name, width in (("q", inner), ("k", kv), ("v", kv)):
            path = f"{ours}.attention.{name}_adapter"
            adapter(path, f"self_attn.linear_{name}_adapter_list", width, 2 * d, rank)
    return found


def _mamba1_tensors(ours: str, theirs: str, hp: RecurrentHparams | None, d: int) -> dict[str, Source]:
    """Zamba's Mamba: heads in the tensors' shapes, the two halves of the input projection row by row."""
    assert isinstance(hp, Mamba1Hparams)
    heads, inner, n = hp.n_heads, hp.d_inner, hp.state_size
    size = inner // heads
    halves = tuple(int(i) for i in np.arange(2 * inner).reshape(inner, 2).T.reshape(-1))
    found = {
        f"{ours}.in_proj": Source((f"{theirs}.in_proj.weight",), ((2 * inner, d),), halves),
        f"{ours}.conv": one(f"{theirs}.conv1d.weight", inner, 1, hp.conv_kernel),
        f"{ours}.x_proj": one(f"{theirs}.x_proj_weight", heads, hp.dt_rank + 2 * n, size),
        f"{ours}.dt_proj": one(f"{theirs}.dt_proj_weight", heads, size, hp.dt_rank),
        f"{ours}.dt_bias": one(f"{theirs}.dt_proj_bias", heads, size),
        f"{ours}.a_log": one(f"{theirs}.A_log", heads, size, n),
        f"{ours}.d": one(f"{theirs}.D", heads, size),
        f"{ours}.out": one(f"{theirs}.out_proj.weight", d, inner),
    }
    if hp.conv_bias:
        found[f"{ours}.conv_bias"] = one(f"{theirs}.conv1d.bias", inner)
    if hp.bias:
        found[f"{ours}.in_bias"] = Source((f"{theirs}.in_proj.bias",), ((2 * inner,),), halves)
        found[f"{ours}.out_bias"] = one(f"{theirs}.out_proj.bias", d)
    return found
