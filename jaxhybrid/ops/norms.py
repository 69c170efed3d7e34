"""Normalisations, computed in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """RMSNorm (arXiv:1910.07467) over the last axis: x [..., D], weight [D]; the dtype of x out.

    The factor is weight + offset.
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32)
    return (y * (factor + offset if offset else factor)).astype(x.dtype)


def grouped_rms_norm(x: Array, weight: Array, n_groups: int, eps: float) -> Array:
    """RMSNorm of each of `n_groups` equal parts of the last axis: x [..., D], weight [D]."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], n_groups, -1)
    parts = parts * lax.rsqrt(jnp.mean(parts * parts, axis=-1, keepdims=True) + eps)
    return (parts.reshape(x.shape) * weight.astype(jnp.float32)).astype(x.dtype)
