"""In which dtype and format the weights of a model are kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxhybrid.errors import UsageError
from jaxhybrid.model import spec
from jaxhybrid.ops.adapted import AdaptedMatrix
from jaxhybrid.ops.quantized import BLOCK, FORMATS, QuantizedMatrix, quantize_array
from jaxhybrid.params import Params, TensorSpec, flatten, unflatten

_SMALLEST = 32
"""Matrices with fewer rows or columns are kept as they are: they have few bytes and steer others."""


def auto_dtype() -> jnp.dtype | None:
    """What dtype "auto" means here: float32 on CPU, where XLA multiplies bfloat16 slowly; None, which is
    that of the files, elsewhere."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else None


def check_format(form: str | None) -> None:
    """UsageError unless it is None or one of FORMATS."""
    if form is not None and form not in FORMATS:
        raise UsageError(f"quantize: {form!r} is not one of {', '.join(FORMATS)}")


def format_of(tensor: TensorSpec, wanted: str | None) -> str | None:
    """The format of one tensor in a model quantized as `wanted`; None: it stays an array.

    Blocks that do not fit along `in` make it int8, one scale a channel.
    """
    if wanted is None or not tensor.quantizable or min(tensor.shape[-2:]) < _SMALLEST:
        return None
    return "int8" if tensor.shape[-1] % BLOCK else wanted


def base_of(weight: Any) -> Any:
    """A weight without its adapters."""
    while isinstance(weight, AdaptedMatrix):
        weight = weight.base
    return weight


def refuse_adapted(params: Params) -> None:
    """UsageError where adapters stand beside the weights."""
    if any(isinstance(leaf, AdaptedMatrix) for leaf in flatten(params.tensors).values()):
        raise UsageError("the parameters carry an adapter; merge it first (merge_lora), or save it alone")


def format_name(params: Params) -> str | None:
    """The format of quantized parameters (the smallest among their tensors), None where none is quantized."""
    found = {
        "int4" if leaf.packed else "int8" if leaf.by_channel else "int8_block"
        for leaf in map(base_of, flatten(params.tensors).values())
        if isinstance(leaf, QuantizedMatrix)
    }
    return next((form for form in reversed(FORMATS) if form in found), None)


def quantize(params: Params, form: str) -> Params:
    """The same model with every large matrix as a `QuantizedMatrix`; norms, convolutions, decays, routers
    and small matrices stay as they are. form: "int8", "int8_block" or "int4". Raises UsageError
    for another, and where they are quantized already.
    """
    check_format(form)
    refuse_adapted(params)
    if format_name(params) is not None:
        raise UsageError(f"quantize: the parameters are {format_name(params)} already; load them unquantized")
    flat: dict[str, Any] = flatten(params.tensors)
    for path, tensor in flatten(spec(params.hparams)).items():
        kind = format_of(tensor, form)
        if kind is not None:
            flat[path] = quantize_array(flat[path], kind, params.dtype)
    return Params(unflatten(flat), params.hparams)
