"""Rotary position embedding (RoFormer, arXiv:2104.09864) and the scalings of its frequencies."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.errors import HparamsError
from jaxhybrid.hparams import RopeHparams

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def inverse_frequencies(rope: RopeHparams) -> np.ndarray:
    """Radians per position of each of the dim/2 pairs, float32 [dim/2]."""
    inv = rope.theta ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    match rope.scaling:
        case "default":
            pass
        case "linear":
            inv = inv / rope.factor
        case "llama3":
            # Llama 3.1's rule: long waves are slowed by `factor`, short ones kept, a ramp between
            turns = rope.original_context * inv / (2 * math.pi)
            ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            keep = np.clip(ramp, 0.0, 1.0)
            inv = keep * inv + (1 - keep) * inv / rope.factor
        case "yarn":
            inv = inv * (1 - _yarn_ramp(rope)) + inv / rope.factor * _yarn_ramp(rope)
        case "longrope":
            inv = inv / np.asarray(rope.long_factors if rope.long else rope.short_factors)
        case "proportional":
            kept = int(rope.dim * rope.fraction) // 2
            inv[kept:] = 0.0
        case _:
            raise HparamsError(f"rope_scaling: kind {rope.scaling!r} is not supported")
    return inv.astype(np.float32)


def _yarn_ramp(rope: RopeHparams) -> np.ndarray:
    """How far each frequency is slowed, 0 to 1 (YaRN, arXiv:2309.00071): those of few turns wholly."""

    def pair_of(turns: float) -> float:
        return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 1e-3
    return np.clip((np.arange(rope.dim // 2) - low) / width, 0.0, 1.0)


def rotate(x: Array, positions: Array, rope: RopeHparams) -> Array:
    """Rotate x [B, T, heads, head size] by its positions [B, T]; angles in float32, the dtype of x out."""
    y = rotate_further(x, positions, rope)
    if rope.amplitude == 1.0:
        return y
    scaled = y[..., : rope.dim].astype(jnp.float32) * rope.amplitude
    return jnp.concatenate([scaled.astype(x.dtype), y[..., rope.dim :]], axis=-1)


def rotate_further(x: Array, positions: Array, rope: RopeHparams) -> Array:
    """`rotate` without the amplitude: for what was rotated already and moves to other positions."""
    half = rope.dim // 2
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    turning = x[..., : rope.dim].astype(jnp.float32)
    if rope.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if rope.interleaved:
        both = jnp.stack(turned, axis=-1).reshape(turning.shape)
    else:
        both = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([both.astype(x.dtype), x[..., rope.dim :]], axis=-1)
