"""How an operation on a cache becomes one dispatch, for callers outside jit too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

F = TypeVar("F", bound=Callable)


def operation(function: F, static: tuple[str, ...] = ()) -> F:
    """`function` with a jitted body, still a plain function that any transformation may wrap."""
    jitted = jax.jit(function, static_argnames=static)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return jitted(*args, **kwargs)

    return call  # type: ignore[return-value]
