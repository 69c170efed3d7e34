"""One token of a recurrence, in a pass that reads the state once and writes it once, in place.

For the gated delta rule, of which XLA makes two passes; state space duality it does in one. A head's
state is a matrix [M, N] that stays on the chip between its update and the product with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxhybrid.kernels.platform import by_platform

Plain = Callable[[Any, Array, int], tuple[Array, Array]]

_TPU_BLOCK_BYTES = 2**20
_GPU_BLOCK = 8192


def delta_rule(plain: Plain, inputs: Any, state: Array, chunk: int) -> tuple[Array, Array]:
    """plain(inputs, state, chunk) at T = 1: S = a S, S = S + k (outer) beta (v - S^T k), y = S^T q.

    inputs, all float32: q and k [B, 1, G, M], v [B, 1, H, N], log_a [B, 1, H] or [B, 1, H, M], beta
    [B, 1, H]. state: float32 [B, H, M, N]. Returns (y [B, 1, H, N], state).
    """
    return _choose(plain, delta_problem, inputs, state, chunk)


class Problem(NamedTuple):
    """A state and what it meets, by groups of heads.

    state: [B, G, H / G, M, N]. vectors: [B, G, H / G or 1, M or N]. axes: of each vector, whether it goes
    along M (0) or N (1). body: (state, *vectors) to (y, state); y, and parts of the state, go along `axis`
    and need nothing of other parts.
    """

    state: Array
    vectors: tuple[Array, ...]
    axes: tuple[int, ...]
    axis: int
    body: Callable[..., tuple[Array, Array]]


def delta_problem(inputs: Any, state: Array) -> Problem:
    rows, heads, size, width = state.shape
    groups = inputs.k.shape[2]
    by_head = (rows, groups, heads // groups)
    q, k = (t.reshape(rows, groups, 1, size) for t in (inputs.q, inputs.k))
    log_a = inputs.log_a.reshape(*by_head, -1)
    a = jnp.broadcast_to(jnp.exp(log_a), (*by_head, size))
    written = inputs.beta.reshape(*by_head, 1) * k

    def body(s: Array, a: Array, w: Array, k: Array, q: Array, v: Array) -> tuple[Array, Array]:
        s = a[..., None] * s
        error = v - jnp.sum(k[..., None] * s, axis=-2)
        s = s + w[..., None] * error[..., None, :]
        return jnp.sum(q[..., None] * s, axis=-2), s

    vectors = (a, written, k, q, inputs.v.reshape(*by_head, width))
    return Problem(state.reshape(*by_head, size, width), vectors, (0, 0, 0, 0, 1), 1, body)


def _choose(
    plain: Plain, problem: Callable[[Any, Array], Problem], inputs: Any, state: Array, chunk: int
) -> tuple[Array, Array]:
    groups = inputs[1].shape[2]
    _, heads, size, width = state.shape
    kernels: dict[str, Callable[..., Any]] = {}
    if width % 128 == 0 and size % 8 == 0 and _tpu_block(groups, heads // groups, size * width):
        kernels["tpu"] = on_tpu
    if all(n & (n - 1) == 0 and 16 <= n <= 512 for n in (size, width)):
        kernels["cuda"] = on_cuda

    def run(kernel: Callable[..., Any], inputs: Any, state: Array) -> tuple[Array, Array]:
        y, new = kernel(problem(inputs, state))
        return y.reshape(len(state), 1, heads, -1), new.reshape(state.shape)

    chosen = {name: partial(run, kernel) for name, kernel in kernels.items()}
    return by_platform(lambda inputs, state: plain(inputs, state, chunk), chosen, inputs, state)


def _tpu_block(groups: int, per_group: int, elements: int) -> tuple[int, int] | None:
    """(groups, heads of each) of a block, within `_TPU_BLOCK_BYTES`; None if there is none.

    Heads are the last axis but one of some vectors, so they come by eights or all together.
    """
    most = _TPU_BLOCK_BYTES // (4 * elements)
    if per_group <= most:
        return next(n for n in range(min(most // per_group, groups), 0, -1) if groups % n == 0), per_group
    eights = (n for n in range(most // 8 * 8, 0, -8) if per_group % n == 0)
    return next(((1, n) for n in eights), None)


def on_tpu(problem: Problem, *, interpret: bool = False) -> tuple[Array, Array]:
    """(y [B, G, H / G, M or N], state) of a problem, by Mosaic."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    state, vectors = problem.state, problem.vectors
    rows, groups, per_group, size, width = state.shape
    block = _tpu_block(groups, per_group, size * width)
    assert block is not None
    n_groups, n_heads = block

    def kernel(*refs: Any) -> None:
        *given, y_ref, new_ref = refs
        y_ref[0], new_ref[0] = problem.body(*(ref[0] for ref in given))

    def of(array: Any) -> Any:
        every = array.shape[2] == 1
        shape = (1, n_groups, 1 if every else n_heads, *array.shape[3:])
        rest = (0,) * (array.ndim - 3)
        return pl.BlockSpec(shape, lambda row, group, head: (row, group, 0 if every else head, *rest))

    y = jax.ShapeDtypeStruct((*state.shape[:3], state.shape[3 + problem.axis]), state.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=(y, jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid=(rows, groups // n_groups, per_group // n_heads),
        in_specs=[of(state), *(of(vector) for vector in vectors)],
        out_specs=(of(y), of(state)),
        input_output_aliases={0: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=6 * state.size, transcendentals=0, bytes_accessed=2 * state.nbytes
        ),
        interpret=interpret,
        name="state_update",
    )(state, *vectors)


def on_cuda(problem: Problem, *, interpret: bool = False) -> tuple[Array, Array]:
    """(y [B, G, H / G, M or N], state) of a problem, by Triton: a head, or a part of its state, a program."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    state, vectors, axis = problem.state, problem.vectors, problem.axis
    rows, groups, per_group, *sizes = state.shape
    part = max(min(sizes[axis], _GPU_BLOCK // sizes[1 - axis]), 1)

    def kernel(*refs: Any) -> None:
        *given, y_ref, new_ref = refs
        y_ref[...], new_ref[...] = problem.body(*(ref[...] for ref in given))

    def of(array: Any, axes: tuple[int, ...]) -> Any:
        every = array.shape[2] == 1
        shape = tuple(part if a == axis else sizes[a] for a in axes)

        def index(row: Any, head: Any, i: Any) -> tuple[Any, ...]:
            inside = (i if a == axis else 0 for a in axes)
            return (row, head // per_group, 0 if every else head % per_group, *inside)

        return pl.BlockSpec((None, None, None, *shape), index)

    y = jax.ShapeDtypeStruct((*state.shape[:3], sizes[axis]), state.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=(y, jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid=(rows, groups * per_group, sizes[axis] // part),
        in_specs=[of(state, (0, 1)), *(of(v, (a,)) for v, a in zip(vectors, problem.axes, strict=True))],
        out_specs=(of(y, (axis,)), of(state, (0, 1))),
        input_output_aliases={0: 1},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="state_update",
    )(state, *vectors)
