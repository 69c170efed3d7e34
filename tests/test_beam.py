"""Beam search and the best of n, against searches that recompute everything with `forward`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import beam, token_loop
from jaxhybrid.cache import hybrid as hybrid_cache
from jaxhybrid.errors import UsageError
from jaxhybrid.sampling import count_prompt, empty_counts, make_sampling

N, N_TOKENS, N_CTX = 4, 5, 16
PROMPT, OTHER = [5, 6, 7, 8, 5], [9, 3, 11]
NO_STOPS = [-1] * N
LAYOUTS = [
    ("attention", False, N),
    ("attention", True, N + 1),
    ("recurrent", False, N + 1),
    ("hybrid", False, N + 1),
    ("hybrid", True, N),
]
"""Kind, unified, sequences: with one more than beams, it holds another text."""

forward, step = jax.jit(jh.forward), jax.jit(jh.step)
positions_max, fork = jax.jit(hybrid_cache.positions_max), jax.jit(jh.fork)


def prompted(kind, unified=False, n_seq_max=N, prompt=PROMPT):
    """The logits after a prompt in sequence 0, and the cache; OTHER is in the sequence beyond the beams."""
    n_ctx = 40 if unified else N_CTX
    cache = jh.create_cache(tiny.hparams(kind), n_ctx, n_seq_max, unified=unified, cell_multiple=8)
    for i, token in enumerate(prompt):
        other = [OTHER[i] if i < len(OTHER) else -1] * (n_seq_max - N)
        logits, cache = feed(kind, cache, [token] + [-1] * (N - 1) + other)
    return logits[0], cache


def feed(kind, cache, tokens):
    """A step with one more token of each sequence, none where it is -1: the only shape of step here."""
    ubatch = jh.make_ubatch(np.maximum(tokens, 0)[:, None], np.asarray(tokens) >= 0)
    out, cache = step(tiny.params(kind), cache, ubatch)
    return out.logits, cache


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def log_probs(params, texts):
    """float64 [texts, V] after each of up to N texts."""
    tokens = np.zeros((N, N_CTX + 8), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    logits = np.asarray(forward(params, jnp.asarray(tokens)))
    ends = [len(text) - 1 for text in texts]
    return log_softmax(logits[np.arange(len(texts)), ends])


def score_of(params, prompt, tokens):
    return sum(log_probs(params, [[*prompt, *tokens[:i]]])[0, t] for i, t in enumerate(tokens))


def plain_search(params, prompt, n_tokens=N_TOKENS, stop_ids=(), length_penalty=0.0, n_beams=N):
    """Beam search over lists: (tokens, score) of each beam, best first."""
    beams = [([], 0.0, False)]
    for _ in range(n_tokens):
        open_ = [tokens for tokens, _, done in beams if not done]
        after = iter(log_probs(params, [[*prompt, *tokens] for tokens in open_]) if open_ else [])
        candidates = []
        for tokens, score, done in beams:
            if done:
                candidates.append((tokens, score, True))
            else:
                for token, gain in enumerate(next(after)):
                    candidates.append(([*tokens, token], score + gain, token in stop_ids))
        candidates.sort(key=lambda c: -c[1] / len(c[0]) ** length_penalty)
        beams = candidates[:n_beams]
    return [(tokens, score) for tokens, score, _ in beams]


def check_equal(found, expected):
    tokens, scores = np.asarray(found[0]), np.asarray(found[1])
    assert lists(tokens) == [t for t, _ in expected]
    np.testing.assert_allclose(scores, [s for _, s in expected], atol=1e-4)


def lists(tokens):
    """The tokens of each row; nothing may follow a -1."""
    rows = [[int(t) for t in row if t >= 0] for row in np.asarray(tokens)]
    assert np.array_equal(np.asarray(tokens) >= 0, [np.arange(tokens.shape[1]) < len(r) for r in rows])
    return rows


def end_of(cache, seq):
    return int(positions_max(cache)[seq])


def check_continues(kind, cache, texts):
    """Each sequence holds all of its text but the last token, and a step with it is as if recomputed."""
    for seq, text in enumerate(texts):
        assert end_of(cache, seq) == len(text) - 2
    newest = [text[-1] for text in texts] + [-1] * (cache.n_seq_max - len(texts))
    logits, _ = feed(kind, cache, newest)
    expected = np.concatenate(
        [log_probs(tiny.params(kind), texts[k : k + N]) for k in range(0, len(texts), N)]
    )
    np.testing.assert_allclose(log_softmax(logits)[: len(texts)], expected, atol=1e-4)


# --------------------------------------------------------------------------------------- beam search


@pytest.mark.parametrize(("kind", "unified", "n_seq_max"), LAYOUTS)
def test_beams_are_those_of_a_search_that_recomputes(kind, unified, n_seq_max):
    params = tiny.params(kind)
    logits, cache = prompted(kind, unified, n_seq_max)
    before = jax.tree.map(np.array, cache)

    def search(stop_ids, penalty):
        return beam.beam_search(
            params, cache, logits, n_beams=N, n_tokens=N_TOKENS, stop_ids=stop_ids, length_penalty=penalty
        )

    *free, _ = search(NO_STOPS, 0.0)
    check_equal(free, plain_search(params, PROMPT))
    assert free[1][0] == pytest.approx(score_of(params, PROMPT, lists(free[0])[0]), abs=1e-4)

    seen = np.asarray(free[0])
    for stops, penalty in (([seen[0, 1], seen[1, 2], -1, -1], 0.0), ([seen[0, 1], seen[1, 2], -1, -1], 1.0)):
        *found, after = search(jnp.asarray(stops), penalty)
        expected = plain_search(params, PROMPT, stop_ids=stops, length_penalty=penalty)
        check_equal(found, expected)
        assert {len(t) for t in lists(found[0])} != {N_TOKENS}, "no beam has stopped"
    others = [[*OTHER, 2]] if n_seq_max > N else []
    check_continues(kind, after, [[*PROMPT, *tokens] for tokens in lists(found[0])] + others)
    jax.tree.map(np.testing.assert_array_equal, cache, before)


@pytest.fixture(scope="module")
def hybrid():
    return prompted("hybrid", n_seq_max=N + 1)


def search_hybrid(logits, cache, **settings):
    given: dict[str, Any] = {"n_beams": N, "n_tokens": N_TOKENS, "stop_ids": NO_STOPS} | settings
    return beam.beam_search(tiny.params("hybrid"), cache, logits, **given)


def test_the_parents_of_beams_change(hybrid):
    """Else none of these tests would see a cache that is not reordered."""
    tokens = np.asarray(search_hybrid(*hybrid)[0])
    first = np.asarray(jax.lax.top_k(hybrid[0], N)[1])
    assert not np.array_equal(tokens[:, 0], first)


def test_length_penalty_changes_the_order(hybrid):
    """An early stop has a small sum of log probabilities and a small mean."""
    stop = int(np.asarray(search_hybrid(*hybrid)[0])[-1, 0])
    shortest = []
    for penalty in (0.0, 3.0):
        tokens, scores, _ = search_hybrid(*hybrid, stop_ids=[stop, -1, -1, -1], length_penalty=penalty)
        lengths = np.sum(np.asarray(tokens) >= 0, axis=1)
        ranks = np.asarray(scores) / lengths**penalty
        assert np.all(np.diff(ranks) <= 0)
        shortest.append(lengths.min())
    assert shortest[0] == 1 and shortest[1] > 1


def test_all_beams_stop_at_once(hybrid):
    logits, cache = hybrid
    stops = np.asarray(jax.lax.top_k(logits, N)[1])
    tokens, scores, after = search_hybrid(logits, cache, stop_ids=stops)
    assert lists(tokens) == [[int(t)] for t in stops]
    np.testing.assert_allclose(scores, log_softmax(logits)[stops], atol=1e-6)
    assert end_of(after, 0) == len(PROMPT) - 1  # nothing was fed


def test_one_beam_is_greedy(hybrid):
    logits, cache = hybrid
    params, text = tiny.params("hybrid"), list(PROMPT)
    for _ in range(N_TOKENS):
        text.append(int(np.argmax(log_probs(params, [text])[0])))
    tokens, scores, after = beam.beam_search(
        params, cache, logits, n_beams=1, n_tokens=N_TOKENS, stop_ids=NO_STOPS
    )
    assert lists(tokens) == [text[len(PROMPT) :]]
    assert float(scores[0]) == pytest.approx(score_of(params, PROMPT, text[len(PROMPT) :]), abs=1e-4)
    check_continues("hybrid", after, [text])


def test_more_beams_than_continuations():
    """A search as wide as the tree is exhaustive; beams without a continuation have nothing."""
    vocab, n_beams = 3, 10
    small = tiny.params("attention")
    hp = dataclasses.replace(small.hparams, vocab_size=vocab)
    params = jh.Params(small.tensors | {"embed": {"weight": small["embed"]["weight"][:vocab]}}, hp)
    cache = jh.create_cache(hp, 8, n_beams, cell_multiple=8)
    out, cache = step(params, cache, jh.make_ubatch(jnp.asarray([[1]])))
    tokens, scores, _ = beam.beam_search(params, cache, out.logits[0], n_beams=n_beams, n_tokens=2)
    first = log_softmax(out.logits[0])
    second = log_softmax(forward(params, jnp.asarray([[1, t] for t in range(vocab)]))[:, -1])
    every = {(a, b): first[a] + second[a, b] for a in range(vocab) for b in range(vocab)}
    assert [tuple(t) for t in lists(tokens)] == [*sorted(every, key=lambda ab: -every[ab]), ()]
    np.testing.assert_allclose(np.asarray(scores)[:-1], sorted(every.values(), reverse=True), atol=1e-5)
    assert scores[-1] == -np.inf
    stop = int(np.argmax(first))
    tokens, scores, _ = beam.beam_search(
        params, cache, out.logits[0], n_beams=n_beams, n_tokens=2, stop_ids=[stop]
    )
    ended = {(a,): first[a] for a in [stop]} | {ab: score for ab, score in every.items() if ab[0] != stop}
    assert [tuple(t) for t in lists(tokens)] == [*sorted(ended, key=lambda t: -ended[t]), (), (), ()]
    assert np.isfinite(scores).sum() == len(ended)


def test_beams_end_where_they_cannot_go_on():
    params, prompt = tiny.params("hybrid"), list(range(1, N_CTX - 1))  # two cells are left
    logits, cache = prompted("hybrid", n_seq_max=N + 1, prompt=prompt)
    check_equal(search_hybrid(logits, cache)[:2], plain_search(params, prompt, n_tokens=3))
    tokens, scores, _ = search_hybrid(logits.at[7].set(jnp.nan), cache)
    assert lists(tokens) == [[]] * N
    assert np.asarray(scores).tolist() == [0.0] + [-np.inf] * (N - 1)
    masked = jnp.full_like(logits, -jnp.inf).at[11].set(logits[11])
    tokens, scores, _ = search_hybrid(masked, cache)
    assert all(row[0] == 11 for row in lists(tokens)) and np.all(np.isfinite(scores))


# ----------------------------------------------------------------------------------------- best of n

SAMPLING = {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.3, "seed": [3, 1, 4, 1 << 20]}


def by_token_loop(params, cache, logits, prompt, stop_ids, sampling):
    first, state = token_loop.start(
        params,
        jnp.repeat(logits[None], N, 0),
        [prompt] * N,
        range(N),
        [len(prompt)] * N,
        [N_TOKENS] * N,
        [stop_ids] * N,
        sampling,
    )
    forked = fork(cache, 0, jnp.arange(1, N))
    rest, *_ = token_loop.advance(params, forked, state, n_tokens=N_TOKENS - 1, n_kv=None, aligned=False)
    return lists(np.concatenate([np.asarray(first)[:, None], np.asarray(rest)], axis=1))


@pytest.mark.parametrize(("kind", "unified", "n_seq_max"), [LAYOUTS[3], LAYOUTS[0]])
def test_best_of_n_ranks_what_the_token_loop_writes(kind, unified, n_seq_max):
    params, sampling = tiny.params(kind), make_sampling(N, **SAMPLING)
    logits, cache = prompted(kind, unified, n_seq_max)
    before = jax.tree.map(np.array, cache)
    counts = count_prompt(
        empty_counts(N, tiny.VOCAB), jnp.asarray([PROMPT] * N), jnp.full(N, len(PROMPT), jnp.int32)
    )
    free = by_token_loop(params, cache, logits, PROMPT, NO_STOPS, sampling)
    for stops in (NO_STOPS, [free[0][0], free[1][2], -1, -1]):
        written = by_token_loop(params, cache, logits, PROMPT, stops, sampling)
        means = [score_of(params, PROMPT, tokens) / len(tokens) for tokens in written]
        order = np.argsort(means)[::-1]
        tokens, found, after = beam.best_of_n(
            params, cache, logits, n=N, n_tokens=N_TOKENS, sampling=sampling, stop_ids=stops, counts=counts
        )
        assert lists(tokens) == [written[row] for row in order]
        np.testing.assert_allclose(found, np.asarray(means)[order], atol=1e-4)
    assert not np.array_equal(order, np.arange(N)), "the samples were in order already"
    assert len({len(t) for t in lists(tokens)}) > 1, "no sample has stopped"
    others = [[*OTHER, 2]] if n_seq_max > N else []
    check_continues(kind, after, [[*PROMPT, *t] for t in lists(tokens)] + others)
    jax.tree.map(np.testing.assert_array_equal, cache, before)


def test_samples_of_logits_that_are_not_finite(hybrid):
    logits, cache = hybrid
    tokens, means, after = beam.best_of_n(
        tiny.params("hybrid"),
        cache,
        jnp.full_like(logits, jnp.nan),
        n=N,
        n_tokens=N_TOKENS,
        sampling=make_sampling(N),
        stop_ids=NO_STOPS,
    )
    assert lists(tokens) == [[]] * N and np.all(np.asarray(means) == -np.inf)
    assert end_of(after, N - 1) == len(PROMPT) - 1


# ---------------------------------------------------------------------------------------------- both


def test_other_values_compile_nothing(hybrid):
    logits, cache = hybrid
    sizes = []
    for scale, stops, seed in ((1.0, NO_STOPS, 1), (0.5, [1, 2, 3], 2), (2.0, jnp.asarray([4, 5, 6, 7]), 3)):
        search_hybrid(logits * scale, cache, stop_ids=stops, length_penalty=scale)
        beam.best_of_n(
            tiny.params("hybrid"),
            cache,
            logits * scale,
            n=N,
            n_tokens=N_TOKENS,
            sampling=make_sampling(N, temperature=scale, seed=seed),
            stop_ids=stops,
        )
        sizes.append((beam._beam_search._cache_size(), beam._best_of_n._cache_size()))  # pyright: ignore
    assert sizes == [sizes[0]] * 3


def test_they_can_be_traced(hybrid):
    """Shapes alone are needed, so nothing reads a value on the host."""
    logits, cache = hybrid

    def both(logits, cache, stops, penalty):
        search_hybrid(logits, cache, stop_ids=stops, length_penalty=penalty)
        return beam.best_of_n(
            tiny.params("hybrid"), cache, logits, n=N, n_tokens=N_TOKENS, sampling=make_sampling(N)
        )

    tokens, means, after = jax.eval_shape(both, logits, cache, jnp.zeros(N, jnp.int32), jnp.float32(0))
    assert (tokens.shape, means.shape) == ((N, N_TOKENS), (N,))
    jax.tree.map(lambda a, b: a.shape == b.shape or pytest.fail("another shape"), cache, after)


def test_impossible_sizes_are_refused(hybrid):
    logits, cache = hybrid
    params, sampling = tiny.params("hybrid"), make_sampling(N)
    for name, settings in {
        "n_beams: 0": {"n_beams": 0},
        "n_beams: 6 is more than the cache's 5": {"n_beams": N + 2},
        "n_tokens: 0": {"n_tokens": 0},
        "logits: shape": {"logits": logits[None]},
    }.items():
        given = {"logits": logits, "n_beams": N, "n_tokens": N_TOKENS} | settings
        with pytest.raises(UsageError, match=name):
            beam.beam_search(params, cache, **given)
    for name, settings in {
        "n: 0": {"n": 0},
        "n: 6 is more than the cache's 5": {"n": N + 2},
        "n_tokens: -1": {"n_tokens": -1},
        "sampling: rows": {"n": 2},
        "counts: shape": {"counts": empty_counts(N, 7)},
    }.items():
        given = {"n": N, "n_tokens": N_TOKENS, "sampling": sampling} | settings
        with pytest.raises(UsageError, match=name):
            beam.best_of_n(params, cache, logits, **given)
