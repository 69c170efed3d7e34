"""Matrix products with weights stored [out, in]."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.kernels import products
from jaxhybrid.ops.adapted import AdaptedMatrix
from jaxhybrid.ops.quantized import QuantizedMatrix, Weight, dense, quantized_product
from jaxhybrid.precision import precision_of

_FEW_ROWS = 64
"""Up to this many rows XLA's CPU compiler streams a weight at twice the speed when it stands on the left."""


def contract(spec: str, a: Array, b: Array) -> Array:
    """einsum of a and b of one dtype, accumulated in float32; returns float32.

    XLA's CPU compiler has no product of bfloat16 with several batch dimensions, so there the operands become
    float32 first; two stacks of matrices stay as they are, which is 2 to 4 times faster.
    """

    def native(a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)

    def widened(a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST)

    if a.dtype == b.dtype and (a.dtype == jnp.float32 or a.ndim == b.ndim == 3):
        return native(a, b)
    return lax.platform_dependent(a, b, cpu=widened, default=native)


def lookup(weight: Weight, index: Array) -> Array:
    """Rows [..., in] of weight [out, in] by index [...], in the dtype of activations.

    XLA's CPU compiler gathers bfloat16 as float32, and a loop over tokens would have the whole table widened
    before it begins; out of a conditional, which always takes this branch, nothing is moved.
    """

    def gather(weight: Array, index: Array) -> Array:
        return weight[index]

    def on_cpu(weight: Array, index: Array) -> Array:
        nothing = jnp.zeros((*index.shape, weight.shape[-1]), weight.dtype)
        always = index.ravel()[0] != jnp.iinfo(index.dtype).min
        return lax.cond(always, gather, lambda *_: nothing, weight, index)

    if isinstance(weight, QuantizedMatrix) or weight.dtype == jnp.float32 or not index.size:
        return dense(weight[index])
    return lax.platform_dependent(weight, index, cpu=on_cpu, default=gather)


def _product(rows: Array, weight: Array) -> Array:
    """rows [R, in] times weight [out, in]: float32 [R, out]."""
    few = rows.dtype == jnp.float32 and 1 < len(rows) <= _FEW_ROWS
    left, right = (weight, rows) if few else (rows, weight)
    y = lax.dot_general(
        left,
        right,
        (((1,), (1,)), ((), ())),
        precision=precision_of(rows.dtype),
        preferred_element_type=jnp.float32,
    )
    return y.T if few else y


def _as_two_rows(rows: Array, weight: Array) -> Array:
    """A lone bfloat16 row is a scalar loop in XLA's CPU compiler, two are not: 18 times as fast."""
    return _product(jnp.concatenate([rows, rows]), weight)[:1]


def _dense_product(rows: Array, weight: Array) -> Array:
    if len(rows) == 1 and rows.dtype != jnp.float32:
        return lax.platform_dependent(rows, weight, cpu=_as_two_rows, default=_product)
    return _product(rows, weight)


def _multiplied(rows: Array, weight: Weight | AdaptedMatrix) -> Array:
    """rows [R, in] times weight [out, in] in any form: float32 [R, out]."""
    if isinstance(weight, AdaptedMatrix):
        correction = _product(_product(rows.astype(jnp.float32), weight.down), weight.up)
        return _multiplied(rows, weight.base) + correction
    if isinstance(weight, QuantizedMatrix):
        return quantized_product(rows, weight)
    return products.multiply(_dense_product, rows, weight.astype(rows.dtype))


def linear(
    x: Array, weight: Weight | AdaptedMatrix, bias: Array | None = None, dtype: jnp.dtype | None = None
) -> Array:
    """x [..., in] times weight [out, in] (an array, quantized or adapted) plus bias [out], accumulated in
    float32.

    Returns [..., out] in `dtype`, by default that of x.
    """
    y = _multiplied(x.reshape(-1, x.shape[-1]), weight)
    y = y.reshape(*x.shape[:-1], len(weight))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(dtype or x.dtype)
