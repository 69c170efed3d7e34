"""Mixers and ops against oracles in numpy float64, written here from the formulas.

Results are float32, whose rounding (6e-8 relative) grows with the square root of the few hundred terms
of a sum: 2e-5 of the largest value leaves a margin of ten.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.hparams import AttentionHparams, Mamba2Hparams, MlpHparams, MoeHparams, RopeHparams
from jaxhybrid.mixers import attention, mamba2
from jaxhybrid.mixers.memory import Causal, RowStates
from jaxhybrid.ops import moe as experts_of
from jaxhybrid.ops.causal_conv import causal_conv
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.mlp import mlp, mlp_spec
from jaxhybrid.ops.moe import moe, moe_spec
from jaxhybrid.ops.norms import grouped_rms_norm, rms_norm
from jaxhybrid.params import Tree, flatten, unflatten

D_MODEL, ROWS, TOKENS = 12, 3, 11
# a norm of a vector that cancelled to almost nothing enlarges its rounding by up to norm_eps ** -0.5
MAMBA2 = Mamba2Hparams(
    n_heads=4, head_dim=3, state_size=5, n_groups=2, conv_kernel=4, chunk=4, norm_eps=0.01, bias=True
)


def close(actual: Any, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max(initial=1.0))


def random_tree(spec: Tree, seed: int = 0) -> Tree:
    """Every tensor random, biases and norms too, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, leaf in flatten(spec).items():
        scale = (leaf.fan_in or 4) ** -0.5
        made[name] = (scale * rng.standard_normal(leaf.shape)).astype(np.float32)
    return unflatten(made)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


# --------------------------------------------------------------------------------------- mamba-2


def mamba2_row(p: Tree, x: np.ndarray, conv: np.ndarray, ssm: np.ndarray, hp: Mamba2Hparams) -> tuple:
    """One row, token after token, real tokens only: x [T, D]; (y [T, D], conv [K-1, C], ssm [H, P, N])."""
    p = {name: np.asarray(a, np.float64) for name, a in p.items()}
    window, s, ys = list(conv.astype(np.float64)), ssm.astype(np.float64), []
    inner, channels, n = hp.d_inner, hp.conv_channels, hp.state_size
    for token in x.astype(np.float64):
        z, raw, dt = np.split(p["in_proj"] @ token + p["in_bias"], [inner, inner + channels])
        window.append(raw)
        mixed = sum(w * p["conv"][:, j] for j, w in enumerate(window[-hp.conv_kernel :]))
        mixed = silu(mixed + p["conv_bias"])
        dt = np.clip(np.log1p(np.exp(dt + p["dt_bias"])), hp.dt_min, hp.dt_max)
        y = np.zeros((hp.n_heads, hp.head_dim))
        for h in range(hp.n_heads):
            g = h // (hp.n_heads // hp.n_groups)
            u = mixed[h * hp.head_dim : (h + 1) * hp.head_dim]
            b = mixed[inner + g * n : inner + (g + 1) * n]
            c = mixed[inner + (hp.n_groups + g) * n : inner + (hp.n_groups + g + 1) * n]
            s[h] = np.exp(-np.exp(p["a_log"][h]) * dt[h]) * s[h] + dt[h] * np.outer(u, b)
            y[h] = s[h] @ c + p["d"][h] * u
        gated = (y.reshape(-1) * silu(z)).reshape(hp.n_groups, -1)
        ys.append(p["out"] @ (rms(gated, hp.norm_eps).reshape(-1) * p["norm"]) + p["out_bias"])
    return np.array(ys).reshape(x.shape), np.array(window[-(hp.conv_kernel - 1) :]), s


@partial(jax.jit, static_argnames=("hp", "form"))
def apply_mamba2(
    p: Tree, x: Any, state: Any, lengths: Any, hp: Mamba2Hparams, form: Any = None
) -> tuple[Any, Any]:
    y, memory = mamba2.apply(p, x, RowStates(state), jnp.zeros(x.shape[:2], jnp.int32), lengths, hp, form)
    return y, memory.states


def by_one_token(
    p: Tree, x: np.ndarray, state: Any, lengths: np.ndarray, hp: Mamba2Hparams
) -> tuple[np.ndarray, Any]:
    ys = []
    for t in range(x.shape[1]):
        y, state = apply_mamba2(p, x[:, t : t + 1], state, (t < lengths).astype(np.int32), hp)
        ys.append(np.asarray(y)[:, 0])
    return np.stack(ys, axis=1), state


FORMS: dict[str, Any] = {
    "sequential": partial(apply_mamba2, form="sequential"),
    "one_token": by_one_token,
    **{
        f"chunk {n}": lambda p, x, s, lengths, hp, n=n: apply_mamba2(
            p, x, s, lengths, dataclasses.replace(hp, chunk=n)
        )
        for n in (1, 3, 4, 64)
    },
}


def mamba2_case(hp: Mamba2Hparams = MAMBA2, rows: int = ROWS, n_tokens: int = TOKENS) -> tuple:
    """(params, x [B, T, D], a state that is not zero)."""
    p = random_tree(mamba2.spec(hp, D_MODEL))
    state = {n: normal(rows, *s, seed=2) for n, s in hp.state_shapes.items()}
    return p, normal(rows, n_tokens, D_MODEL), state


def agrees_with_the_definition(
    form: str, p: Tree, x: np.ndarray, state: Any, lengths: Any, hp: Mamba2Hparams
) -> None:
    lengths = np.asarray(lengths, np.int32)
    y, after = FORMS[form](p, x, state, lengths, hp)
    for row, n in enumerate(lengths):
        expected = mamba2_row(p, x[row, :n], state["conv"][row], state["ssm"][row], hp)
        close(y[row, :n], expected[0])
        close(after["conv"][row], expected[1])
        close(after["ssm"][row], expected[2])


@pytest.mark.parametrize("form", FORMS)
def test_mamba2_forms_agree_with_the_definition(form):
    # 11 tokens fill no chunk of 3, 4 or 64; the lengths lie on, before and after edges of chunks
    for lengths in ([11, 11, 11], [4, 3, 1], [5, 8, 9], [2, 0, 10]):
        agrees_with_the_definition(form, *mamba2_case(), lengths, MAMBA2)


@pytest.mark.parametrize("form", FORMS)
def test_mamba2_padding_is_inert(form):
    p, x, state = mamba2_case()
    lengths = np.array([11, 5, 0], np.int32)
    columns = np.arange(TOKENS)[None, :, None] < lengths[:, None, None]
    y, after = FORMS[form](p, x, state, lengths, MAMBA2)
    other_y, other = FORMS[form](p, np.where(columns, x, 1e3), state, lengths, MAMBA2)
    for name in state:
        np.testing.assert_array_equal(after[name], other[name])
        np.testing.assert_array_equal(after[name][2], state[name][2])
    np.testing.assert_array_equal(np.where(columns, y, 0), np.where(columns, other_y, 0))


def test_mamba2_padded_rows_end_where_unpadded_ones_do():
    p, x, state = mamba2_case()
    padded_y, padded = apply_mamba2(p, x, state, np.full(ROWS, 4, np.int32), MAMBA2)
    y, alone = apply_mamba2(p, x[:, :4], state, np.full(ROWS, 4, np.int32), MAMBA2)
    close(padded_y[:, :4], np.asarray(y), 1e-6)
    for name in state:
        close(padded[name], np.asarray(alone[name]), 1e-6)


@pytest.mark.parametrize("form", ["one_token", "chunk 4"])
def test_mamba2_step_sizes_are_limited_in_prefill_and_decode(form):
    p, x, state = mamba2_case()
    limited = dataclasses.replace(MAMBA2, dt_min=0.4, dt_max=0.9)
    lengths = np.array([11, 6, 0], np.int32)
    agrees_with_the_definition(form, p, x, state, lengths, limited)
    _, after = FORMS[form](p, x, state, lengths, limited)
    for hp in (dataclasses.replace(limited, dt_min=0.0), dataclasses.replace(limited, dt_max=np.inf)):
        expected = mamba2_row(p, x[0], state["conv"][0], state["ssm"][0], hp)
        assert np.abs(after["ssm"][0] - expected[2]).max() > 0.01  # both limits matter here


@pytest.mark.parametrize("form", ["sequential", "one_token", "chunk 64"])
def test_mamba2_does_not_drift_over_512_tokens(form):
    # one head remembers everything, one about a chunk, one a token or two and one nothing at all
    p, x, state = mamba2_case(rows=1, n_tokens=512)
    p["a_log"] = np.log(np.array([1e-4, 0.1, 1.0, 16.0], np.float32))
    p["dt_bias"] = np.array([-3.0, -2.0, 0.0, 5.0], np.float32)
    agrees_with_the_definition(form, p, x, state, [512], MAMBA2)


@pytest.mark.parametrize("form", ["sequential", "one_token", "chunk 64"])
def test_mamba2_weak_decays_survive_strong_ones_in_their_chunk(form):
    # step sizes from 1e-3 to 30 in one chunk: decays of e-400 beside decays of 0.99
    p, x, state = mamba2_case(rows=1, n_tokens=512)
    p["in_proj"][-MAMBA2.n_heads :] *= 10
    p["a_log"] = np.log(np.full(4, 16.0, np.float32))
    agrees_with_the_definition(form, p, x, state, [512], MAMBA2)


# ------------------------------------------------------------------------------------ convolution


@pytest.mark.parametrize("taps, n_tokens", [(2, 5), (4, 5), (4, 2), (4, 1)])
def test_causal_conv_agrees_with_a_loop(taps, n_tokens):
    lengths = np.array([n_tokens, n_tokens // 2, 0], np.int32)
    x, history = normal(ROWS, n_tokens, 6), normal(ROWS, taps - 1, 6, seed=2)
    weight, bias = normal(6, taps, seed=3), normal(6, seed=4)
    for b in (bias, None):
        y, kept = causal_conv(*map(jnp.asarray, (x, history, lengths, weight)), b)
        for row, n in enumerate(lengths):
            inputs = [*history[row], *x[row, :n]]
            for t in range(n):
                expected = np.zeros(6) if b is None else b.astype(np.float64)
                for j in range(taps):
                    expected = expected + weight[:, j].astype(np.float64) * inputs[t + j]
                close(y[row, t], expected, 1e-6)
            np.testing.assert_array_equal(kept[row], inputs[len(inputs) - taps + 1 :])


# --------------------------------------------------------------------------------------- attention


def radians(rope: RopeHparams) -> list[float]:
    """Radians a position of each pair; Llama 3.1's rule by wavelength, as its release states it."""
    found = []
    for pair in range(rope.dim // 2):
        w = rope.theta ** (-2 * pair / rope.dim)
        wavelength = 2 * np.pi / w
        if rope.scaling == "linear":
            w /= rope.factor
        elif rope.scaling == "llama3":
            if wavelength > rope.original_context / rope.low_freq_factor:
                w /= rope.factor
            elif wavelength > rope.original_context / rope.high_freq_factor:
                smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                w = (1 - smooth) * w / rope.factor + smooth * w
        found.append(w)
    return found


def turned(vector: np.ndarray, position: int, rope: RopeHparams | None) -> np.ndarray:
    """One head's vector: pair i is (component i, component i + dim / 2)."""
    vector = vector.copy()
    if rope is not None:
        half = rope.dim // 2
        for i, w in enumerate(radians(rope)):
            turn = np.exp(1j * w * position) * complex(vector[i], vector[i + half])
            vector[i], vector[i + half] = turn.real, turn.imag
    return vector


def attention_row(p: Tree, x: np.ndarray, first: int, hp: AttentionHparams) -> np.ndarray:
    """One row [T, D] that begins at position `first`, query after query, head after head."""
    p = {name: np.asarray(a, np.float64) for name, a in p.items()}

    def heads(name: str, n: int, rope: RopeHparams | None) -> np.ndarray:
        y = x.astype(np.float64) @ p[name].T + p.get(f"{name}_bias", 0)
        y = y.reshape(len(x), n, hp.head_dim)
        return np.array([[turned(v, first + t, rope) for v in token] for t, token in enumerate(y)])

    q, k = heads("q", hp.n_heads, hp.rope), heads("k", hp.n_kv_heads, hp.rope)
    v, out = heads("v", hp.n_kv_heads, None), []
    for t in range(len(x)):
        mixed = []
        for h in range(hp.n_heads):
            shared = h // (hp.n_heads // hp.n_kv_heads)
            weights = np.exp(hp.scale * k[: t + 1, shared] @ q[t, h])
            mixed.append(weights @ v[: t + 1, shared] / weights.sum())
        out.append(p["out"] @ np.concatenate(mixed) + p.get("out_bias", 0))
    return np.array(out)


NOPE = AttentionHparams(n_heads=4, n_kv_heads=2, head_dim=8, scale=0.3)
ROPE = RopeHparams(dim=8, theta=100.0)
# wavelengths 6, 20, 63 and 199: kept, on the ramp, on the ramp, slowed by the factor
LLAMA3 = RopeHparams(8, 100.0, "llama3", factor=8.0, high_freq_factor=8.0, original_context=80)
ATTENTIONS = {
    "nope": NOPE,
    "rope": dataclasses.replace(NOPE, rope=ROPE),
    "part of the head": dataclasses.replace(NOPE, rope=RopeHparams(dim=4)),
    "linear": dataclasses.replace(NOPE, rope=RopeHparams(8, 100.0, "linear", factor=4.0)),
    "llama3": dataclasses.replace(NOPE, rope=LLAMA3),
    "bias, one K/V head, other scale": AttentionHparams(4, 1, 8, 0.7, ROPE, bias=True, out_bias=True),
    "a K/V head for each": AttentionHparams(4, 4, 8, 8**-0.5, ROPE),
}
apply_attention = jax.jit(attention.apply, static_argnames="hp")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_agrees_with_the_definition(name):
    hp, lengths, first = ATTENTIONS[name], [7, 3, 1], np.array([0, 40, 300])
    p, x = random_tree(attention.spec(hp, D_MODEL)), normal(ROWS, 7, D_MODEL)
    memory = Causal(valid=jnp.arange(7) < jnp.asarray(lengths)[:, None])
    y, _ = apply_attention(p, x, memory, first[:, None] + np.arange(7), np.asarray(lengths), hp)
    for row, n in enumerate(lengths):
        close(y[row, :n], attention_row(p, x[row, :n], first[row], hp))


def test_attention_ignores_what_lies_behind_the_mask():
    q, k, v = normal(2, 1, 4, 8), normal(2, 2, 6, 8, seed=2), normal(2, 2, 6, 8, seed=3)
    mask = jnp.asarray([[[True, False, True, False, False, False]], [[False] * 6]])
    k[:, :, 1], v[:, :, 1] = np.nan, 1e6
    attend = jax.jit(attention.attend)
    y = attend(q, k, v, mask, 0.3)
    short = attend(q, k[:, :, ::2], v[:, :, ::2], jnp.asarray([[[True, True, False]]] * 2), 0.3)
    close(y[0], np.asarray(short)[0], 1e-6)
    assert np.isfinite(y).all()  # also in a row that sees nothing


# ------------------------------------------------------------------------------- norms and experts


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_agree_with_the_formula(dtype):
    x, weight = jnp.asarray(normal(2, 5, 12), dtype), normal(12, seed=2)
    exact = np.asarray(x, np.float64)
    # bfloat16 has 8 bits: the result is rounded to it once
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
    eps = 0.25  # large, so that it matters where it stands
    assert rms_norm(x, weight, eps).dtype == dtype
    close(rms_norm(x, weight, eps), rms(exact, eps) * weight, tolerance)
    for groups in (1, 3):
        parts = rms(exact.reshape(2, 5, groups, -1), eps).reshape(exact.shape)
        close(grouped_rms_norm(x, weight, groups, eps), parts * weight, tolerance)


def gated(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return down @ (silu(gate_up[0] @ x) * (gate_up[1] @ x))


MOE = MoeHparams(n_experts=8, top_k=3, d_ff=10)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 9], ids="{} tokens".format)
def test_experts_agree_with_a_loop(n_tokens):
    """1 and 2 tokens choose at most as many experts as there are and gather weights; more sort tokens."""
    p, x = random_tree(moe_spec(MOE, D_MODEL)), normal(1, n_tokens, D_MODEL)
    p["router"][5] = p["router"][2]  # a tie on every token: expert 2 comes first
    p["router"][[2, 5]] *= 3
    exact = {name: a.astype(np.float64) for name, a in p.items()}
    expected, in_order = [], 0
    for token in x[0].astype(np.float64):
        scores = exact["router"] @ token
        chosen = np.lexsort((np.arange(8), -scores))[: MOE.top_k]
        in_order += 2 in chosen and 5 not in chosen
        weights = np.exp(scores[chosen] - scores[chosen].max())
        outputs = [gated(token, exact["gate_up"][e], exact["down"][e]) for e in chosen]
        expected.append(weights / weights.sum() @ np.array(outputs))
    close(jax.jit(moe, static_argnums=2)(p, x, MOE)[0], np.array(expected))
    # the tie decides something where there are many tokens
    assert in_order or n_tokens < 9


@pytest.mark.parametrize("bias", [False, True])
def test_mlp_agrees_with_the_formula(bias):
    hp = MlpHparams(10, bias=bias)
    p, x = random_tree(mlp_spec(hp, D_MODEL)), normal(2, 3, D_MODEL)
    up, down = p.get("gate_up_bias", np.zeros((2, 10))), p.get("down_bias", 0)
    both = [x.astype(np.float64) @ p["gate_up"][i].T.astype(np.float64) + up[i] for i in (0, 1)]
    expected = (silu(both[0]) * both[1]) @ p["down"].T.astype(np.float64) + down
    close(mlp(p, jnp.asarray(x), hp), expected)


@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("n_tokens", [1, 3, 20])
def test_all_forms_of_experts_agree(n_tokens, is_gated, monkeypatch):
    """Gathered, sorted and all of them, the last also in blocks of tokens that they do not fill."""
    hp = dataclasses.replace(MOE, gated=is_gated)
    p, tokens = random_tree(moe_spec(hp, D_MODEL)), jnp.asarray(normal(n_tokens, D_MODEL))
    experts, _ = experts_of.route(p, tokens, hp)
    expected = np.asarray(experts_of.gathered_experts(p, tokens, experts, hp))
    close(experts_of.sorted_experts(p, tokens, experts, hp), expected)
    close(experts_of.every_expert(p, tokens, experts, hp), expected)
    monkeypatch.setattr(experts_of, "_MOST_HIDDEN", 3 * hp.n_experts * hp.d_ff)
    close(experts_of.every_expert(p, tokens, experts, hp), expected)


def test_a_lone_bfloat16_row_is_that_of_two():
    x, w = (jnp.asarray(normal(*s, seed=i), jnp.bfloat16) for i, s in enumerate(((2, 24), (10, 24))))
    for row in range(2):
        alone = linear(x[row : row + 1], w, dtype=jnp.dtype(jnp.float32))
        np.testing.assert_allclose(alone[0], linear(x, w, dtype=jnp.dtype(jnp.float32))[row], rtol=1e-6)
