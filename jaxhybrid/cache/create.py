"""Making a cache from static hparams alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxhybrid.cache import attention, recurrent
from jaxhybrid.cache.hybrid import Cache
from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.hparams import Hparams

CELL_MULTIPLE = 128
"""Cells are rounded up to a multiple of this; 128 is the width of a TPU lane."""


@dataclass(frozen=True)
class Sizes:
    """All that makes one empty cache of a model differ from another.

    n_cells, n_windowed: cells of a stream of either attention child. n_remembered: states a sequence.
    """

    n_seq_max: int
    unified: bool
    n_cells: int
    n_windowed: int
    n_remembered: int
    k_dtype: str
    v_dtype: str
    conv_dtype: str
    state_dtype: str

    @staticmethod
    def of(cache: Cache) -> Sizes:
        """The sizes of an existing cache; what it has no child for is as small as can be."""
        children, r = cache.cell_children, cache.recurrent
        dtypes = {
            "k_dtype": "float32",
            "v_dtype": "float32",
            "conv_dtype": "float32",
            "state_dtype": "float32",
        }
        if children:
            dtypes |= {"k_dtype": str(children[0].keys[0].dtype), "v_dtype": str(children[0].values[0].dtype)}
        if r is not None:
            for name, buffer in r.states[0].items():
                dtypes["conv_dtype" if name == "conv" else "state_dtype"] = str(buffer.dtype)
        return Sizes(
            n_seq_max=cache.n_seq_max,
            unified=any(child.unified for child in children),
            n_cells=1 if cache.attention is None else cache.attention.n_cells,
            n_windowed=1 if cache.windowed is None else cache.windowed.n_cells,
            n_remembered=1 if r is None else r.n_remembered,
            **dtypes,
        )

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Any) -> Sizes:
        """Checked: CheckpointError naming the field that no cache has."""
        if not isinstance(values, dict):
            raise CheckpointError("sizes: missing from the saved cache")
        kinds = {"int": int, "bool": bool, "str": str}
        for field in dataclasses.fields(Sizes):
            value: Any = values.get(field.name)
            fits = type(value) is kinds[str(field.type)]
            if fits and isinstance(value, str):
                try:
                    jnp.dtype(value)
                except TypeError:
                    fits = False
            elif fits and not isinstance(value, bool):
                fits = 1 <= value < 2**31
            if not fits:
                raise CheckpointError(f"sizes.{field.name}: {value!r} in the saved cache")
        return Sizes(**{field.name: values[field.name] for field in dataclasses.fields(Sizes)})


def build(hparams: Hparams, sizes: Sizes) -> Cache:
    """An empty cache of exactly these sizes."""

    def cells(layers: tuple[int, ...], window: int | None, n_cells: int) -> attention.AttentionCache | None:
        if not layers:
            return None
        return attention.create(
            layers,
            tuple(hparams.cell_shapes(i) for i in layers),
            tuple(hparams.rope_of(i) for i in layers),
            window,
            n_cells,
            sizes.n_seq_max,
            sizes.unified,
            jnp.dtype(sizes.k_dtype),
            jnp.dtype(sizes.v_dtype),
        )

    recurrent_child = None
    if layers := hparams.recurrent_layer_indices:
        recurrent_child = recurrent.create(
            layers,
            tuple(hparams.state_shapes(i) for i in layers),
            sizes.n_seq_max,
            sizes.n_remembered,
            {"conv": jnp.dtype(sizes.conv_dtype)},
            jnp.dtype(sizes.state_dtype),
        )
    indices = hparams.attention_layer_indices
    return Cache(
        attention=cells(tuple(i for i in indices if not hparams.is_windowed_layer(i)), None, sizes.n_cells),
        windowed=cells(
            tuple(i for i in indices if hparams.is_windowed_layer(i)), hparams.window, sizes.n_windowed
        ),
        recurrent=recurrent_child,
        lossy=jnp.zeros(sizes.n_seq_max, bool),
    )


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

    everything = rounded(n_ctx)
    least = (hparams.window or 0) * (n_seq_max if unified else 1) + n_ubatch
    all_windowed = all(hparams.is_windowed_layer(i) for i in hparams.attention_layer_indices)
    return build(
        hparams,
        Sizes(
            n_seq_max=n_seq_max,
            unified=unified,
            n_cells=everything,
            # with layers that see everything beside it, more cells than they have are of no use
            n_windowed=rounded(least) if all_windowed else min(rounded(least), everything),
            n_remembered=n_rollback + 1,
            k_dtype=jnp.dtype(k_dtype or dtype).name,
            v_dtype=jnp.dtype(v_dtype or dtype).name,
            conv_dtype=jnp.dtype(conv_dtype or dtype).name,
            state_dtype=jnp.dtype(state_dtype).name,
        ),
    )
