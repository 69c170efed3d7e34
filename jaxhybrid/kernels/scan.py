"""State space duality over many tokens in one GPU kernel: a head's state stays on the chip between chunks.

XLA runs a loop of several launches a chunk, and takes state, weights and inputs to memory in between. A TPU's
compiler keeps those on the chip by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.kernels.platform import by_platform, powers_of_2, triton_precision

Plain = Callable[[Any, Array, int], tuple[Array, Array]]
Sums = Callable[[Array, int], Array]

_CHUNK = 32
_STATE = 4096
"""Elements of a state that the registers of one program hold beside the rest."""


def ssd(plain: Plain, sums_of: Sums, inputs: Any, state: Array, chunk: int) -> tuple[Array, Array]:
    """plain(inputs, state, chunk): S_t = a_t S_{t-1} + u_t (outer) b_t, y_t = S_t c_t.

    inputs, all float32: u [B, T, H, P], b and c [B, T, G, N], log_a [B, T, H]. state: float32 [B, H, P, N].
    sums_of: (log decays, axis) to their sums up to each token in two parts, stacked first. Returns
    (y [B, T, H, P], state).
    """
    kernels = {"cuda": partial(on_cuda, sums_of)} if powers_of_2(state.shape[2:], 16, 256) else {}
    return by_platform(lambda inputs, state: plain(inputs, state, chunk), kernels, inputs, state)


def on_cuda(sums_of: Sums, inputs: Any, state: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    """`ssd` by Triton. Needs P and N to be powers of two, from 16 to 256."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, heads, size, width = state.shape
    n_tokens, groups = inputs.b.shape[1:3]
    n_chunks = -(-n_tokens // _CHUNK)
    filled = n_chunks * _CHUNK
    per_group = heads // groups
    u, b, c, log_a = (
        jnp.pad(t, [(0, 0), (0, filled - n_tokens)] + [(0, 0)] * (t.ndim - 2))  # zeros are inert
        for t in (inputs.u, inputs.b, inputs.c, inputs.log_a)
    )
    sums = sums_of(log_a.reshape(rows, n_chunks, _CHUNK, heads), 2).reshape(2, rows, filled, heads)
    sums = sums.transpose(1, 3, 0, 2)  # [B, H, 2, T]
    # once for all heads of a group
    of_chunks = (t.reshape(rows, n_chunks, _CHUNK, groups, width) for t in (c, b))
    scores = jnp.einsum("bktgn,bksgn->bgkts", *of_chunks, precision=lax.Precision.HIGHEST)
    scores = scores.reshape(rows, groups, filled, _CHUNK)

    precision = triton_precision(jnp.float32, interpret)

    def product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
        dimensions = (((axes[0],), (axes[1],)), ((), ()))
        return lax.dot_general(x, y, dimensions, precision=precision)

    def kernel(*refs: Any) -> None:
        sums_ref, u_ref, b_ref, c_ref, scores_ref, state_ref, y_ref, new_ref = refs
        token = jnp.arange(_CHUNK)
        causal = token[:, None] >= token[None]

        def one_chunk(i: Any, s: Array) -> Array:
            at = pl.ds(i * _CHUNK, _CHUNK)
            u, coarse, fine = u_ref[at, :], sums_ref[0, at], sums_ref[1, at]
            between = (coarse[:, None] - coarse[None]) + (fine[:, None] - fine[None])
            weights = jnp.where(causal, scores_ref[at, :] * jnp.exp(between), 0.0)
            carried = jnp.exp(coarse + fine)[:, None] * product(c_ref[at, :], s, (1, 1))
            y_ref[at, :] = product(weights, u, (1, 0)) + carried
            last = i * _CHUNK + _CHUNK - 1
            coarse_end, fine_end = sums_ref[0, last], sums_ref[1, last]
            until_end = jnp.exp((coarse_end - coarse) + (fine_end - fine))
            added = product(until_end[:, None] * u, b_ref[at, :], (0, 0))
            return jnp.exp(coarse_end + fine_end) * s + added

        new_ref[...] = lax.fori_loop(0, n_chunks, one_chunk, state_ref[...])

    part = min(size, max(_STATE // width, 16))  # rows of the state need nothing of each other
    by_head = pl.BlockSpec((None, filled, None, part), lambda row, head, i: (row, 0, head, i))
    by_group = pl.BlockSpec((None, filled, None, width), lambda row, head, i: (row, 0, head // per_group, 0))
    by_part = pl.BlockSpec((None, None, part, width), lambda row, head, i: (row, head, i, 0))
    y, new = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(u.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ),
        grid=(rows, heads, size // part),
        in_specs=[
            pl.BlockSpec((None, None, 2, filled), lambda row, head, i: (row, head, 0, 0)),
            by_head,
            by_group,
            by_group,
            pl.BlockSpec((None, None, filled, _CHUNK), lambda row, head, i: (row, head // per_group, 0, 0)),
            by_part,
        ],
        out_specs=(by_head, by_part),
        input_output_aliases={5: 1},
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="ssd",
    )(sums, u, b, c, scores, state)
    return y[:, :n_tokens], new
