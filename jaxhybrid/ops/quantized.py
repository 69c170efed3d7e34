"""Weights kept as small integers with scales, and their products.

A weight w [out, in] is scale * integer with one scale for each out channel ("int8"), or for each 32 weights
along `in` ("int8_block", the layout of llama.cpp's Q8_0, and "int4", that of its Q4_0).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxhybrid.kernels import products
from jaxhybrid.precision import precision_of

FORMATS = ("int8", "int8_block", "int4")
BLOCK = 32
_CPU_TILE, _TILE = 512, 8192
"""Rows of a weight that become real at once: few enough for a CPU's caches, and for the memory near an
accelerator's units, where XLA's TPU compiler puts them."""


class QuantizedMatrix(struct.PyTreeNode):
    """Stands where an array [..., out, in] would.

    values: int8 [..., out, in]; for int4 uint8 [..., out, in / 2], where byte j of a block holds its element
    j in the low half and element j + 16 in the high one, each plus 8. scales: float32 [..., out, in /
    BLOCK], or [..., out, 1] for one scale a channel. dtype: of the activations, as the array's would be.
    """

    values: Array
    scales: Array
    dtype: jnp.dtype = struct.field(pytree_node=False)

    @property
    def packed(self) -> bool:
        return self.values.dtype == jnp.uint8

    @property
    def by_channel(self) -> bool:
        return self.scales.shape[-1] == 1 and not self.packed

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, last = self.values.shape
        return (*leading, 2 * last if self.packed else last)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> QuantizedMatrix:
        """By an index of leading axes; `out` and `in` stay."""
        return self.replace(values=self.values[index], scales=self.scales[index])

    def reshape(self, *shape: int) -> QuantizedMatrix:
        """Other leading axes; the last one must stay as it is (or be given as -1)."""
        *leading, last = shape
        if last not in (-1, self.shape[-1]):
            raise ValueError(f"a quantized matrix {self.shape} keeps its last axis; asked for {shape}")
        return self.replace(
            values=self.values.reshape(*leading, self.values.shape[-1]),
            scales=self.scales.reshape(*leading, self.scales.shape[-1]),
        )

    def dequantize(self) -> Array:
        """The array [..., out, in] it stands for, in `dtype`."""
        parts = [_real(*part).reshape(*self.scales.shape, -1) for part in _parts(self)]
        return jnp.stack(parts, axis=-2).reshape(self.shape).astype(self.dtype)


Weight = Array | QuantizedMatrix


def dense(weight: Weight) -> Array:
    """The weight as an array."""
    return weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight


@partial(jax.jit, static_argnames=("form", "dtype"))
def quantize_array(weight: Array, form: str, dtype: Any) -> QuantizedMatrix:
    """weight [..., out, in], rounded to the nearest; `in` a multiple of BLOCK unless form is "int8".

    The largest weight of a group becomes 127, for int4 -8 (whence a scale may be negative, as in Q4_0), so
    no weight is off by more than half a scale, or for int4 one scale where the opposite of the largest
    would be 8.
    """
    w = weight.astype(jnp.float32)
    groups = w[..., None, :] if form == "int8" else w.reshape(*w.shape[:-1], -1, BLOCK)
    at = jnp.argmax(jnp.abs(groups), axis=-1, keepdims=True)
    largest = jnp.take_along_axis(groups, at, axis=-1)
    scales = largest / -8 if form == "int4" else jnp.abs(largest) / 127
    integers = jnp.round(groups / jnp.where(scales == 0, 1.0, scales))
    integers = jnp.clip(integers, *((-8, 7) if form == "int4" else (-127, 127))).reshape(w.shape)
    values = integers.astype(jnp.int8)
    if form == "int4":
        halves = (values + 8).astype(jnp.uint8).reshape(*groups.shape[:-1], 2, -1)
        values = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*w.shape[:-1], -1)
    return QuantizedMatrix(values, scales[..., 0], jnp.dtype(dtype))


def _parts(weight: QuantizedMatrix) -> list[tuple[Array, Array]]:
    """Integers int8 [..., out, n] and their scales; of packed ones the low and the high halves."""
    if not weight.packed:
        return [(weight.values, weight.scales)]
    halves = weight.values & 15, weight.values >> 4
    return [(half.astype(jnp.int8) - 8, weight.scales) for half in halves]


def _real(integers: Array, scales: Array) -> Array:
    """float32 [..., out, n]."""
    groups = integers.reshape(*scales.shape, -1).astype(jnp.float32)
    return (groups * scales[..., None]).reshape(integers.shape)


# ------------------------------------------------------------------------------------------ products


def _dot(left: Array, right: Array, kind: Any) -> Array:
    """left [m, in] times right [n, in]: [m, n] of dtype `kind`; float32 at full precision."""
    exact = precision_of(left.dtype)
    return lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=kind
    )


def _integer_rows(rows: Array, weight: QuantizedMatrix) -> Array:
    """Rows become int8 by their largest element; the sums of integers are exact.

    A lone row would be a scalar loop in XLA's CPU compiler, and so would be what is left over of fours; they
    are filled up with zeros.
    """
    x = rows.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    integers = jnp.round(x / jnp.where(scales == 0, 1.0, scales)).astype(jnp.int8)
    if products.fits(integers, weight.values):
        sums = products.product(integers, weight.values)
        return sums.astype(jnp.float32) * scales * weight.scales[:, 0]
    n_padding = 1 if len(rows) == 1 else -len(rows) % 4 if len(rows) > 4 else 0
    integers = jnp.pad(integers, ((0, n_padding), (0, 0)))
    sums = _dot(weight.values, integers, jnp.int32)[:, : len(rows)].T
    return sums.astype(jnp.float32) * scales * weight.scales[:, 0]


def _made_real(rows: Array, weight: QuantizedMatrix) -> Array:
    """The weight becomes real in the dtype of the rows and is multiplied: [out, R]."""
    parts = _parts(weight)
    blocks = rows.reshape(len(rows), weight.scales.shape[-1], len(parts), -1)
    pieces = [blocks[:, :, i].reshape(len(rows), -1) for i in range(len(parts))]
    products = [
        _dot(_real(*part).astype(rows.dtype), piece, jnp.float32)
        for part, piece in zip(parts, pieces, strict=True)
    ]
    return sum(products[1:], products[0])


def _tiled(rows: Array, weight: QuantizedMatrix, size: int) -> Array:
    """`size` rows of the weight after the others become real, so that it never is as a whole."""
    n_out = len(weight)
    if n_out <= size:
        return _made_real(rows, weight).T

    def tile(i: Array, y: Array) -> Array:
        begin = jnp.minimum(i * size, n_out - size)  # the last tile may do some rows a second time
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, begin, size), weight)
        return lax.dynamic_update_slice_in_dim(y, _made_real(rows, part), begin, axis=0)

    y = jnp.zeros((n_out, len(rows)), jnp.float32)
    return lax.fori_loop(0, -(-n_out // size), tile, y).T


def _on_cpu(rows: Array, weight: QuantizedMatrix) -> Array:
    if weight.by_channel:
        return _integer_rows(rows, weight)
    if products.fits(rows, weight.values):
        return products.product(rows, weight.values, weight.scales)
    return _tiled(rows.astype(jnp.float32), weight, _CPU_TILE)


def _elsewhere(rows: Array, weight: QuantizedMatrix) -> Array:
    if weight.by_channel:  # the conversion, exact in every dtype, is fused into the product
        return _dot(rows, weight.values.astype(rows.dtype), jnp.float32) * weight.scales[:, 0]
    return _tiled(rows, weight, _TILE)


@jax.custom_vjp
def quantized_product(rows: Array, weight: QuantizedMatrix) -> Array:
    """rows [R, in] times weight [out, in]: float32 [R, out].

    Differentiable in reverse with respect to rows, as a product with the weight that the integers stand
    for: rounding the rows (int8 on a CPU) counts as the identity.
    """
    return lax.platform_dependent(rows, weight, cpu=_on_cpu, default=_elsewhere)


def _forward(rows: Array, weight: QuantizedMatrix) -> tuple[Array, tuple[Array, QuantizedMatrix]]:
    return quantized_product(rows, weight), (rows, weight)


def _backward(kept: tuple[Array, QuantizedMatrix], above: Array) -> tuple[Array, None]:
    rows, weight = kept
    real = weight.dequantize().astype(jnp.float32)
    return jnp.matmul(above, real, precision=lax.Precision.HIGHEST).astype(rows.dtype), None


quantized_product.defvjp(_forward, _backward)
