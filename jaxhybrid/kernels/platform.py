"""Choosing between a plain function and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxhybrid.buckets import bucket
from jaxhybrid.precision import precision_of

Function = Callable[..., Any]
Precision = lax.Precision | lax.DotAlgorithmPreset


def triton_precision(dtype: Any, interpret: bool) -> Precision:
    """Of products inside a Triton kernel: float32 in three products of TF32, which keep 22 of its 24 bits.

    Its plain float32 products use no tensor cores and spill the registers of every kernel here.
    """
    if dtype == jnp.float32 and not interpret:
        return lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return precision_of(dtype)


def powers_of_2(sizes: Iterable[int], least: int, most: int) -> bool:
    """Whether all sizes are, from least to most: what Triton's arrays have to be."""
    return all(n == bucket(n) and least <= n <= most for n in sizes)


def by_platform(plain: Function, kernels: dict[str, Function], *arguments: Any) -> Any:
    """plain(*arguments), or the kernel of the platform that the program is lowered for ("tpu", "cuda").

    Both compute the same of pytrees of arrays. A kernel's derivatives are those of `plain`, computed again.
    """

    def differentiable(kernel: Function) -> Function:
        run = jax.custom_jvp(kernel)

        @run.defjvp
        def _(given: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            return kernel(*given), jax.jvp(jax.checkpoint(plain), given, tangents)[1]

        return run

    if not kernels:
        return plain(*arguments)
    chosen = {name: differentiable(kernel) for name, kernel in kernels.items()}
    return lax.platform_dependent(*arguments, default=plain, **chosen)
