"""Rotary position embedding (RoFormer, arXiv:2104.09864), rotate-half pairing."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.errors import HparamsError
from jaxhybrid.hparams import RopeHparams


def inverse_frequencies(rope: RopeHparams) -> np.ndarray:
    """Radians per position of each of the dim/2 pairs, float32 [dim/2]."""
    inv = rope.theta ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.scaling == "linear":
        inv = inv / rope.factor
    elif rope.scaling == "llama3":
        # Llama 3.1's rule: long waves are slowed by `factor`, short ones kept, a ramp between
        turns = rope.original_context * inv / (2 * math.pi)
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0.0, 1.0)
        inv = keep * inv + (1 - keep) * inv / rope.factor
    elif rope.scaling != "default":
        raise HparamsError(f"rope_scaling: kind {rope.scaling!r} is not supported")
    return inv.astype(np.float32)


def rotate(x: Array, positions: Array, rope: RopeHparams) -> Array:
    """Rotate x [B, T, heads, head size] by its positions [B, T]; angles in float32, the dtype of x out."""
    half = rope.dim // 2
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : rope.dim].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rope.dim :]], axis=-1)
