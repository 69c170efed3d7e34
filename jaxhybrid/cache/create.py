"""Making a cache from static hparams alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxhybrid.cache import attention, recurrent
from jaxhybrid.cache.hybrid import Cache
from jaxhybrid.errors import UsageError
from jaxhybrid.hparams import Hparams

CELL_MULTIPLE = 128
"""Cells are rounded up to a multiple of this; 128 is the width of a TPU lane."""


def create_cache(
    hparams: Hparams,
    n_ctx: int,
    n_seq_max: int = 1,
    *,
    unified: bool = False,
    n_rollback: int = 0,
    n_ubatch: int = 512,
    dtype: Any = jnp.float32,
    k_dtype: Any = None,
    v_dtype: Any = None,
    conv_dtype: Any = None,
    state_dtype: Any = jnp.float32,
    cell_multiple: int = CELL_MULTIPLE,
) -> Cache:
    """An empty cache for `n_seq_max` sequences, of the kind that the hparams call for.

    n_ctx: tokens a sequence can hold, or, with `unified`, all sequences together; rounded up to
    `cell_multiple`. A purely recurrent model has no such limit and ignores it. n_rollback: how many tokens
    a sequence with a recurrent state can be taken back; each keeps one more state of every layer.
    n_ubatch: tokens of one sequence (of all, when unified) that a step may take; layers with a sliding window
    get cells for that many and the window. dtype: of K, V and the convolution history unless given one by
    one. state_dtype: of the recurrent state. Raises UsageError naming the argument that is out of range.
    """
    for name, value, least in (
        ("n_ctx", n_ctx, 1),
        ("n_seq_max", n_seq_max, 1),
        ("n_rollback", n_rollback, 0),
        ("n_ubatch", n_ubatch, 1),
        ("cell_multiple", cell_multiple, 1),
    ):
        if isinstance(value, bool) or value < least:
            raise UsageError(f"{name}: {value} must be at least {least}")

    def rounded(n: int) -> int:
        return -(-n // cell_multiple) * cell_multiple

    def cells(layers: tuple[int, ...], window: int | None, n_cells: int) -> attention.AttentionCache | None:
        if not layers:
            return None
        return attention.create(
            layers,
            tuple(hparams.cell_shape(i) for i in layers),
            tuple(hparams.rope_of(i) for i in layers),
            window,
            n_cells,
            n_seq_max,
            unified,
            jnp.dtype(k_dtype or dtype),
            jnp.dtype(v_dtype or dtype),
        )

    everything = rounded(n_ctx)
    full = tuple(i for i in hparams.attention_layer_indices if not hparams.is_windowed_layer(i))
    windowed = tuple(i for i in hparams.attention_layer_indices if hparams.is_windowed_layer(i))
    least = (hparams.window or 0) * (n_seq_max if unified else 1) + n_ubatch
    n_windowed = min(rounded(least), everything) if full else rounded(least)
    recurrent_child = None
    if layers := hparams.recurrent_layer_indices:
        recurrent_child = recurrent.create(
            layers,
            tuple(hparams.state_shapes(i) for i in layers),
            n_seq_max,
            n_rollback + 1,
            {"conv": jnp.dtype(conv_dtype or dtype)},
            jnp.dtype(state_dtype),
        )
    return Cache(
        attention=cells(full, None, everything),
        windowed=cells(windowed, hparams.window, n_windowed),
        recurrent=recurrent_child,
        lossy=jnp.zeros(n_seq_max, bool),
    )
