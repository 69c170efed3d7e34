"""Mamba (arXiv:2312.00752): a convolution, then a selective scan of every channel.

    dt_t = softplus(W_dt delta_t + bias)      h_t = exp(dt_t A) h_{t-1} + dt_t u_t (outer) B_t
    y_t = h_t C_t + D u_t      out = W_out (y silu(z)),      [delta, B, C] = W_x u
The state h is [B, channels, N].
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxhybrid.hparams import Mamba1Hparams
from jaxhybrid.mixers.chunks import linear_scan, scan_chunks, scan_tokens
from jaxhybrid.mixers.memory import States
from jaxhybrid.mixers.recurrence import Recurrence, convolve, recur, valid_tokens
from jaxhybrid.ops.linear import contract, linear
from jaxhybrid.ops.norms import rms_norm
from jaxhybrid.params import TensorSpec, Tree, matrix, vector

_HIGHEST = lax.Precision.HIGHEST


class Inputs(NamedTuple):
    """All float32, all zero at padding."""

    dt: Array  # [B, T, C]
    u: Array  # [B, T, C], times dt
    b: Array  # [B, T, G, N], G equal parts of the channels with one b and c each
    c: Array  # [B, T, G, N]


def spec(hp: Mamba1Hparams, d_model: int) -> Tree:
    inner = hp.d_inner
    tree: Tree = {
        "in_proj": matrix(2 * inner, d_model, "mamba_inner", "embed"),
        "conv": TensorSpec((inner, hp.conv_kernel), ("mamba_inner", None), fan_in=hp.conv_kernel),
        "x_proj": _by_head_spec(hp.n_heads, hp.dt_rank + 2 * hp.state_size, inner // hp.n_heads),
        "dt_proj": _by_head_spec(hp.n_heads, inner // hp.n_heads, hp.dt_rank),
        "dt_bias": vector(inner, "mamba_inner", "dt_bias"),
        "a_log": TensorSpec((inner, hp.state_size), ("mamba_inner", None), init="a_log", float32=True),
        "d": vector(inner, "mamba_inner", "ones"),
        "out": matrix(d_model, inner, "embed", "mamba_inner"),
    }
    if hp.conv_bias:
        tree["conv_bias"] = vector(inner, "mamba_inner")
    if hp.bias:
        tree |= {"in_bias": vector(2 * inner, "mamba_inner"), "out_bias": vector(d_model, "embed")}
    if hp.inner_norm == "weighted":
        sizes = {"dt_norm": hp.dt_rank, "b_norm": hp.state_size, "c_norm": hp.state_size}
        tree |= {name: vector(size, None, "ones") for name, size in sizes.items()}
    return tree


def _by_head_spec(n_heads: int, n_out: int, n_in: int) -> TensorSpec:
    return TensorSpec((n_heads, n_out, n_in), ("mamba_heads", None, None), fan_in=n_in)


def apply(
    p: Tree,
    x: Array,
    memory: States,
    positions: Array,
    lengths: Array,
    hp: Mamba1Hparams,
    form: str | None = None,
) -> tuple[Array, States]:
    """x [B, T, D], real tokens lengths [B] first in each row, to (y [B, T, D], memory after them).

    memory: states "conv" [., K-1, channels] and "ssm" [., channels, N]. positions do not matter. form: see
    `recur`.
    """
    del positions
    rows, n_tokens = x.shape[:2]
    u, z = jnp.split(linear(x, p["in_proj"], p.get("in_bias")), 2, axis=-1)
    u, memory = convolve(memory, u, lengths, p["conv"], p.get("conv_bias"))
    u = jax.nn.silu(u.astype(jnp.float32))
    projected = _by_head(u.astype(x.dtype).reshape(rows, n_tokens, hp.n_heads, -1), p["x_proj"])
    delta, b, c = jnp.split(projected, [hp.dt_rank, hp.dt_rank + hp.state_size], axis=-1)
    if hp.inner_norm is not None:
        delta, b, c = (
            rms_norm(t, p.get(f"{name}_norm"), hp.norm_eps) for name, t in (("dt", delta), ("b", b), ("c", c))
        )
    dt = _by_head(delta, p["dt_proj"]).reshape(u.shape).astype(jnp.float32)
    dt = dt + p["dt_bias"].astype(jnp.float32)
    # padding is inert: dt = 0 neither decays nor writes
    dt = jnp.where(valid_tokens(n_tokens, lengths)[:, :, None], jax.nn.softplus(dt), 0.0)
    inputs = Inputs(dt=dt, u=dt * u, b=b.astype(jnp.float32), c=c.astype(jnp.float32))
    scan = selective_scan(-jnp.exp(p["a_log"].astype(jnp.float32)))
    y, memory = recur(memory, "ssm", scan, inputs, lengths, hp.chunk, form)
    y = (y + p["d"].astype(jnp.float32) * u) * jax.nn.silu(z.astype(jnp.float32))
    return linear(y.astype(x.dtype), p["out"], p.get("out_bias")), memory


def _by_head(x: Array, weight: Array) -> Array:
    """x [B, T, G, in] times the weight [G, out, in] of each head: [B, T, G, out]."""
    if len(weight) == 1:
        return linear(x, weight[0])
    return contract("btgi,goi->btgo", x, weight.astype(x.dtype)).astype(x.dtype)


def selective_scan(a: Array) -> Recurrence:
    """The recurrence with A = a [channels, N], negative."""
    return Recurrence(
        sequential=partial(_sequential, a), chunked=partial(_chunked, a), one_token=partial(_one_token, a)
    )


def _written(u: Array, b: Array) -> Array:
    """u [..., C] times b [..., G, N] of its part of the channels: [..., C, N]."""
    parts = u.reshape(*u.shape[:-1], b.shape[-2], -1)
    return (parts[..., None] * b[..., None, :]).reshape(*u.shape, b.shape[-1])


def _read(h: Array, c: Array) -> Array:
    """h [..., C, N] times c [..., G, N] of its part of the channels: [..., C]."""
    parts = h.reshape(*h.shape[:-2], c.shape[-2], -1, h.shape[-1])
    return jnp.einsum("...gcn,...gn->...gc", parts, c, precision=_HIGHEST).reshape(h.shape[:-1])


def _sequential(a: Array, inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    del chunk

    def token(h: Array, now: Inputs) -> tuple[Array, Array]:
        h = jnp.exp(now.dt[..., None] * a) * h + _written(now.u, now.b)
        return h, _read(h, now.c)

    return scan_tokens(token, state, inputs)


def _one_token(a: Array, inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    del chunk
    written = _written(inputs.u[:, 0], inputs.b[:, 0])
    h = jnp.exp(inputs.dt[:, 0, :, None] * a) * state + written
    return _read(h, inputs.c[:, 0])[:, None], h


def _chunked(a: Array, inputs: Inputs, state: Array, chunk: int) -> tuple[Array, Array]:
    """All states of a chunk at once by an associative scan, which holds [B, chunk, C, N]."""

    def one_chunk(h: Array, now: Inputs) -> tuple[Array, Array]:
        decay = jnp.exp(now.dt[..., None] * a)
        states = linear_scan(decay, _written(now.u, now.b), h)
        return states[:, -1], _read(states, now.c)

    return scan_chunks(one_chunk, state, inputs, chunk)
