"""Depthwise causal convolution that carries its history from call to call."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def causal_conv(
    x: Array, history: Array, lengths: Array, weight: Array, bias: Array | None, n_states: int = 1
) -> tuple[Array, Array]:
    """y_t = sum_j weight[:, j] x_{t-K+1+j} + bias, without activation.

    x: [B, T, C]. history: [B, K-1, C], the last raw inputs before x, oldest first. lengths: int32 [B],
    real tokens of each row; what lies beyond them is padding and enters neither a real output nor the
    history. weight: [C, K], tap K-1 is the current token. bias: [C]. Returns (y [B, T, C], history); with
    n_states > 1 the histories after the last tokens of each row, newest first [B, n_states, K-1, C].
    """
    n_tokens, taps = x.shape[1], weight.shape[1]
    window = jnp.concatenate([history.astype(x.dtype), x], axis=1)  # [B, K-1+T, C]
    taps_of = weight.astype(jnp.float32)
    y = sum(window[:, j : j + n_tokens].astype(jnp.float32) * taps_of[:, j] for j in range(taps))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if n_tokens == 1:  # no gather in decode
        kept = jnp.where((lengths > 0)[:, None, None], window[:, 1:], window[:, :-1])
    else:
        earlier = jnp.arange(n_states, dtype=lengths.dtype)
        ends = jnp.maximum(lengths[:, None] - earlier, 0)  # [B, n]
        index = ends[:, :, None] + jnp.arange(taps - 1, dtype=lengths.dtype)  # [B, n, K-1]
        kept = jnp.take_along_axis(window, index.reshape(len(x), -1, 1), axis=1)
        kept = kept.reshape(*index.shape, -1) if n_states > 1 else kept
    return jnp.asarray(y).astype(x.dtype), kept.astype(history.dtype)
