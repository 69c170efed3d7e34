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
    dtype: Any = jnp.float32,
    k_dtype: Any = None,
    v_dtype: Any = None,
    conv_dtype: Any = None,
    state_dtype: Any = jnp.float32,
    cell_multiple: int = CELL_MULTIPLE,
) -> Cache:
    """An empty cache for `n_seq_max` sequences, of the kind that the hparams call for.

    n_ctx: tokens a sequence can hold, or, with `unified`, all sequences together; rounded up to
    `cell_multiple`. A purely recurrent model has no such limit and ignores it. dtype: of K, V and the
    convolution history unless given one by one. state_dtype: of the recurrent state.
    Raises UsageError naming the argument that is out of range.
    """
    for name, value in (
        ("n_ctx", n_ctx),
        ("n_seq_max", n_seq_max),
        ("cell_multiple", cell_multiple),
    ):
        if isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}: {value} must be at least 1")
    attention_child = recurrent_child = None
    if layers := hparams.attention_layer_indices:
        attention_child = attention.create(
            layers,
            tuple(hparams.cell_shape(i) for i in layers),
            -(-n_ctx // cell_multiple) * cell_multiple,
            n_seq_max,
            unified,
            jnp.dtype(k_dtype or dtype),
            jnp.dtype(v_dtype or dtype),
        )
    if layers := hparams.recurrent_layer_indices:
        recurrent_child = recurrent.create(
            layers,
            tuple(hparams.state_shapes(i) for i in layers),
            n_seq_max,
            {"conv": jnp.dtype(conv_dtype or dtype)},
            jnp.dtype(state_dtype),
        )
    return Cache(
        attention=attention_child,
        recurrent=recurrent_child,
        lossy=jnp.zeros(n_seq_max, bool),
    )
