"""Normalisations, computed in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, weight: Array | None, eps: float, offset: float = 0.0) -> Array:
    """RMSNorm (arXiv:1910.07467) over the last axis: x [..., D], weight [D]; the dtype of x out.

    The factor is weight + offset; without a weight there is none.
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if weight is None:
        return y.astype(x.dtype)
    factor = weight.astype(jnp.float32)
    return (y * (factor + offset if offset else factor)).astype(x.dtype)


def grouped_rms_norm(x: Array, weight: Array, n_groups: int, eps: float) -> Array:
    """RMSNorm of each of `n_groups` equal parts of the last axis: x [..., D], weight [D]."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], n_groups, -1)
    parts = parts * lax.rsqrt(jnp.mean(parts * parts, axis=-1, keepdims=True) + eps)
    return (parts.reshape(x.shape) * weight.astype(jnp.float32)).astype(x.dtype)


def l2_norm(x: Array, eps: float = 1e-6) -> Array:
    """x [..., D] divided by its length, sqrt(sum x^2 + eps); float32 out."""
    y = x.astype(jnp.float32)
    return y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + eps)
