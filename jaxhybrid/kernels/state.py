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

from jaxhybrid.kernels.platform import by_platform, powers_of_2

Plain = Callable[[Any, Array, int], tuple[Array, Array]]

_TPU_BLOCK_BYTES = 2**20
_GPU_BLOCK = 8192


def delta_rule(plain: Plain, inputs: Any, state: Array, chunk: int) -> tuple[Array, Array]:
    """plain(inputs, state, chunk) at T = 1: S = a S, S = S + k (outer) beta (v - S^T k), y = S^T q.

    inputs, all float32: q and k [B, 1, G, M], v [B, 1, H, N], log_a [B, 1, H] or [B, 1, H, M], beta
    [B, 1, H]. state: float32 [B, H, M, N]. Returns (y [B, 1, H, N], state).
    """
    groups = inputs.k.shape[2]
    _, heads, size, width = state.shape
    kernels: dict[str, Callable[..., Any]] = {}
    if width % 128 == 0 and size % 8 == 0 and _tpu_block(groups, heads // groups, size * width):
        kernels["tpu"] = on_tpu
    if powers_of_2((size, width), 16, 512):
        kernels["cuda"] = on_cuda

    def run(kernel: Callable[..., Any], inputs: Any, state: Array) -> tuple[Array, Array]:
        y, new = kernel(operands_of(inputs, state))
        return y.reshape(len(state), 1, heads, -1), new.reshape(state.shape)

    chosen = {name: partial(run, kernel) for name, kernel in kernels.items()}
    return by_platform(lambda inputs, state: plain(inputs, state, chunk), chosen, inputs, state)


class Operands(NamedTuple):
    """What a program works on, by groups of heads; the arguments of `_update`."""

    state: Array  # [B, G, H / G, M, N]
    a: Array  # [B, G, H / G, M]
    written: Array  # [B, G, H / G, M], beta k
    k: Array  # [B, G, 1, M]
    q: Array  # [B, G, 1, M]
    v: Array  # [B, G, H / G, N]


def operands_of(inputs: Any, state: Array) -> Operands:
    rows, heads, size, width = state.shape
    groups = inputs.k.shape[2]
    by_head = (rows, groups, heads // groups)
    q, k = (t.reshape(rows, groups, 1, size) for t in (inputs.q, inputs.k))
    a = jnp.broadcast_to(jnp.exp(inputs.log_a.reshape(*by_head, -1)), (*by_head, size))
    written = inputs.beta.reshape(*by_head, 1) * k
    v = inputs.v.reshape(*by_head, width)
    return Operands(state.reshape(*by_head, size, width), a, written, k, q, v)


def _update(s: Array, a: Array, written: Array, k: Array, q: Array, v: Array) -> tuple[Array, Array]:
    """(y [..., N], state [..., M, N]); parts along N need nothing of each other."""
    s = a[..., None] * s
    error = v - jnp.sum(k[..., None] * s, axis=-2)
    s = s + written[..., None] * error[..., None, :]
    return jnp.sum(q[..., None] * s, axis=-2), s


def _tpu_block(groups: int, per_group: int, elements: int) -> tuple[int, int] | None:
    """(groups, heads of each) of a block, within `_TPU_BLOCK_BYTES`; None if there is none.

    Heads are the last axis but one of some vectors, so they come by eights or all together.
    """
    most = _TPU_BLOCK_BYTES // (4 * elements)
    if per_group <= most:
        return next(n for n in range(min(most // per_group, groups), 0, -1) if groups % n == 0), per_group
    eights = (n for n in range(most // 8 * 8, 0, -8) if per_group % n == 0)
    return next(((1, n) for n in eights), None)


def on_tpu(operands: Operands, *, interpret: bool = False) -> tuple[Array, Array]:
    """(y [B, G, H / G, N], state), by Mosaic."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    state = operands.state
    rows, groups, per_group, size, width = state.shape
    block = _tpu_block(groups, per_group, size * width)
    assert block is not None
    n_groups, n_heads = block

    def kernel(*refs: Any) -> None:
        *given, y_ref, new_ref = refs
        y_ref[0], new_ref[0] = _update(*(ref[0] for ref in given))

    def of(array: Any) -> Any:
        every = array.shape[2] == 1
        shape = (1, n_groups, 1 if every else n_heads, *array.shape[3:])
        rest = (0,) * (array.ndim - 3)
        return pl.BlockSpec(shape, lambda row, group, head: (row, group, 0 if every else head, *rest))

    y = jax.ShapeDtypeStruct(operands.v.shape, state.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=(y, jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid=(rows, groups // n_groups, per_group // n_heads),
        in_specs=[of(operand) for operand in operands],
        out_specs=(of(y), of(state)),
        input_output_aliases={0: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=6 * state.size, transcendentals=0, bytes_accessed=2 * state.nbytes
        ),
        interpret=interpret,
        name="state_update",
    )(*operands)


def on_cuda(operands: Operands, *, interpret: bool = False) -> tuple[Array, Array]:
    """(y [B, G, H / G, N], state), by Triton: a head, or some columns of its state, a program."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    state = operands.state
    rows, groups, per_group, size, width = state.shape
    part = max(min(width, _GPU_BLOCK // size), 1)

    def kernel(*refs: Any) -> None:
        *given, y_ref, new_ref = refs
        y_ref[...], new_ref[...] = _update(*(ref[...] for ref in given))

    def of(n_heads: int, *shape: int, in_parts: bool) -> Any:
        def index(row: Any, head: Any, i: Any) -> tuple[Any, ...]:
            inside = (0,) * (len(shape) - 1) + (i if in_parts else 0,)
            return (row, head // per_group, 0 if n_heads == 1 else head % per_group, *inside)

        return pl.BlockSpec((None, None, None, *shape), index)

    states, along_n = of(per_group, size, part, in_parts=True), of(per_group, part, in_parts=True)
    along_m = [of(x.shape[2], size, in_parts=False) for x in (operands.a, operands.written, operands.k)]
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(operands.v.shape, state.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid=(rows, groups * per_group, width // part),
        in_specs=[states, *along_m, along_m[-1], along_n],
        out_specs=(along_n, states),
        input_output_aliases={0: 1},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="state_update",
    )(*operands)
