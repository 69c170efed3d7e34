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
from jaxhybrid.params import initialise

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
        inputs = ssd.Inputs(part(3, HEADS, VALUE), b, c, -spread(HEADS))
        return inputs, normal(rows, HEADS, VALUE, KEY, seed=4)
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


@recurrences
@pytest.mark.parametrize(
    "n_tokens, chunks", [(1, (64,)), pytest.param(11, (1, 3, 16), marks=quick), (70, (16, 64, 128))]
)
def test_the_forms_agree_with_the_definition(name, n_tokens, chunks):
    """Chunks of 3, 16 and 64 leave a part of the last one empty; the largest are more than there is."""
    inputs, state = inputs_of(name, n_tokens)
    expected = in_float64(name, inputs, state)
    found = {f"chunks of {n}": go(inputs, state, name, chunk=n) for n in chunks}
    found |= {"sequential": go(inputs, state, name, "sequential"), "one": by_one_token(inputs, state, name)}
    for y, after in found.values():
        close(y, expected[0], ROUNDING)
        close(after, expected[1], ROUNDING)


# ------------------------------------------------------------------------------- extreme decays

LONG = 256
DECAYS = {"ssd": (HEADS,), "delta by head": (HEADS,), "delta by channel": (HEADS, KEY), "rg_lru": (CHANNELS,)}
"""Log decays of one token."""


def at_tokens(chosen: np.ndarray, like: np.ndarray) -> np.ndarray:
    """`chosen` [T] in the shape of `like` [B, T, ...]."""
    return chosen.reshape(1, -1, *(1,) * (like.ndim - 2))


def survives(name: str, log_a: np.ndarray, n_tokens: int) -> None:
    """Chunks of 64 of LONG tokens with these log decays [T, ...], inert from n_tokens on."""
    inputs, state = inputs_of(name, LONG, rows=1)
    inputs = inputs._replace(log_a=log_a[None].astype(np.float32))
    inputs = jax.tree.map(lambda t: np.where(at_tokens(np.arange(LONG) < n_tokens, t), t, 0), inputs)
    y, after = go(inputs, state, name)
    assert np.isfinite(y).all() and np.isfinite(after).all()
    expected = in_float64(name, inputs, state)
    close(y, expected[0], ROUNDING)
    close(after, expected[1], ROUNDING)


@pytest.mark.parametrize("n_tokens", [64, 256])
@pytest.mark.parametrize("name", DECAYS)
def test_weak_decays_survive_strong_ones_in_their_chunk(name, n_tokens):
    shape = (LONG, *DECAYS[name])
    weak = np.full(shape, -1e-3)
    # one in ten is strong, at other tokens in every head or channel; one token in seven in all of them
    survives(name, np.where(np.random.default_rng(0).random(shape) < 0.1, -100, weak), n_tokens)
    survives(name, np.where(at_tokens(np.arange(LONG) % 7 == 3, weak[None])[0], -1e5, 30 * weak), n_tokens)
    # heads or channels that keep nothing beside such that keep almost everything
    survives(name, np.where(np.arange(shape[-1]) % 2, -100, weak), n_tokens)
    survives(name, 0 * weak, n_tokens)
    survives(name, 0 * weak - 1e4, n_tokens)


@pytest.mark.parametrize("n_tokens", [64, 256])
@pytest.mark.parametrize("bound", [-5.0, -0.5])
def test_decays_by_channel_at_the_bound_of_a_safe_gate_on_every_token(bound, n_tokens):
    """-320 over a chunk: more than the exponent of a float32 holds."""
    survives("delta by channel", np.full((LONG, HEADS, KEY), bound), n_tokens)


def test_the_delta_rule_of_one_key_written_again_and_again():
    """With beta = 2 a token turns what the key holds around, and nothing that was written decays, errors
    included: of 256 tokens they add up to 2e-5 (to 1e-6 with beta = 1, which forgets what was there)."""
    inputs, state = inputs_of("delta by head", LONG, rows=1)
    for beta, tolerance in ((1.0, ROUNDING), (2.0, 1e-4)):
        same = inputs._replace(
            k=np.broadcast_to(inputs.k[:, :1], inputs.k.shape),
            beta=np.full_like(inputs.beta, beta),
            log_a=0 * inputs.log_a,
        )
        y, after = go(same, state, "delta by head")
        expected = in_float64("delta by head", same, state)
        close(y, expected[0], tolerance)
        close(after, expected[1], tolerance)


# ------------------------------------------------------------------------------------- gradients

N_SLOPES = 70
STILL = np.isin(np.arange(N_SLOPES), [5, 6, 20, 63, 64, 68, 69])
"""Tokens that do not decay: alone, side by side, at the end of a chunk and of everything."""


@partial(jax.jit, static_argnames="name")
def slopes(inputs: Any, state: Any, weights: Any, name: str) -> Any:
    def loss(inputs: Any, state: Any) -> Any:
        y, after = RECURRENCES[name][0].chunked(inputs, state, 64)
        return jnp.sum(y * weights[0]) + jnp.sum(after * weights[1])

    return jax.grad(loss, argnums=(0, 1))(inputs, state)


@pytest.mark.parametrize("name", [name for name in RECURRENCES if name != "selective scan"])
def test_gradients_are_slopes_of_the_definition(name):
    """Along random directions, by central differences in float64, at decays and beta of 0 as well."""
    inputs, state = inputs_of(name, N_SLOPES)
    decay = "dt" if name.startswith("selective") else "log_a"
    still = np.where(at_tokens(STILL, getattr(inputs, decay)), 0, getattr(inputs, decay))
    inputs = inputs._replace(**{decay: still})
    if name.startswith("delta"):
        inputs = inputs._replace(
            beta=np.where(at_tokens(np.arange(N_SLOPES) % 9 == 2, inputs.beta), 0, inputs.beta)
        )
    weights = [normal(*part.shape, seed=8 + i) for i, part in enumerate(in_float64(name, inputs, state))]
    gradient = slopes(inputs, state, weights, name)
    chex.assert_tree_all_finite(gradient)

    values = oracle.exact((*inputs, state))

    def loss(i: int, step: np.ndarray) -> float:
        moved = [*values[:i], values[i] + step, *values[i + 1 :]]
        found = in_float64(name, type(inputs)(*moved[:-1]), moved[-1])
        return sum(np.sum(part * weight) for part, weight in zip(found, weights, strict=True))

    names, h = (*inputs._fields, "state"), 1e-5
    for i, (value, slope) in enumerate(zip(values, (*gradient[0], gradient[1]), strict=True)):
        direction = np.random.default_rng(i).standard_normal(value.shape)
        directions = [direction]
        if names[i] != "state":  # and of the tokens without decay by themselves
            directions.append(direction * at_tokens(STILL, value))
        for d in directions:
            expected = (loss(i, h * d) - loss(i, -h * d)) / (2 * h)
            found = np.sum(np.asarray(slope, np.float64) * d)
            length = np.linalg.norm(np.asarray(slope) * (d != 0))
            assert abs(found - expected) < 1e-5 * length, (names[i], found, expected)


# ------------------------------------------------------------------------------ mixers in pieces

WIDTH = 11
LENGTHS = np.array([11, 5, 1, 0], np.int32)
FIRST = np.array([0, 3, 0, 7], np.int32)
"""Positions of the rows' first tokens: RG-LRU treats position 0 apart."""
SCALED = dataclasses.replace(
    MAMBA2,
    gated_norm=None,
    dt_min=0.3,
    dt_max=1.2,
    bias=False,
    in_multiplier=1.5,
    out_multiplier=0.7,
    multipliers=(0.9, 0.7, 1.3, 0.8, 1.2),
)
MAMBA1 = Mamba1Hparams(d_inner=8, state_size=3, dt_rank=2, chunk=4, norm_eps=0.01)
DELTA = GatedDeltaHparams(n_heads=4, n_key_heads=2, key_dim=4, value_dim=3, chunk=4, norm_eps=0.01)
MIXERS: dict[str, Any] = {
    "mamba1": MAMBA1,
    "mamba1, plain norms": dataclasses.replace(MAMBA1, inner_norm="plain", bias=True, conv_bias=False),
    "mamba1, norms, 2 heads": dataclasses.replace(MAMBA1, inner_norm="weighted", n_heads=2),
    "mamba2, norm after": MAMBA2,
    "mamba2, norm before": dataclasses.replace(MAMBA2, gated_norm="before", conv_bias=False),
    "mamba2, no norm, multipliers": SCALED,
    "delta by head": DELTA,
    "delta by channel, low ranks": dataclasses.replace(
        DELTA, decay="channel", decay_rank=2, gate_rank=3, gate="sigmoid"
    ),
    "delta by channel, safe, beta to 2": dataclasses.replace(DELTA, decay="safe_channel", beta_scale=2.0),
    "short conv": ShortConvHparams(width=8),
    "short conv, bias": ShortConvHparams(width=8, conv_kernel=5, bias=True),
    "rg_lru": RgLruHparams(width=8, n_blocks=2, chunk=4),
    "lightning": LightningHparams(n_heads=2, head_dim=4, depth=0.8, chunk=4, norm_eps=0.01),
}
mixers = pytest.mark.parametrize("name", MIXERS)


class Recent(struct.PyTreeNode):
    """The state of each row; once advanced, those after its last three tokens, newest first."""

    states: Any
    n_states = 3

    def advance(self, name: str, f: Advance, rows: Any) -> tuple[Any, "Recent"]:
        y, states = f(self.states[name], rows)
        return y, self.replace(states=self.states | {name: states})


@partial(jax.jit, static_argnames=("hp", "recent"))
def advance(
    p: Any, x: Any, state: Any, first: Any, lengths: Any, hp: Any, recent: bool = False
) -> tuple[Any, Any]:
    memory = Recent(state) if recent else RowStates(state)
    positions = first[:, None] + jnp.arange(x.shape[1])
    y, memory = mixer_of(hp).apply(p, x, memory, positions, lengths, hp)
    return y, memory.states


def in_one_go(name: str, lengths: np.ndarray = LENGTHS, **options: Any) -> tuple[Any, Any]:
    p, x, state = mixer_case(name)
    return advance(p, x, state, FIRST, lengths, MIXERS[name], **options)


@cache
def mixer_case(name: str) -> tuple[Any, np.ndarray, Any]:
    """(params, x [4, WIDTH, D], states that are not zero)."""
    hp = MIXERS[name]
    state = {n: normal(len(LENGTHS), *s, seed=2) for n, s in hp.state_shapes.items()}
    return random_tree(mixer_of(hp).spec(hp, D_MODEL)), normal(len(LENGTHS), WIDTH, D_MODEL), state


def real(y: Any, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """y [B, T, ...] without what lies behind the rows' tokens."""
    y = np.asarray(y)
    return np.where((np.arange(y.shape[1]) < lengths[:, None])[..., None], y, 0)


def same_bits(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def row(state: Any, r: int) -> Any:
    return {name: np.asarray(s)[r] for name, s in state.items()}


@mixers
def test_a_mixer_goes_on_where_it_stopped(name):
    p, x, start = mixer_case(name)
    whole, after = in_one_go(name)
    # token by token: rows that have ended wait, and their states stay as they are
    state, ys = start, []
    for t in range(WIDTH):
        going = (t < LENGTHS).astype(np.int32)
        y, new = advance(p, x[:, t : t + 1], state, FIRST + t, going, MIXERS[name])
        ys.append(np.asarray(y))
        for r in np.flatnonzero(going == 0):
            same_bits(row(new, r), row(state, r))
        state = new
    close(real(np.concatenate(ys, axis=1)), real(whole), ROUNDING)
    jax.tree.map(lambda a, b: close(a, np.asarray(b), ROUNDING), state, after)
    # in pieces of other lengths in every row; what follows a piece is noise to it
    state, done, found = start, np.zeros(len(LENGTHS), np.int32), np.zeros_like(whole)
    for lengths in np.array([[4, 1, 0, 0], [0, 1, 0, 0], [2, 0, 1, 0], [5, 3, 0, 0]], np.int32):
        shifted = np.stack([np.roll(x[r], -n, axis=0) for r, n in enumerate(done)])
        y, state = advance(p, shifted, state, FIRST + done, lengths, MIXERS[name])
        for r, n in enumerate(lengths):
            found[r, done[r] : done[r] + n] = np.asarray(y)[r, :n]
        done += lengths
    assert np.array_equal(done, LENGTHS)
    close(found, real(whole), ROUNDING)
    jax.tree.map(lambda a, b: close(a, np.asarray(b), ROUNDING), state, after)


@mixers
def test_padding_is_inert_to_the_bit(name):
    p, x, start = mixer_case(name)
    y, after = in_one_go(name)
    noise = np.where((np.arange(WIDTH) < LENGTHS[:, None])[..., None], x, 1e3 * x[::-1] + 7)
    other, other_after = advance(p, noise, start, FIRST, LENGTHS, MIXERS[name])
    np.testing.assert_array_equal(real(other), real(y))
    same_bits(other_after, after)
    same_bits(row(after, 3), row(start, 3))


@mixers
def test_the_states_after_the_last_three_tokens(name):
    """Also of rows of one token and of none, where there is nothing earlier than the start."""
    y, recent = in_one_go(name, recent=True)
    close(real(y), real(in_one_go(name)[0]), ROUNDING)
    for back in range(3):
        _, expected = in_one_go(name, np.maximum(LENGTHS - back, 0))
        for state in expected:
            close(recent[state][:, back], np.asarray(expected[state]), ROUNDING)
    same_bits({n: s[3, 0] for n, s in recent.items()}, row(mixer_case(name)[2], 3))


@pytest.mark.parametrize("name", ["delta by head", "rg_lru"])
def test_the_states_after_each_of_three_tokens(name):
    p, x, start = mixer_case(name)
    lengths = np.array([3, 2, 1, 0], np.int32)
    y, recent = advance(p, x[:, :3], start, FIRST, lengths, MIXERS[name], recent=True)
    close(real(y, lengths), real(in_one_go(name, lengths)[0][:, :3], lengths), ROUNDING)
    for back in range(3):
        _, expected = in_one_go(name, np.maximum(lengths - back, 0))
        for state in expected:
            close(recent[state][:, back], np.asarray(expected[state]), ROUNDING)


@partial(jax.jit, static_argnames="hp")
def mixer_gradient(p: Any, x: Any, state: Any, weights: Any, hp: Any) -> Any:
    def loss(p: Any, x: Any) -> Any:
        y, after = advance(p, x, state, FIRST, LENGTHS, hp)
        y = jnp.where((np.arange(WIDTH) < LENGTHS[:, None])[..., None], y, 0)
        return jnp.sum(y * weights) + sum(jnp.sum(s) for s in after.values())

    return jax.grad(loss, argnums=(0, 1))(p, x)


@pytest.mark.parametrize("name", ["mamba2, norm after", "delta by channel, safe, beta to 2", "rg_lru"])
def test_gradients_of_mixers_are_finite_and_padding_gets_none(name):
    p, x, state = mixer_case(name)
    weights = normal(*x.shape, seed=3)
    gradient = mixer_gradient(p, x, state, weights, MIXERS[name])
    chex.assert_tree_all_finite(gradient)
    assert not np.any(np.asarray(gradient[1]) - real(gradient[1]))
    # padding so large that gates close: another sum of zeros, the same gradient to the bit
    noise = np.where((np.arange(WIDTH) < LENGTHS[:, None])[..., None], x, 1e3 * x[::-1] + 7)
    same_bits(mixer_gradient(p, noise, state, weights, MIXERS[name]), gradient)


# ------------------------------------------------------------------------------ many tokens, bfloat16

MANY = 32768
RATES = np.array([0.0, 1e-4, 0.03, 10.0])
"""Minus the log decay a token of each head or channel: everything is kept, 10,000 tokens, 33, one."""


def many_tokens(name: str) -> tuple[Any, Any, np.ndarray, Any, int]:
    """(recurrence, inputs, state, definition, the chunk of its hparams), 4 heads or channels, sizes of 8."""
    n, size = len(RATES), 8
    b, c = normal(1, MANY, n, size), normal(1, MANY, n, size, seed=2)
    u, state = normal(1, MANY, n, size, seed=3), normal(1, n, size, size, seed=4)
    draw = np.random.default_rng(5)
    spread = draw.uniform(0.5, 1.5, (1, MANY, n)).astype(np.float32)
    log_a = (-RATES * spread).astype(np.float32)
    if name == "ssd":
        return ssd.SSD, ssd.Inputs(u, b, c, log_a), state, oracle.ssd, Mamba2Hparams.chunk
    if name == "rg_lru":
        kept = np.sqrt(-np.expm1(2 * log_a)) + 0.01
        inputs = rg_lru.Inputs(kept * u[..., 0], log_a)
        return rg_lru.RG_LRU, inputs, state[:, :, 0, 0], oracle.rg_lru, RgLruHparams.chunk
    if name == "selective scan":
        a = -RATES[:, None] * np.linspace(0.5, 1.5, size)
        a = a.astype(np.float32)
        inputs = mamba1.Inputs(spread, spread * u[..., 0], b[:, :, :1], c[:, :, :1])
        definition = partial(oracle.selective_scan, a)
        return mamba1.selective_scan(a), inputs, state[:, :, 0], definition, Mamba1Hparams.chunk
    if name == "delta by channel":  # a head has channels of every rate
        log_a = -np.tile(RATES, (n, size // n)) * draw.uniform(0.5, 1.5, (1, MANY, n, size))
    beta = draw.uniform(0, 1, (1, MANY, n)).astype(np.float32)
    inputs = delta_rule.Inputs(c, of_length_1(b), u, log_a.astype(np.float32), beta)
    return delta_rule.DELTA_RULE, inputs, state, oracle.delta_rule, GatedDeltaHparams.chunk


def drift(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Errors of the outputs and of the state after them of each head, relative in the Euclidean norm."""
    recurrence, inputs, state, definition, chunk = many_tokens(name)
    found = jax.jit(recurrence.chunked, static_argnums=2)(inputs, state, chunk)
    expected = definition(inputs, state)

    def relative(part: Any, exact: np.ndarray, axis: int) -> np.ndarray:
        by_head = [
            np.moveaxis(np.asarray(a, np.float64), axis, 0).reshape(len(RATES), -1) for a in (part, exact)
        ]
        return np.linalg.norm(by_head[0] - by_head[1], axis=1) / np.linalg.norm(by_head[1], axis=1)

    return relative(found[0], expected[0], 2), relative(found[1], expected[1], 1)


@pytest.mark.parametrize(
    "name, limit",
    [
        ("ssd", 2e-6),
        ("delta by head", 2e-6),
        ("delta by channel", 2e-6),
        ("selective scan", 1e-4),
        ("rg_lru", 5e-5),
    ],
)
def test_32768_tokens_do_not_drift(name, limit):
    """Measured, outputs and states of the worst head: ssd 3.4e-7, 4.1e-7; delta 2.8e-7, 4.1e-7, by channel
    2.3e-7, 3.4e-7; selective scan 2.4e-5, 3.9e-5; rg_lru 1.1e-5, 3.4e-6. The last two multiply decays in
    pairs: near 1 that rounds the same way each time, 1e-8 a token, which only states that last for some
    10,000 tokens feel; all others stay below 4e-7.
    """
    outputs, states = drift(name)
    assert outputs.max() < limit and states.max() < limit
    assert np.delete(outputs, 1).max() < 2e-6 and np.delete(states, 1).max() < 2e-6


@partial(jax.jit, static_argnames="hp")
def token_by_token(p: Any, x: Any, state: Any, hp: Any) -> tuple[Any, Any]:
    ones = jnp.ones(x.shape[0], jnp.int32)

    def token(state: Any, now: Any) -> tuple[Any, Any]:
        y, memory = mixer_of(hp).apply(p, now[:, None], RowStates(state), ones[:, None], ones, hp)
        return memory.states, y[:, 0]

    state, y = jax.lax.scan(token, state, x.swapaxes(0, 1))
    return y.swapaxes(0, 1), state


@pytest.mark.parametrize(
    "hp, of_outputs, of_states",
    [
        (Mamba1Hparams(16, 8, 4), 6.0e-4, 7.1e-3),
        (Mamba2Hparams(4, 8, 8), 3.9e-4, 6.2e-3),
        (GatedDeltaHparams(4, 4, 8, 8), 3.9e-3, 4.5e-3),
        (GatedDeltaHparams(4, 4, 8, 8, decay="channel"), 4.3e-3, 4.0e-3),
        (RgLruHparams(16, 4), 2.2e-4, 1.8e-3),
        (LightningHparams(4, 8, 1.0), 8.3e-3, 1.6e-2),
    ],
    ids=["mamba1", "mamba2", "delta by head", "delta by channel", "rg_lru", "lightning"],
)
def test_what_states_in_bfloat16_cost(hp, of_outputs, of_states):
    """256 tokens, one by one, with parameters as initialised: errors as measured, relative to float32 states.

    A state is rounded to 8 bits, 1e-3, after every token; outputs feel less of it where the skip D u, or
    the state's own decay, is large. Decays above 0.998 round to none at all.
    """
    p = initialise(mixer_of(hp).spec(hp, D_MODEL), jax.random.key(0), jnp.float32)
    x, found = normal(4, 256, D_MODEL), []
    for dtype in (jnp.float32, jnp.bfloat16):
        start = {
            name: jnp.zeros((4, *shape), jnp.float32 if name == "conv" else dtype)
            for name, shape in hp.state_shapes.items()
        }
        y, after = token_by_token(p, x, start, hp)
        (state,) = (s for name, s in after.items() if name != "conv")
        assert state.dtype == dtype and y.dtype == jnp.float32
        found.append((np.asarray(y, np.float64), np.asarray(state.astype(jnp.float32), np.float64)))
    for exact, rough, measured in zip(*found, (of_outputs, of_states), strict=True):
        assert measured / 3 < np.linalg.norm(rough - exact) / np.linalg.norm(exact) < 3 * measured


# ------------------------------------------------------------------------------- latent attention

MLA = MlaHparams(n_heads=3, kv_rank=6, nope_dim=4, rope_dim=4, value_dim=5, scale=0.4, norm_eps=0.01)
MLAS = {
    "nope": MLA,
    "rope": dataclasses.replace(MLA, rope=RopeHparams(4, 100.0)),
    "interleaved, gate": dataclasses.replace(MLA, rope=RopeHparams(4, 100.0, interleaved=True), gate=True),
    "nope, low-rank queries, gate": dataclasses.replace(MLA, q_rank=5, gate=True),
    "interleaved, low-rank queries": dataclasses.replace(
        MLA, rope=RopeHparams(4, interleaved=True), q_rank=5
    ),
}


@quick
@pytest.mark.parametrize("name", MLAS)
def test_latent_attention_in_both_forms_agrees_with_the_definition(name):
    hp, lengths, first = MLAS[name], np.array([7, 3, 1], np.int32), np.array([0, 40, 300])
    p, x = random_tree(mla.spec(hp, D_MODEL)), normal(3, 7, D_MODEL)
    memory = Causal(valid=jnp.arange(7) < lengths[:, None])
    expected = [oracle.mla_row(p, x[r, :n], first[r], hp) for r, n in enumerate(lengths)]
    for form in (mla.absorbed, mla.expanded, None):
        y, _ = jax.jit(partial(mla.apply, hp=hp, form=form))(
            p, x, memory, first[:, None] + np.arange(7), lengths
        )
        for r, n in enumerate(lengths):
            close(y[r, :n], expected[r], ROUNDING)


# ------------------------------------------------------------------------------------- experts

N_EXPERTS = 8
ROUTED = MoeHparams(n_experts=N_EXPERTS, top_k=3, d_ff=6)
SIGMOID = dataclasses.replace(ROUTED, scores="sigmoid")
GROUPED = dataclasses.replace(SIGMOID, n_groups=2, top_groups=1, selection_bias=True)
ROUTERS = {
    "softmax": ROUTED,
    "softmax as it is, multiplier": dataclasses.replace(ROUTED, renormalise=False, multiplier=2.5),
    "softmax, bias": dataclasses.replace(ROUTED, selection_bias=True),
    "softmax, groups": dataclasses.replace(ROUTED, n_groups=4, top_groups=2),
    "softmax, eps": dataclasses.replace(ROUTED, renormalise_eps=0.1),
    "sigmoid": SIGMOID,
    "sigmoid as it is": dataclasses.replace(SIGMOID, renormalise=False),
    "sigmoid, bias, eps, multiplier": dataclasses.replace(
        SIGMOID, selection_bias=True, renormalise_eps=0.1, multiplier=2.5
    ),
    "sigmoid, bias, groups": GROUPED,
    "sigmoid, groups as they are": dataclasses.replace(GROUPED, renormalise=False, selection_bias=False),
}
TIES = ((1, 5), (0, 4))
"""Equal experts, which win often; each pair in two groups."""


def router(hp: MoeHparams) -> tuple[Any, np.ndarray]:
    p = random_tree(moe_spec(hp, D_MODEL))
    for one, other in TIES:
        p["router"][one] *= 2
        p["router"][other] = p["router"][one]
    if hp.selection_bias:
        p["selection_bias"] *= 0.1  # scores still count
        p["selection_bias"][[other for _, other in TIES]] = p["selection_bias"][[one for one, _ in TIES]]
    return p, normal(40, D_MODEL)


@quick
@pytest.mark.parametrize("name", ROUTERS)
def test_routes_agree_with_the_definition(name):
    hp = ROUTERS[name]
    p, tokens = router(hp)
    experts, weights = map(np.asarray, jax.jit(route, static_argnums=2)(p, tokens, hp))
    assert weights.dtype == np.float32
    decided = 0
    for i, token in enumerate(tokens.astype(np.float64)):
        bias = p["selection_bias"].astype(np.float64) if hp.selection_bias else None
        expected = oracle.route(p["router"].astype(np.float64) @ token, bias, hp)
        assert experts[i].tolist() == expected[0]
        close(weights[i], expected[1], ROUNDING)
        decided += any((one in expected[0]) != (other in expected[0]) for one, other in TIES)
    assert decided  # some ties decide who is chosen


def test_equal_groups_go_to_the_lower_one():
    p, tokens = router(GROUPED)
    p["router"][4:], p["selection_bias"][4:] = p["router"][:4], p["selection_bias"][:4]
    experts, _ = route(p, tokens, GROUPED)
    assert np.asarray(experts).max() < 4


def test_a_selection_bias_chooses_and_does_not_weigh():
    hp = dataclasses.replace(SIGMOID, selection_bias=True, renormalise=False)
    p, tokens = router(hp)
    p["selection_bias"][:] = 0
    p["selection_bias"][6] = 5
    experts, weights = map(np.asarray, route(p, tokens, hp))
    assert np.all(experts[:, 0] == 6)
    close(weights[:, 0], oracle.sigmoid(tokens.astype(np.float64) @ p["router"][6]), ROUNDING)


KINDS = {
    "latent, gated": dataclasses.replace(SIGMOID, latent=5),
    "latent, not gated": dataclasses.replace(SIGMOID, latent=5, gated=False, activation="relu2"),
    "not gated": dataclasses.replace(GROUPED, gated=False, activation="relu2"),
}


@quick
@pytest.mark.parametrize("n_tokens", [2, 9], ids=["gathered", "sorted"])
@pytest.mark.parametrize("name", KINDS)
def test_experts_of_every_kind_agree_with_a_loop(name, n_tokens):
    hp = KINDS[name]
    p, tokens = router(hp)
    exact, expected = {n: a.astype(np.float64) for n, a in p.items()}, []
    for token in tokens[:n_tokens].astype(np.float64):
        experts, weights = oracle.route(exact["router"] @ token, exact.get("selection_bias"), hp)
        inner = exact["latent_down"] @ token if hp.latent else token
        total = 0
        for e, weight in zip(experts, weights, strict=True):
            if hp.gated:
                gate, up = exact["gate_up"][e] @ inner
                hidden = gate * oracle.sigmoid(gate) * up
            else:
                hidden = np.maximum(exact["up"][e] @ inner, 0) ** 2
            total = total + weight * (exact["down"][e] @ hidden)
        expected.append(exact["latent_up"] @ total if hp.latent else total)
    y = jax.jit(moe, static_argnums=2)(p, tokens[None, :n_tokens], hp)
    close(y[0], np.array(expected), ROUNDING)


# -------------------------------------------------------------------------------- rotary embedding

YARN = RopeHparams(16, 1e4, "yarn", factor=8.0, original_context=512)
LONGROPE = RopeHparams(
    8, 1e4, "longrope", short_factors=(1.0, 1.1, 1.5, 2.0), long_factors=(1.0, 3.0, 9.0, 40.0)
)
ROPES = {
    "yarn": YARN,
    "yarn between pairs": dataclasses.replace(YARN, truncate=False),
    "yarn, other ramp": dataclasses.replace(YARN, beta_fast=16.0, beta_slow=2.0, truncate=False),
    "yarn, ramp from the first pair on": dataclasses.replace(YARN, original_context=64),
    "yarn, ramp to the last pair": dataclasses.replace(YARN, theta=10.0, original_context=4096),
    "longrope, short": LONGROPE,
    "longrope, long": dataclasses.replace(LONGROPE, long=True),
    "proportional": RopeHparams(16, 1e6, "proportional", fraction=0.5),
    "proportional, a quarter": RopeHparams(8, 1e6, "proportional", fraction=0.25),
    "interleaved": RopeHparams(8, interleaved=True),
    "interleaved yarn, amplitude": dataclasses.replace(YARN, interleaved=True, amplitude=1.3),
    "longrope, amplitude": dataclasses.replace(LONGROPE, amplitude=1.2),
}


@quick
@pytest.mark.parametrize("name", ROPES)
def test_rotations_agree_with_the_definition(name):
    rope, positions = ROPES[name], np.array([[0, 1, 5], [2, 77, 400]])
    expected = oracle.radians(rope)
    np.testing.assert_allclose(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    x = normal(2, 3, 2, rope.dim + 3)  # what lies behind the first dims is not turned
    y = rotate(jnp.asarray(x), jnp.asarray(positions), rope)
    turned = [
        [[oracle.turned(v, positions[r, t], rope) for v in x[r, t]] for t in range(3)] for r in range(2)
    ]
    # an angle of 400 radians is rounded to 3e-5
    close(y, np.array(turned), 5e-5)
    np.testing.assert_array_equal(y[..., rope.dim :], x[..., rope.dim :])


def test_scalings_change_what_they_should():
    plain = inverse_frequencies(RopeHparams(16, 1e4))
    yarn = inverse_frequencies(YARN)
    assert yarn[0] == plain[0] and np.isclose(yarn[-1], plain[-1] / 8)  # fast pairs stay, slow ones do not
    assert not np.allclose(yarn, inverse_frequencies(ROPES["yarn between pairs"]))
    assert np.all(inverse_frequencies(ROPES["proportional"])[4:] == 0)


@pytest.mark.parametrize(
    "name", ["yarn", "interleaved", "interleaved yarn, amplitude", "longrope, amplitude"]
)
def test_turning_further_is_turning_once(name):
    """What was rotated to a position and moves by some more, or back, is amplified once."""
    rope, x = ROPES[name], jnp.asarray(normal(2, 3, 2, ROPES[name].dim + 3))
    positions, more = np.array([[0, 1, 5], [20, 77, 300]]), np.array([[3, 0, 40], [-20, -7, 100]])
    moved = rotate_further(rotate(x, positions, rope), more, rope)
    close(moved, np.asarray(rotate(x, positions + more, rope), np.float64), 5e-5)
