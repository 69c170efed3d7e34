"""Choosing between a plain function and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

Function = Callable[..., Any]


def by_platform(plain: Function, kernels: dict[str, Function], *arguments: Any) -> Any:
    """plain(*arguments), or the kernel of the platform that the program is lowered for ("tpu", "cuda").

    Both compute the same of pytrees of arrays. A kernel's gradient, in reverse mode, is that of `plain`.
    """

    def differentiable(kernel: Function) -> Function:
        run = jax.custom_vjp(kernel)

        def backward(given: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
            _, pullback = jax.vjp(plain, *given)
            return pullback(cotangents)

        run.defvjp(lambda *given: (kernel(*given), given), backward)
        return run

    if not kernels:
        return plain(*arguments)
    chosen = {name: differentiable(kernel) for name, kernel in kernels.items()}
    return lax.platform_dependent(*arguments, default=plain, **chosen)
