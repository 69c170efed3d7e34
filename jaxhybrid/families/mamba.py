"""Mamba and Falcon Mamba: a selective scan in every layer, nothing else."""

from __future__ import annotations

import math
from typing import Any

from jaxhybrid.families.names import Fields, Source, ends, one
from jaxhybrid.hparams import Hparams, Mamba1Hparams


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    family = c.text("model_type")
    d_model = c.integer("hidden_size")
    c.activation(recurrent=True)
    return Hparams(
        family=family,
        n_layers=c.integer("num_hidden_layers"),
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=(),
        recurrent=Mamba1Hparams(
            d_inner=c.integer("intermediate_size", c.integer("expand", 2) * d_model),
            state_size=c.integer("state_size", 16),
            dt_rank=dt_rank(c, "time_step_rank", d_model),
            conv_kernel=c.integer("conv_kernel", 4),
            inner_norm="plain" if family == "falcon_mamba" else None,
            norm_eps=c.number("mixer_rms_eps", 1e-6),
            bias=c.flag("use_bias", False),
            conv_bias=c.flag("use_conv_bias", True),
        ),
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=c.flag("tie_word_embeddings", True),
        residual_in_float32=c.flag("residual_in_fp32", True),
    )


def dt_rank(c: Fields, field: str, d_model: int) -> int:
    """A number, or "auto" for a sixteenth of the model's width."""
    return math.ceil(d_model / 16) if c.get(field, "auto") == "auto" else c.integer(field)


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"backbone.layers.{i}"
        found[f"{ours}.norm"] = one(f"{theirs}.norm.weight", d)
        found |= mixer_tensors(f"{ours}.mamba1", f"{theirs}.mixer", layer.recurrent, d)
    return found


def mixer_tensors(ours: str, theirs: str, hp: object, d: int) -> dict[str, Source]:
    """A Mamba mixer as transformers names it in every family but Zamba."""
    assert isinstance(hp, Mamba1Hparams)
    inner = hp.d_inner
    found = {
        f"{ours}.in_proj": one(f"{theirs}.in_proj.weight", 2 * inner, d),
        f"{ours}.conv": one(f"{theirs}.conv1d.weight", inner, 1, hp.conv_kernel),
        f"{ours}.x_proj": one(f"{theirs}.x_proj.weight", hp.dt_rank + 2 * hp.state_size, inner),
        f"{ours}.dt_proj": one(f"{theirs}.dt_proj.weight", inner, hp.dt_rank),
        f"{ours}.dt_bias": one(f"{theirs}.dt_proj.bias", inner),
        f"{ours}.a_log": one(f"{theirs}.A_log", inner, hp.state_size),
        f"{ours}.d": one(f"{theirs}.D", inner),
        f"{ours}.out": one(f"{theirs}.out_proj.weight", d, inner),
    }
    if hp.conv_bias:
        found[f"{ours}.conv_bias"] = one(f"{theirs}.conv1d.bias", inner)
    if hp.bias:
        found[f"{ours}.in_bias"] = one(f"{theirs}.in_proj.bias", 2 * inner)
        found[f"{ours}.out_bias"] = one(f"{theirs}.out_proj.bias", d)
    if hp.inner_norm == "weighted":
        for name, size in (("dt", hp.dt_rank), ("b", hp.state_size), ("c", hp.state_size)):
            found[f"{ours}.{name}_norm"] = one(f"{theirs}.{name}_layernorm.weight", size)
    return found
