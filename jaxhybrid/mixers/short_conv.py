"""Gated short convolution (LFM2, arXiv:2511.23404): W_out (C conv(B x)), [B, C, x] = W_in h."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxhybrid.hparams import ShortConvHparams
from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recurrence import convolve
from jaxhybrid.ops.linear import linear
from jaxhybrid.params import TensorSpec, Tree, matrix, vector


def spec(hp: ShortConvHparams, d_model: int) -> Tree:
    tree: Tree = {
        "in_proj": matrix(3 * hp.width, d_model, "conv", "embed"),
        "conv": TensorSpec((hp.width, hp.conv_kernel), ("conv", None), fan_in=hp.conv_kernel),
        "out": matrix(d_model, hp.width, "embed", "conv"),
    }
    if hp.bias:
        tree |= {
            "in_bias": vector(3 * hp.width, "conv"),
            "conv_bias": vector(hp.width, "conv"),
            "out_bias": vector(d_model, "embed"),
        }
    return tree


def apply(
    p: Tree,
    x: Array,
    memory: States,
    positions: Array,
    lengths: Array,
    hp: ShortConvHparams,
    form: str | None = None,
) -> tuple[Array, States]:
    """x [B, T, D], real tokens lengths [B] first in each row, to (y [B, T, D], memory after them).

    memory: state "conv" [., K-1, width]. A convolution has one form and knows no positions.
    """
    del positions, form
    b, c, u = jnp.split(linear(x, p["in_proj"], p.get("in_bias")), 3, axis=-1)
    y, memory = convolve(memory, b * u, lengths, p["conv"], p.get("conv_bias"))
    return linear(c * y, p["out"], p.get("out_bias")), memory
