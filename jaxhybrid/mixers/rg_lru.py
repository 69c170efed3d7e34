"""Real-gated linear recurrent unit (Griffin, arXiv:2402.19427; RecurrentGemma, arXiv:2404.07839).

u = conv(W_x h)      i, r = sigmoid(block-diagonal maps of u)      log a_t = -8 r_t softplus(lambda)
h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t (the factor is 1 at position 0)
out = W_out (h_t gelu(W_y x))
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxhybrid.hparams import RgLruHparams
from jaxhybrid.mixers.chunks import linear_scan, scan_chunks, scan_tokens
from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recurrence import Recurrence, convolve, recur, valid_tokens
from jaxhybrid.ops.activations import activation
from jaxhybrid.ops.linear import contract, linear
from jaxhybrid.params import TensorSpec, Tree, matrix, vector

_RATE = 8.0


class Inputs(NamedTuple):
    """Both float32 [B, T, W], zero at padding."""

    u: Array
    log_a: Array


def spec(hp: RgLruHparams, d_model: int) -> Tree:
    """The gates' maps are [blocks, in, out], as the files have them."""
    width, block = hp.width, hp.width // hp.n_blocks
    gates = TensorSpec((hp.n_blocks, block, block), ("heads", None, None), fan_in=block)
    biases = TensorSpec((hp.n_blocks, block), ("heads", None), init="zeros", float32=True)
    return {
        "x": matrix(width, d_model, "heads", "embed"),
        "x_bias": vector(width, "heads"),
        "y": matrix(width, d_model, "heads", "embed"),
        "y_bias": vector(width, "heads"),
        "conv": TensorSpec((width, hp.conv_kernel), ("heads", None), fan_in=hp.conv_kernel),
        "conv_bias": vector(width, "heads"),
        "input_gate": gates,
        "input_gate_bias": biases,
        "recurrence_gate": gates,
        "recurrence_gate_bias": biases,
        "lambda": vector(width, "heads", "ones"),
        "out": matrix(d_model, width, "embed", "heads"),
        "out_bias": vector(d_model, "embed"),
    }


def apply(
    p: Tree,
    x: Array,
    memory: States,
    positions: Array,
    lengths: Array,
    hp: RgLruHparams,
    form: str | None = None,
) -> tuple[Array, States]:
    """x [B, T, D] at positions [B, T], real tokens lengths [B] first in each row, to (y, memory after).

    memory: states "conv" [., K-1, W] and "lru" [., W]. form: see `recur`.
    """
    rows, n_tokens = x.shape[:2]
    u, memory = convolve(memory, linear(x, p["x"], p["x_bias"]), lengths, p["conv"], p["conv_bias"])
    blocks = u.reshape(rows, n_tokens, hp.n_blocks, -1)

    def gate(name: str) -> Array:
        y = contract("btni,nio->btno", blocks, p[name].astype(blocks.dtype))
        return jax.nn.sigmoid(y + p[f"{name}_bias"].astype(jnp.float32)).reshape(u.shape)

    valid = valid_tokens(n_tokens, lengths)[:, :, None]
    log_a = -_RATE * gate("recurrence_gate") * jax.nn.softplus(p["lambda"].astype(jnp.float32))
    lost = -jnp.expm1(2 * log_a)
    # a closed gate loses nothing: 0 without the slope of a square root there
    kept = jnp.where(lost > 0, jnp.sqrt(jnp.where(lost > 0, lost, 1.0)), 0.0)
    kept = jnp.where(positions[:, :, None] == 0, 1.0, kept)
    inputs = Inputs(
        u=jnp.where(valid, kept * gate("input_gate") * u.astype(jnp.float32), 0.0),
        log_a=jnp.where(valid, log_a, 0.0),
    )
    y, memory = recur(memory, "lru", RG_LRU, inputs, lengths, hp.chunk, form)
    branch = activation("gelu_pytorch_tanh")(linear(x, p["y"], p["y_bias"]))
    return linear(y.astype(x.dtype) * branch, p["out"], p["out_bias"]), memory


def _sequential(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    del chunk

    def token(h: Array, now: Inputs) -> tuple[Array, Array]:
        h = jnp.exp(now.log_a) * h + now.u
        return h, h

    return scan_tokens(token, state, inputs)


def _one_token(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    del chunk
    h = jnp.exp(inputs.log_a[:, 0]) * state + inputs.u[:, 0]
    return h[:, None], h


def _chunked(inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    def one_chunk(h: Array, now: Inputs) -> tuple[Array, Array]:
        states = linear_scan(jnp.exp(now.log_a), now.u, h)
        return states[:, -1], states

    return scan_chunks(one_chunk, state, inputs, chunk)


RG_LRU = Recurrence(sequential=_sequential, chunked=_chunked, one_token=_one_token)
