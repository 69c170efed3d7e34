"""Drafting changes how many steps a text takes, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import speculative, token_loop
from jaxhybrid.errors import UsageError
from jaxhybrid.sampling import make_sampling

ROWS, N_CTX, N_NEW, N_DRAFT = 3, 40, 24, 3
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3], [11]]


def new_cache(kind, n_rollback=N_DRAFT, unified=False):
    return jh.create_cache(
        tiny.hparams(kind),
        72 if unified else N_CTX,
        ROWS,
        cell_multiple=8,
        n_rollback=n_rollback,
        n_ubatch=16,
        unified=unified,
    )


def begin(kind, cache, params=None, **sampling):
    """The first token of each row, the cache and the state of a loop."""
    params = tiny.params(kind) if params is None else params
    batch = jh.Batch(
        [t for p in PROMPTS for t in p], seq_ids=[(r,) for r, p in enumerate(PROMPTS) for _ in p]
    )
    logits, cache = jh.decode(params, cache, batch)
    first, state = token_loop.start(
        params, logits, PROMPTS, range(ROWS), [len(p) for p in PROMPTS], [N_NEW, 7, N_NEW], [[], [], [3]],
        make_sampling(ROWS, **sampling),
    )  # fmt: skip
    return np.asarray(first), cache, state


def plain(kind, **sampling):
    """What the token loop writes without a drafter: one list a row."""
    first, cache, state = begin(kind, new_cache(kind, 0), **sampling)
    out, cache, state = token_loop.advance(
        tiny.params(kind), cache, state, n_tokens=N_NEW, n_kv=None, aligned=False
    )
    return joined(first, out), cache, state


def joined(first, *parts):
    rows = np.concatenate([first[:, None], *map(np.asarray, parts)], axis=1)
    return [[int(t) for t in row if t >= 0] for row in rows]


def drafted(kind, drafter_of, unified=False, draft_params=None, **sampling):
    first, cache, state = begin(kind, new_cache(kind, unified=unified), **sampling)
    drafter, parts, n_rounds = drafter_of(first), [], 0
    while bool(jnp.any(state.finish == token_loop.RUNNING)):
        out, cache, state, drafter, rounds = speculative.advance(
            tiny.params(kind), cache, state, drafter, draft_params, n_rounds=4, n_kv=None
        )
        parts.append(out)
        n_rounds += int(rounds)
    return joined(first, *parts), cache, state, n_rounds


def by_ngrams(first):
    texts = [[*p, int(t)] for p, t in zip(PROMPTS, first, strict=True)]
    return speculative.ngram_drafter(texts, N_CTX, N_DRAFT)


def by_model(kind, params):
    def make(first):
        _, cache, _ = begin(kind, new_cache(kind), params)
        return speculative.model_drafter(params, cache, tiny.params(kind), N_DRAFT)

    return make


@pytest.fixture(params=["attention", "sliding_window", "recurrent", "hybrid"])
def kind(request):
    return request.param


SAMPLED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_ngrams_write_the_same_text(kind, sampling):
    expected, cache, _ = plain(kind, **sampling)
    found, after, state, _ = drafted(kind, by_ngrams, **sampling)
    assert found == expected
    # the caches end at the same place and go on alike
    for row in range(ROWS):
        assert int(jh.seq_pos_max(after, row)) == int(jh.seq_pos_max(cache, row))
    more = jh.Batch([2, 2, 2], seq_ids=[(0,), (1,), (2,)])
    one, _ = jh.decode(tiny.params(kind), cache, more)
    two, _ = jh.decode(tiny.params(kind), after, more)
    np.testing.assert_allclose(one, two, atol=2e-5)  # float32 rounding over other shapes
    assert np.asarray(state.finish).tolist()[:2] == [token_loop.LENGTH] * 2


@pytest.mark.parametrize("unified", [False, True])
def test_a_perfect_draft_model_takes_fewest_steps(unified):
    """The model drafts for itself: every guess comes true, sampled or not."""
    params = tiny.params("hybrid")
    for sampling in ({}, SAMPLED):
        expected, *_ = plain("hybrid", **sampling)
        found, _, _, rounds = drafted(
            "hybrid", by_model("hybrid", params), unified, draft_params=params, **sampling
        )
        assert found == expected
        assert rounds == -(-(max(map(len, found)) - 1) // (N_DRAFT + 1))


def test_a_poor_draft_model_costs_steps_and_no_text():
    other = jh.init_params(tiny.hparams("recurrent"), jax.random.key(99))
    expected, *_ = plain("hybrid", **SAMPLED)
    found, _, _, rounds = drafted("hybrid", by_model("recurrent", other), draft_params=other, **SAMPLED)
    assert found == expected
    assert rounds > (N_NEW - 1) / (N_DRAFT + 1)


def test_ngrams_find_the_longest_then_the_latest_match():
    texts = [[1, 2, 3, 4, 9, 3, 4, 7, 8, 1, 2, 3, 4], [1, 2, 3], [4, 4, 4, 4]]
    drafter = speculative.ngram_drafter(texts, 32, 4, n_gram=3)
    _, _, state = begin("hybrid", new_cache("hybrid"))
    guesses, n, _ = drafter.propose(None, state, jnp.asarray([4, 4, 4]))
    assert np.asarray(n).tolist() == [4, 0, 1]
    assert np.asarray(guesses)[0].tolist() == [9, 3, 4, 7]  # after 2 3 4, not after the later 3 4
    assert np.asarray(guesses)[2, 0] == 4
    _, n, _ = drafter.propose(None, state, jnp.asarray([2, 4, 0]))
    assert np.asarray(n).tolist() == [2, 0, 0]
    written = jnp.asarray([[9, 3, -1, -1, -1], [5, -1, -1, -1, -1], [-1] * 5])
    after = drafter.settle(state, written, jnp.asarray([2, 1, 0]))
    assert np.asarray(after.lengths).tolist() == [15, 4, 4]
    assert np.asarray(after.text)[0, :15].tolist() == [*texts[0], 9, 3]


def test_sampling_keeps_its_distribution():
    """Two tokens drawn by 600 rows of other seeds, with and without a drafter, are equal row by row, and
    distributed as the model says (chi-square over the first drafted token)."""
    params, rows = tiny.params("hybrid"), 600
    prompts = [[5, 6, 5, 6, 5]] * rows
    sampling = make_sampling(rows, temperature=1.0, seed=1)
    cache = jh.create_cache(params.hparams, 8, rows, cell_multiple=8, n_rollback=1)
    logits, cache = jh.decode(params, cache, jh.Batch(prompts[0]))
    cache = jh.fork(cache, 0, list(range(1, rows)))
    first, state = token_loop.start(
        params,
        jnp.repeat(logits, rows, 0),
        prompts,
        range(rows),
        [5] * rows,
        [2] * rows,
        [[]] * rows,
        sampling,
    )
    texts = [[*p, int(t)] for p, t in zip(prompts, np.asarray(first), strict=True)]
    drafter = speculative.ngram_drafter(texts, 8, 1)
    out, *_ = speculative.advance(params, cache, state, drafter, n_rounds=1, n_kv=None)
    second = np.asarray(out)[:, 0]
    expected = np.zeros(tiny.VOCAB)
    after = {int(t): None for t in np.asarray(first)}
    for token in after:
        whole = jnp.asarray([[*prompts[0], token]])
        p = np.asarray(jax.nn.softmax(jh.forward(params, whole)[0, -1]))
        expected += p * np.sum(np.asarray(first) == token)
    observed = np.bincount(second, minlength=tiny.VOCAB)
    common = expected > 5
    statistic = np.sum((observed[common] - expected[common]) ** 2 / expected[common])
    freedom = int(common.sum())
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # four sigma of a chi-square


def test_what_cannot_work_is_refused():
    first, cache, state = begin("hybrid", new_cache("hybrid", n_rollback=1))
    with pytest.raises(UsageError, match="n_rollback=1 is less than the 3 tokens"):
        speculative.advance(tiny.params("hybrid"), cache, state, by_ngrams(first), n_rounds=1, n_kv=None)
    with pytest.raises(UsageError, match="n_draft: 0"):
        speculative.ngram_drafter([[1]], 8, 0)
    import dataclasses

    hp = dataclasses.replace(tiny.hparams("hybrid"), vocab_size=40)
    with pytest.raises(UsageError, match="vocabulary of 40"):
        speculative.model_drafter(
            jh.init_params(hp, jax.random.key(0)), new_cache("hybrid"), tiny.params("hybrid"), 2
        )
