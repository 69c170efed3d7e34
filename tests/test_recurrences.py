"""Recurrences and recurrent mixers in all their forms, latent attention, routing and rotary embedding.

What is exact stands in `recurrence_oracles`, in float64. Tolerances are fractions of the largest value
expected (`close`): float32 rounds to 6e-8, and 2e-6 is ten times what sums of up to a hundred terms lose.
"""

import dataclasses
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrence_oracles as oracle
from flax import struct
from test_mixers import D_MODEL, MAMBA2, close, normal, random_tree

from jaxhybrid.hparams import (
    GatedDeltaHparams,
    LightningHparams,
    Mamba1Hparams,
    Mamba2Hparams,
    MlaHparams,
    MoeHparams,
    RgLruHparams,
    RopeHparams,
    ShortConvHparams,
)
from jaxhybrid.mixers import delta_rule, mamba1, mixer_of, mla, rg_lru, ssd
from jaxhybrid.mixers.memory import Advance, Causal, RowStates
from jaxhybrid.ops.moe import moe, moe_spec, route
from jaxhybrid.ops.rope import inverse_frequencies, rotate, rotate_further

quick = pytest.mark.quick
ROUNDING = 2e-6

# ------------------------------------------------------------------------------- recurrences alone

ROWS, HEADS, GROUPS, KEY, VALUE = 2, 4, 2, 5, 3
CHANNELS = HEADS * VALUE
A = -np.exp(np.linspace(-3, 1, CHANNELS * KEY)).reshape(CHANNELS, KEY).astype(np.float32)
RECURRENCES: dict[str, Any] = {
    "ssd": (ssd.SSD, oracle.ssd),
    "delta by head": (delta_rule.DELTA_RULE, oracle.delta_rule),
    "delta by channel": (delta_rule.DELTA_RULE, oracle.delta_rule),
    "selective scan": (mamba1.selective_scan(A), partial(oracle.selective_scan, A)),
    "selective scan of 2 heads": (mamba1.selective_scan(A), partial(oracle.selective_scan, A)),
    "rg_lru": (rg_lru.RG_LRU, oracle.rg_lru),
}
recurrences = pytest.mark.parametrize("name", RECURRENCES)


@partial(jax.jit, static_argnames=("name", "form", "chunk"))
def go(inputs: Any, state: Any, name: str, form: str = "chunked", chunk: int = 64) -> tuple[Any, Any]:
    return getattr(RECURRENCES[name][0], form)(inputs, state, chunk)


def in_float64(name: str, inputs: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    return RECURRENCES[name][1](inputs, state)


def of_length_1(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def inputs_of(name: str, n_tokens: int, rows: int = ROWS) -> tuple[Any, np.ndarray]:
    """(inputs, a state that is not zero). Log decays of a token lie between -1e-3 and -7."""
    shape = (rows, n_tokens)

    def spread(*sizes: int) -> np.ndarray:
        return np.exp(np.random.default_rng(5).uniform(-7, 2, (*shape, *sizes))).astype(np.float32)

    def part(seed: int, *sizes: int) -> np.ndarray:
        return normal(*shape, *sizes, seed=seed)

    b, c = part(1, GROUPS, KEY), part(2, GROUPS, KEY)
    if name == "ssd":
        return ssd.Inputs(part(3, HEADS, VALUE), b, c, -spread(HEADS)), normal(
            rows, HEADS, VALUE, KEY, seed=4
        )
    if name.startswith("delta"):
        log_a = -spread(HEADS, KEY) if name.endswith("channel") else -spread(HEADS)
        # above 1 as well: what a key read before changes its sign
        beta = np.random.default_rng(6).uniform(0, 2, (*shape, HEADS)).astype(np.float32)
        inputs = delta_rule.Inputs(c, of_length_1(b), part(3, HEADS, VALUE), log_a, beta)
        return inputs, normal(rows, HEADS, KEY, VALUE, seed=4)
    if name.startswith("selective"):
        dt, parts = spread(CHANNELS), GROUPS if name.endswith("heads") else 1
        inputs = mamba1.Inputs(dt, dt * part(3, CHANNELS), b[:, :, :parts], c[:, :, :parts])
        return inputs, normal(rows, CHANNELS, KEY, seed=4)
    return rg_lru.Inputs(part(3, CHANNELS), -spread(CHANNELS)), normal(rows, CHANNELS, seed=4)


def by_one_token(inputs: Any, state: Any, name: str) -> tuple[np.ndarray, Any]:
    ys = []
    for t in range(jax.tree.leaves(inputs)[0].shape[1]):
        y, state = go(jax.tree.map(lambda a, t=t: a[:, t : t + 1], inputs), state, name, "one_token", 64)
        ys.append(np.asarray(y))
    return np.concatenate(ys, axis=1), state


@quick
@recurrences
@pytest.mark.parametrize("n_tokens, chunks", [(1, (64,)), (11, (3, 16)), (70, (1, 3, 16, 64, 128))])
def test_the_forms_agree_with_the_definition(name, n_tokens, chunks):
    """Chunks of 3, 16 and 64 leave a part of the last one empty, 128 is more than there is."""
    inputs, state = inputs_of(name, n_tokens)
    expected = in_float64(name, inputs, state)
    found = {f"chunks of {n}": go(inputs, state, name, chunk=n) for n in chunks}
    found |= {"sequential": go(inputs, state, name, "sequential"), "one": by_one_token(inputs, state, name)}
    for y, after in found.values():
        close(y, expected[0], ROUNDING)
        close(after, expected[1], ROUNDING)


# ------------------------------------------------------------------------------- extreme decays

N_LONG = 256


def delta_inputs(log_a: np.ndarray, beta: float | None = None) -> tuple[Any, np.ndarray]:
    """(inputs with these decays, repeated along the tokens to N_LONG of them; a state)."""
    name = "delta by channel" if log_a.ndim == 4 else "delta by head"
    inputs, state = inputs_of(name, N_LONG, rows=1)
    repeats = (1, -(-N_LONG // log_a.shape[1])) + (1,) * (log_a.ndim - 2)
    log_a = np.tile(log_a, repeats)[:, :N_LONG]
    shape = (1, N_LONG, HEADS, KEY)[: log_a.ndim]
    return inputs._replace(log_a=np.broadcast_to(log_a, shape).astype(np.float32)), state


def agrees_over_chunks(log_a: np.ndarray, n_tokens: int) -> None:
    name = "delta by channel" if log_a.ndim == 4 else "delta by head"
    inputs, state = delta_inputs(log_a)
    # tokens behind n_tokens are inert
    real = np.arange(N_LONG) < n_tokens
    inputs = jax.tree.map(lambda t: np.where(real.reshape(-1, *(1,) * (t.ndim - 2)), t, 0), inputs)
    y, after = go(inputs, state, name)
    assert np.isfinite(y).all() and np.isfinite(after).all()
    expected = in_float64(name, inputs, state)
    close(y, expected[0], ROUNDING)
    close(after, expected[1], ROUNDING)


@pytest.mark.parametrize("n_tokens", [64, 256])
@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_extreme_decays_of_the_delta_rule(by_channel, n_tokens):
    sizes = (HEADS, KEY) if by_channel else (HEADS,)
    weak = np.full((1, N_LONG, *sizes), -1e-3)
    strong = np.random.default_rng(0).random(weak.shape) < 0.1
    # one strong decay in ten, for every head or channel at other tokens; then for all at once
    agrees_over_chunks(np.where(strong, -100.0, weak), n_tokens)
    agrees_over_chunks(
        np.where(np.arange(N_LONG).reshape(1, -1, *(1,) * len(sizes)) % 7 == 3, -100, weak), n_tokens
    )
    # heads or channels that never decay beside such that keep nothing
    agrees_over_chunks(np.where(np.arange(sizes[-1]) % 2, -100.0, -1e-3) + 0 * weak, n_tokens)
    agrees_over_chunks(0 * weak, n_tokens)
    agrees_over_chunks(0 * weak - 1e4, n_tokens)


@pytest.mark.parametrize("n_tokens", [64, 256])
def test_the_safe_gate_at_its_bound_on_every_token(n_tokens):
    agrees_over_chunks(np.full((1, N_LONG, HEADS, KEY), -5.0), n_tokens)
