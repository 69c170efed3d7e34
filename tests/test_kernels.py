"""Every kernel against its plain form in Pallas' interpreter, and compiled for the hardware."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.kernels import attention, scan, state
from jaxhybrid.kernels.platform import by_platform
from jaxhybrid.kernels.sight import Sight
from jaxhybrid.mixers import delta_rule, ssd
from jaxhybrid.mixers.attention import attend
from jaxhybrid.mixers.chunks import cumulative_decay

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import aot_targets  # noqa: E402

ON = {"tpu": attention.on_tpu, "cuda": attention.on_cuda}
platforms = pytest.mark.parametrize("on", ON.values(), ids=list(ON))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that small problems have several."""
    monkeypatch.setattr(attention, "_TPU_CELLS", 128)
    monkeypatch.setattr(attention, "_GPU_BLOCK_BYTES", 64 * 4 * 32)
    monkeypatch.setattr(attention, "_GPU_ROWS", 16)
    monkeypatch.setattr(attention, "_TPU_ROWS", 16)
    monkeypatch.setattr(attention, "_GPU_PROGRAMS", 16)
    monkeypatch.setattr(scan, "_STATE", 16 * 16)
    monkeypatch.setattr(state, "_TPU_BLOCK_BYTES", 8 * 4 * 16 * 128)  # eight heads
    monkeypatch.setattr(state, "_GPU_BLOCK", 16 * 64)  # a half of a head, or a quarter


def problem(
    rows=2, n_tokens=1, heads=(4, 2), sizes=(64, 64), cells=256, room=0, shared=False, dtype="float32"
):
    """q, keys, values and a sight of cells in any order, with holes; row 0 sees nothing at all.

    What no row may look at is NaN: keys in holes, keys and values beyond the last cell with a position.
    """
    rng = np.random.default_rng(0)
    streams = 1 if shared else rows
    q = rng.normal(size=(rows, n_tokens, heads[0], sizes[0]))
    k, v = (rng.normal(size=(streams, heads[1], cells + room, size)) for size in sizes)
    position = np.argsort(rng.random((rows, cells)), axis=1)
    position[:, rng.random(cells) < 0.3] = -1
    position[:, cells - 40 :] = -1
    k.transpose(0, 2, 1, 3)[:, :cells][:, position[-1] < 0] = np.nan
    k[:, :, cells - 40 :] = v[:, :, cells - 40 :] = np.nan
    position[0] = -1
    sight = Sight(jnp.asarray(position, jnp.int32), 60 * jnp.arange(rows, dtype=jnp.int32), n_tokens, 90)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), sight


def plain(q, k, v, sight):
    return attend(q, k[:, :, : sight.n_cells], jnp.nan_to_num(v[:, :, : sight.n_cells]), sight.mask, 0.2)


@platforms
@pytest.mark.parametrize(
    "case",
    [
        {"rows": 3, "heads": (6, 2), "cells": 384, "sizes": (128, 64)},
        {"shared": True, "rows": 3},
        {"n_tokens": 11, "heads": (3, 1), "shared": True},
        {"dtype": "bfloat16", "room": 128, "n_tokens": 2},  # a bucket of a larger buffer
    ],
    ids=str,
)
def test_attention_is_the_plain_one(on, case):
    q, k, v, sight = problem(**case)
    y = jax.jit(partial(on, scale=0.2, interpret=True))(q, k, v, sight)
    expected = plain(q, k, v, sight)
    # both accumulate in float32; bfloat16 weights are rounded before they are normalised, or after
    tolerance = 2e-2 if q.dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(np.float32(y[1:]), np.float32(expected[1:]), rtol=0, atol=tolerance)
    assert np.all(np.isfinite(np.float32(y[0])))


@platforms
def test_attention_of_one_and_of_all_cells(on):
    q, k, v, sight = problem(cells=128, heads=(1, 1))
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    cells = jnp.stack([jnp.arange(128), jnp.where(jnp.arange(128) == 0, 0, -1)])
    sight = sight.replace(cells=cells.astype(jnp.int32), starts=jnp.asarray([127, 5]), window=None)
    y = jax.jit(partial(on, scale=0.2, interpret=True))(q, k, v, sight)
    np.testing.assert_allclose(y, plain(q, k, v, sight), rtol=0, atol=2e-6)
    np.testing.assert_allclose(y[1, 0], v[1, :, 0], rtol=0, atol=1e-6)  # one cell has all the weight


def test_where_there_is_a_kernel_the_answer_has_the_plain_gradient_and_maps():
    *qkv, sight = problem(rows=2, heads=(2, 1), cells=128)
    qkv = [jnp.nan_to_num(x) for x in qkv]
    kernel = partial(attention.on_cuda, scale=0.2, interpret=True)

    def loss(f, q, k, v):
        return jnp.sum(f(q, k, v, sight)[1:] ** 2)

    def chosen(*arguments):  # on the CPU that tests run on
        return by_platform(plain, {"cpu": kernel}, *arguments)

    wrt = jax.jit(jax.grad(partial(loss, chosen), (0, 1, 2)))(*qkv)
    for mine, expected in zip(wrt, jax.grad(partial(loss, plain), (0, 1, 2))(*qkv), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-4)  # float32, sums of 128
    two = [jnp.stack([x, x[::-1]]) for x in qkv]
    mapped = jax.jit(jax.vmap(lambda q, k, v: chosen(q, k, v, sight)))(*two)
    expected = plain(*(x[::-1] for x in qkv), sight)
    np.testing.assert_allclose(mapped[1, 1:], expected[1:], rtol=0, atol=2e-6)


@pytest.mark.parametrize("on", [state.on_tpu, state.on_cuda], ids=["tpu", "cuda"])
@pytest.mark.parametrize(("kind", "groups"), [("by head", 2), ("by channel", 4)])
def test_state_updates_are_the_plain_ones(on, groups, kind):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(3, 1, *shape)), jnp.float32)

    s, per_head = draw(16, 16, 128)[:, 0], draw(16)
    log_a = -jnp.abs(draw(16, 16) if "channel" in kind else per_head)
    inputs = delta_rule.Inputs(draw(groups, 16), draw(groups, 16) / 4, draw(16, 128), log_a, draw(16))
    y, new = jax.jit(lambda i, s: on(state.operands_of(i, s), interpret=True))(inputs, s)
    expected, end = delta_rule.DELTA_RULE.one_token(inputs, s, 1)
    # sums of 128 float32 products in another order
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=0, atol=3e-5)
    np.testing.assert_allclose(new.reshape(end.shape), end, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_kernels_compile_for_the_hardware_and_leave_keys_and_states_where_they_lie(name, monkeypatch):
    if message := aot_targets.missing(name):
        pytest.skip(message)
    monkeypatch.undo()  # blocks of the sizes that are used
    target = aot_targets.target(name)

    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    for n_tokens, size in ((1, 64), (1, 128), (64, 64)):

        def attended(q, k, v, cells, starts, n_tokens=n_tokens):
            return attention.attend(attend, q, k, v, Sight(cells, starts, n_tokens), 0.1)

        q, kv = (of(*s, size, dtype=jnp.bfloat16) for s in ((8, n_tokens, 12), (8, 4, 4096)))
        cells, starts = (of(*s, dtype=jnp.int32) for s in ((8, 4096), (8,)))
        compiled = aot_targets.compile_for(target, attended, q, kv, kv, cells, starts)
        assert "custom-call" in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < kv.size  # less than a half of K or V
    inputs = delta_rule.Inputs(*(of(8, 1, *s) for s in ((16, 128), (16, 128), (32, 128), (32,), (32,))))
    update = partial(state.delta_rule, delta_rule.DELTA_RULE.one_token)
    compiled = aot_targets.compile_for(
        target, update, inputs, of(8, 32, 128, 128), 1, donate_argnums=1, static_argnums=2
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * 8 * 32 * 128 * 128
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 20


def test_a_scan_in_one_kernel_is_the_plain_one():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(2, 70, *shape)), jnp.float32)

    inputs = ssd.Inputs(draw(4, 32), draw(2, 16), draw(2, 16), -8 * jnp.abs(draw(4)) ** 3)
    s = draw(4, 32, 16)[:, 0]
    y, new = jax.jit(lambda i, s: scan.on_cuda(cumulative_decay, i, s, interpret=True))(inputs, s)
    expected, end = ssd.SSD.sequential(inputs, s, 1)
    # as far as the plain chunked form is from the sequential one: float32, sums of 32 tokens
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(new, end, rtol=0, atol=1e-4)
