"""Mamba-2 and Codestral Mamba: a recurrent mixer in every layer, nothing else."""

from __future__ import annotations

from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families.names import Fields, Source, ends, one
from jaxhybrid.hparams import Hparams, Mamba2Hparams


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    heads, head_dim = c.integer("num_heads", 128), c.integer("head_dim", 64)
    if c.integer("expand", 2) * d_model != heads * head_dim:
        raise HparamsError(
            f"num_heads: {heads} heads of head_dim={head_dim} do not make expand * hidden_size = "
            f"{c.integer('expand', 2) * d_model}"
        )
    c.activation(recurrent=True)
    dt_min, dt_max = c.pair("time_step_limit", (0.0, float("inf")))
    return Hparams(
        family="mamba2",
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=(),
        recurrent=Mamba2Hparams(
            n_heads=heads,
            head_dim=head_dim,
            state_size=c.integer("state_size", 128),
            n_groups=c.integer("n_groups", 8),
            conv_kernel=c.integer("conv_kernel", 4),
            dt_min=dt_min,
            dt_max=dt_max,
            norm_eps=c.number("layer_norm_epsilon", 1e-5),
            bias=c.flag("use_bias", False),
            conv_bias=c.flag("use_conv_bias", True),
        ),
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=c.flag("tie_word_embeddings", False),
        residual_in_float32=c.flag("residual_in_fp32", True),
    )


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"backbone.layers.{i}"
        found[f"{ours}.norm"] = one(f"{theirs}.norm.weight", d)
        found |= mixer_tensors(f"{ours}.mamba2", f"{theirs}.mixer", layer.recurrent, d)
    return found


def mixer_tensors(ours: str, theirs: str, hp: object, d: int) -> dict[str, Source]:
    """A Mamba-2 mixer as transformers names it in every family."""
    assert isinstance(hp, Mamba2Hparams)
    projected = hp.d_inner + hp.conv_channels + hp.n_heads
    found = {
        f"{ours}.in_proj": one(f"{theirs}.in_proj.weight", projected, d),
        f"{ours}.conv": one(f"{theirs}.conv1d.weight", hp.conv_channels, 1, hp.conv_kernel),
        f"{ours}.a_log": one(f"{theirs}.A_log", hp.n_heads),
        f"{ours}.dt_bias": one(f"{theirs}.dt_bias", hp.n_heads),
        f"{ours}.d": one(f"{theirs}.D", hp.n_heads),
        f"{ours}.out": one(f"{theirs}.out_proj.weight", d, hp.d_inner),
    }
    if hp.gated_norm is not None:
        found[f"{ours}.norm"] = one(f"{theirs}.norm.weight", hp.d_inner)
    if hp.conv_bias:
        found[f"{ours}.conv_bias"] = one(f"{theirs}.conv1d.bias", hp.conv_channels)
    if hp.bias:
        found[f"{ours}.in_bias"] = one(f"{theirs}.in_proj.bias", projected)
        found[f"{ours}.out_bias"] = one(f"{theirs}.out_proj.bias", d)
    return found
