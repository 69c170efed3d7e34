"""A weight with a correction of low rank (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from flax import struct
from jax import Array

from jaxhybrid.ops.quantized import QuantizedMatrix


class AdaptedMatrix(struct.PyTreeNode):
    """Stands where an array [..., out, in] that only `linear` reads would: base + up down.

    base: an array, quantized, or adapted before. down: float32 [rank, in]; up: float32 [rows, rank], where
    rows counts all but the base's last axis.
    """

    base: Array | QuantizedMatrix | AdaptedMatrix
    down: Array
    up: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    def __len__(self) -> int:
        return len(self.base)

    def reshape(self, *shape: int) -> AdaptedMatrix:
        """Other leading axes; the last one must stay as it is (or be given as -1)."""
        return self.replace(base=self.base.reshape(*shape))
