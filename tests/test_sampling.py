"""`sample` against a sorting float64 reference, and the laws of its randomness."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxhybrid import sampling as sampling_module
from jaxhybrid.draw import pick
from jaxhybrid.errors import UsageError
from jaxhybrid.sampling import (
    Sampling,
    TokenCounts,
    count_prompt,
    count_token,
    empty_counts,
    make_sampling,
    probabilities,
    sample,
)

B, V = 4, 61
sample_jit = jax.jit(sample)
probabilities_jit = jax.jit(probabilities)


def positions(n_rows: int = B, start: int = 0) -> jax.Array:
    return jnp.arange(start, start + n_rows, dtype=jnp.int32)


def same_rows(row: np.ndarray, n_rows: int = B) -> jax.Array:
    return jnp.asarray(np.broadcast_to(np.asarray(row, np.float32), (n_rows, len(row))))


# --- the distribution -----------------------------------------------------------------------


def reference(x: np.ndarray, temperature: float, k: int, p: float, min_p: float) -> np.ndarray:
    """Probabilities by sorting, float64; ties at a threshold are kept.

    Only the distance to the largest logit is float32, as in the code: it decides what is a tie.
    """
    x = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        x = np.where(x == x.max(), 0, (x - x.max()) / np.float32(temperature)).astype(np.float64)
    if 0 < k < len(x):
        x = np.where(x >= np.sort(x)[-k], x, -np.inf)
    chance = np.exp(x - x.max())
    chance /= chance.sum()
    if p < 1:
        order = np.argsort(-chance, kind="stable")
        above = np.cumsum(chance[order]) - chance[order]
        least = chance[order][np.flatnonzero(above < p)[-1]] if p > 0 else chance.max()
        chance = np.where(chance >= least, chance, 0)
    chance = np.where(chance >= min_p * chance.max(), chance, 0)
    return chance / chance.sum()


logit_rows = st.lists(
    st.one_of(
        st.integers(-40, 40).map(lambda i: i / 4),  # a coarse grid, so that ties are common
        st.floats(-10, 10, width=32),
        st.just(-float("inf")),
    ),
    min_size=V,
    max_size=V,
).filter(lambda row: max(row) > -float("inf"))


@settings(max_examples=150, deadline=None)
@given(
    row=logit_rows,
    temperature=st.floats(0.25, 4, width=32),
    k=st.integers(0, V + 3),
    p=st.one_of(st.just(1.0), st.floats(0, 1, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)
def test_allowed_tokens_and_probabilities_match_sorting(row, temperature, k, p, min_p):
    x = np.asarray(row, np.float32)
    found = probabilities_jit(
        same_rows(x),
        make_sampling(B, temperature=temperature, top_k=k, top_p=p, min_p=min_p),
        empty_counts(B, V),
    )
    found = np.asarray(found)
    chex.assert_trees_all_equal(found[0], found[1], found[2], found[3])
    eps = 2e-6  # a mass this near to p, or a ratio this near to min_p, may fall on either side
    strict, loose = (
        reference(x, temperature, k, np.clip(p + d, 0, 1) if p < 1 else 1.0, min_p * (1 - d))
        for d in (-eps, eps)
    )
    assert not np.any(found[0][loose == 0]), "a token outside the filters has a chance"
    assert np.all(found[0][strict > 1e-8] > 0), "a token within the filters has none"
    if np.array_equal(strict > 0, loose > 0):
        np.testing.assert_allclose(found[0], loose, atol=2e-6)


def test_ties_at_the_top_k_threshold_are_kept_and_zeros_of_both_signs_tie():
    x = np.full(V, -9.0)
    x[[3, 10, 20, 30]] = [1.0, 0.0, -0.0, -1.0]
    found = probabilities_jit(same_rows(x), make_sampling(B, temperature=1.0, top_k=2), empty_counts(B, V))
    assert np.flatnonzero(found[0]).tolist() == [3, 10, 20]


def test_draws_follow_the_distribution():
    """Chi-square over 16,384 draws with fixed seeds: half by seed, half by position."""
    rng = np.random.default_rng(0)
    row = rng.normal(size=V).astype(np.float32) * 1.5
    n = 8192
    by_seed = make_sampling(n, temperature=0.9, top_k=40, top_p=0.97, seed=5)
    by_position = by_seed.replace(seed=jnp.full(n, 77, jnp.uint32))
    draw = jax.jit(sample)
    logits, counts = same_rows(row, n), empty_counts(n, V)
    for setting, at in ((by_seed, jnp.zeros(n, jnp.int32)), (by_position, positions(n))):
        tokens = np.asarray(draw(logits, setting, counts, at))
        expected = n * reference(row, 0.9, 40, 0.97, 0.0)
        seen = np.bincount(tokens, minlength=V)
        allowed = expected > 0
        assert not seen[~allowed].any()
        statistic = ((seen - expected)[allowed] ** 2 / expected[allowed]).sum()
        freedom = allowed.sum() - 1
        assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_pick_hits_each_token_exactly_in_proportion(data):
    """With a total of 2**10 and evenly spaced uniforms, each token comes as often as it weighs;
    weights of 0 never come, neither for the least uniform nor for the greatest."""
    size, total = 16**3, 1024
    weights = np.zeros(size, np.int32)
    where = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=30, unique=True))
    weights[where] = 1
    weights[where[0]] += total - weights.sum()
    uniform = np.arange(total, dtype=np.uint32) << 22
    uniform[0] = 0
    uniform[-1] = 2**32 - 1
    rows = jnp.asarray(np.broadcast_to(weights, (total, size)).reshape(total, 16, -1))
    tokens = np.asarray(_pick_jit(rows, jnp.asarray(uniform)))
    np.testing.assert_array_equal(np.bincount(tokens, minlength=size), weights)


_pick_jit = jax.jit(pick)


# --- rows and seeds -------------------------------------------------------------------------


def mixed_rows(n_rows: int) -> tuple[jax.Array, Sampling, TokenCounts]:
    rng = np.random.default_rng(n_rows)
    logits = jnp.asarray(rng.normal(size=(n_rows, V)).astype(np.float32) * 2)
    some = rng.integers(0, 2, size=(6, n_rows)).astype(bool)
    setting = make_sampling(
        n_rows,
        temperature=np.where(some[0] | some[1], rng.uniform(0.3, 2, n_rows), 0.0),
        top_k=np.where(some[1], rng.integers(1, V, n_rows), 0),
        top_p=np.where(some[2], rng.uniform(0.2, 0.99, n_rows), 1.0),
        min_p=np.where(some[3], rng.uniform(0, 0.3, n_rows), 0.0),
        repetition_penalty=np.where(some[4], 1.3, 1.0),
        frequency_penalty=np.where(some[5], 0.7, 0.0),
        seed=rng.integers(0, 2**32, n_rows),
    )
    counts = TokenCounts(
        prompt=jnp.asarray(rng.integers(0, 2, (n_rows, V)).astype(bool)),
        generated=jnp.asarray(rng.integers(0, 3, (n_rows, V)).astype(np.int32)),
    )
    return logits, setting, counts


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    n_rows, rounds = 12, 40
    batch = mixed_rows(n_rows)
    whole = np.stack([sample_jit(*batch, positions(n_rows, 5 * t)) for t in range(rounds)])
    assert len(np.unique(whole)) > 20
    for size in (1, 4):
        for first in range(0, n_rows, size):
            part = jax.tree.map(lambda x, a=first, n=size: x[a : a + n], batch)
            for t in range(0, rounds, 4):
                at = positions(size, 5 * t + first)
                np.testing.assert_array_equal(sample_jit(*part, at), whole[t, first : first + size])


def test_the_row_by_row_form_draws_what_the_batched_form_draws():
    logits, setting, _ = mixed_rows(24)
    batched, by_row = jax.jit(sampling_module._draw), jax.jit(sampling_module._draw_row_by_row)
    random = np.asarray(setting.temperature) > 0
    for t in range(20):
        args = logits, setting, positions(24, 100 * t)
        np.testing.assert_array_equal(batched(*args)[random], by_row(*args)[random])


def test_greedy_rows_take_the_first_largest_logit_beside_random_rows():
    rng = np.random.default_rng(1)
    logits = rng.integers(-3, 4, size=(B, V)).astype(np.float32)
    setting = make_sampling(B, temperature=[0, 1.5, 0, 1.5], top_k=[3, 0, 0, 5], seed=9)
    for t in range(10):
        tokens = np.asarray(sample_jit(jnp.asarray(logits), setting, empty_counts(B, V), positions(B, t)))
        np.testing.assert_array_equal(tokens[[0, 2]], logits.argmax(-1)[[0, 2]])
    greedy = make_sampling(B)
    tokens = sample_jit(jnp.asarray(logits), greedy, empty_counts(B, V), positions())
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_a_seed_repeats_and_other_seeds_and_positions_differ():
    logits, counts = same_rows(np.zeros(V)), empty_counts(B, V)

    def text(seed: int) -> np.ndarray:
        setting = make_sampling(B, temperature=1.0, seed=seed)
        draws = [sample_jit(logits, setting, counts, jnp.full(B, t)) for t in range(30)]
        return np.stack(draws)

    first, again, other = text(3), text(3), text(4)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:, 1], other[:, 0])  # row i has seed s + i
    for a, b in ((first[:, 0], first[:, 1]), (first[:, 0], other[:, 3]), (first[:-1], first[1:])):
        assert np.mean(a == b) < 0.2


# --- penalties ------------------------------------------------------------------------------


def test_counts():
    tokens = jnp.asarray([[1, 2, 9], [5, -1, 99]])
    counts = count_prompt(empty_counts(2, 10), tokens, jnp.asarray([2, 3]))
    assert [np.flatnonzero(row).tolist() for row in counts.prompt] == [[1, 2], [5]]
    for _ in range(2):
        counts = count_token(counts, jnp.asarray([7, 8]), jnp.asarray([True, False]))
    counts = count_token(counts, jnp.asarray([3, -1]), jnp.asarray([True, True]))
    assert np.argwhere(counts.generated).tolist() == [[0, 3], [0, 7]]
    assert counts.generated[0, 7] == 2


def test_penalties_change_logits_as_documented():
    x = np.linspace(-2, 2, V).astype(np.float32)
    prompt, generated = np.zeros((B, V), bool), np.zeros((B, V), np.int32)
    prompt[:, [0, 60, 30]] = True
    generated[:, [1, 59]] = 1
    generated[:, [60, 2]] = 3
    setting = make_sampling(
        B,
        temperature=1.0,
        repetition_penalty=[1.0, 1.7, 1.0, 1.7],
        presence_penalty=[0.0, 0.0, 0.5, -0.5],
        frequency_penalty=[0.0, 0.0, 0.25, 0.25],
    )
    counts = TokenCounts(prompt=jnp.asarray(prompt), generated=jnp.asarray(generated))
    found = np.log(np.asarray(probabilities_jit(same_rows(x), setting, counts), np.float64))
    for row in range(B):
        expected = x.astype(np.float64)
        r = float(setting.repetition_penalty[row])
        for token in {0, 60, 30, 1, 59, 2}:
            expected[token] = expected[token] * r if expected[token] < 0 else expected[token] / r
        for token in (1, 59, 60, 2):
            expected[token] -= float(setting.presence_penalty[row])
            expected[token] -= float(setting.frequency_penalty[row]) * generated[0, token]
        expected -= np.log(np.exp(expected).sum())
        np.testing.assert_allclose(found[row], expected, atol=1e-5)


def test_penalties_move_greedy_rows():
    x = np.zeros(V)
    x[[4, 5]] = [3.0, 2.9]
    counts = count_token(empty_counts(B, V), jnp.full(B, 4), jnp.asarray([True, True, True, False]))
    setting = make_sampling(B, frequency_penalty=[0.0, 0.2, 0.05, 0.2])
    assert sample_jit(same_rows(x), setting, counts, positions()).tolist() == [4, 5, 4, 4]


# --- the graph ------------------------------------------------------------------------------


def test_one_compilation_for_all_settings():
    traced = jax.jit(chex.assert_max_traces(sample, n=1))
    logits, counts = same_rows(np.arange(V)), empty_counts(B, V)
    changes = (
        {},
        {"temperature": 0.7},
        {"temperature": [0, 1, 2, 3], "top_k": 5, "seed": 2**32 - 1},
        {"temperature": 1, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2},
        {"presence_penalty": 1.0, "frequency_penalty": [0, 1, 2, -2]},
    )
    for change in changes:
        traced(logits, make_sampling(B, **change), counts, positions())


def primitives(jaxpr, into_branches: bool) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        if equation.primitive.name == "cond" and not into_branches:
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                found |= primitives(inner.jaxpr, into_branches)
    return found


def test_greedy_rows_run_no_random_path_and_nothing_sorts():
    jaxpr = jax.make_jaxpr(sample)(
        same_rows(np.zeros(V)), make_sampling(B), empty_counts(B, V), positions()
    ).jaxpr
    always, ever = primitives(jaxpr, False), primitives(jaxpr, True)
    assert {"exp", "while", "random_bits", "cond"} <= ever
    assert not {"exp", "while", "random_bits", "scan", "div"} & always
    assert not {"sort", "top_k", "cumsum"} & ever


# --- bad numbers ----------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 3e38])
@pytest.mark.parametrize("top_k, top_p, min_p", [(0, 1.0, 0.0), (2**31 - 1, 0.9, 1.0), (3, 0.0, 0)])
def test_odd_logits_give_a_valid_token(temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(2)
    nan_row = rng.normal(size=V)
    nan_row[::3] = NAN
    holes = rng.normal(size=V)
    holes[::2] = -INF
    edge = np.full(V, -3e38)
    edge[7] = 3e38
    above = rng.normal(size=V)
    above[[8, 9]] = INF
    setting = make_sampling(B, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    run = partial(sample_jit, sampling=setting, counts=empty_counts(B, V), positions=positions())
    tokens = np.asarray(run(jnp.asarray([nan_row, holes, edge, above], jnp.float32)))
    assert tokens[0] % 3 != 0 and tokens[1] % 2 == 1 and tokens[3] in (8, 9)
    assert tokens[2] == 7 or temperature == 3e38
    hopeless = np.stack([np.full(V, NAN), np.full(V, -INF), np.full(V, INF), edge * 0])
    tokens = np.asarray(run(jnp.asarray(hopeless, jnp.float32)))
    assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("temperature", -0.1, "temperature is -0.1; allowed: a finite number, 0 or more"),
        ("temperature", NAN, "temperature is nan"),
        ("temperature", INF, "temperature is inf"),
        ("temperature", 1e39, "temperature is 1e+39"),
        ("temperature", "hot", "temperature is 'hot'"),
        ("temperature", [1.0, [2.0]], "temperature is"),
        ("top_k", -1, "top_k is -1; allowed: a whole number, 0"),
        ("top_k", 1.5, "top_k is 1.5"),
        ("top_k", 2**31, "top_k is 2147483648"),
        ("top_p", 1.01, "top_p is 1.01; allowed: 0 to 1"),
        ("top_p", [0.5, NAN], "top_p is nan"),
        ("min_p", -1e-9, "min_p is -1e-09; allowed: 0 to 1"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0; allowed: 1e-6"),
        ("presence_penalty", 2.5, "presence_penalty is 2.5; allowed: -2 to 2"),
        ("frequency_penalty", [0.0, -3.0], "frequency_penalty is -3.0; allowed: -2 to 2"),
        ("seed", 0.5, "seed is 0.5; allowed: a whole number"),
        ("seed", 2**70, "seed is 1180591620717411303424"),
        ("top_k", [1, 2, 3], "top_k has shape (3,); give a number or 2, one per row"),
    ],
)
def test_bad_settings_are_named(field, value, words):
    with pytest.raises(UsageError) as caught:
        make_sampling(2, **{field: value})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_seeds_count_up_by_row_and_wrap():
    assert make_sampling(3, seed=2**32 - 1).seed.tolist() == [2**32 - 1, 0, 1]
    assert make_sampling(2, seed=-1).seed.tolist() == [2**32 - 1, 0]
    assert make_sampling(2, seed=[7, 7]).seed.tolist() == [7, 7]
    with pytest.raises(UsageError, match="n_rows is 0"):
        make_sampling(0)
