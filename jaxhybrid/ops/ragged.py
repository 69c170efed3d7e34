"""Matrix products of rows in groups, each group with its own weight: the work of sorted experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from jaxhybrid.precision import precision_of

_ROWS_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


@jax.custom_vjp
def ragged_linear(rows: Array, weights: Array, sizes: Array) -> Array:
    """rows [R, in] times weights [E, out, in] of their group, float32 [R, out].

    sizes: int32 [E], rows of each group, in order. Differentiable once, in reverse, with respect to
    rows and weights. jax cannot vmap its ragged product over rows alone; here that is a loop.
    """
    return _product(rows, weights, sizes)


def _plain(rows: Array, weights: Array, sizes: Array) -> Array:
    return lax.ragged_dot_general(
        rows,
        weights,
        sizes,
        _ROWS_BY_GROUP,
        precision=precision_of(rows.dtype),
        preferred_element_type=jnp.float32,
    )


def _loop(f: Any) -> Any:
    """`f`, which under vmap becomes a loop over the batch."""
    batchable = custom_vmap(f)

    @batchable.def_vmap
    def one_by_one(n: int, batched: list[bool], *arguments: Array) -> tuple[Any, Any]:
        def one(i: Array) -> Any:
            return batchable(*(x[i] if b else x for x, b in zip(arguments, batched, strict=True)))

        out = lax.map(one, jnp.arange(n))
        return out, jax.tree.map(lambda _: True, out)

    return batchable


def _slopes(rows: Array, weights: Array, sizes: Array, above: Array) -> tuple[Array, Array]:
    _, pull = jax.vjp(lambda r, w: _plain(r, w, sizes), rows, weights)
    return pull(above)


_product, _pullback = _loop(_plain), _loop(_slopes)


def _forward(rows: Array, weights: Array, sizes: Array) -> tuple[Array, tuple[Array, ...]]:
    return _product(rows, weights, sizes), (rows, weights, sizes)


def _backward(kept: tuple[Array, ...], above: Array) -> tuple[Array | None, ...]:
    return (*_pullback(*kept, above), None)


ragged_linear.defvjp(_forward, _backward)
