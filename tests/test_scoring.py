"""Log-likelihoods of continuations: against the plain forward pass, shared contexts computed once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import scoring
from jaxhybrid.errors import UsageError

NEAR = {"rtol": 0, "atol": 5e-5}  # float32 sums over other shapes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return jh.load(tiny.write_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each step ran through the model."""
    counts, advance = [], scoring.advance

    def counting(params, cache, ubatch):
        counts.append(int(ubatch.lengths.sum()))
        return advance(params, cache, ubatch)

    monkeypatch.setattr(scoring, "advance", counting)
    return counts


def by_hand(model, context, continuation):
    """(log-probability, greedy) from the plain forward pass, padded to one shape."""
    ids = np.zeros(64, np.int32)
    n = len(context) + len(continuation)
    ids[:n] = [*context, *continuation]
    logprobs = np.asarray(jax.nn.log_softmax(FORWARD(model.params, ids[None])[0]))
    places = range(len(context) - 1, n - 1)
    total = sum(float(logprobs[p, ids[p + 1]]) for p in places)
    return total, all(int(logprobs[p].argmax()) == ids[p + 1] for p in places)


FORWARD = jax.jit(jh.forward)


def check(model, pairs, **options):
    found = score(model, pairs, **options)
    expected = [by_hand(model, list(c), list(t)) for c, t in pairs]
    np.testing.assert_allclose([s.logprob for s in found], [logprob for logprob, _ in expected], **NEAR)
    assert [s.greedy for s in found] == [greedy for _, greedy in expected]


def score(model, pairs, **options):
    """With few shapes to compile."""
    return jh.score(model, pairs, **({"batch_size": 4, "n_ubatch": 16} | options))


def few_shot(rng, questions=3, answers=2):
    """Examples before all questions, and several answers to each."""
    pick = lambda n: [int(t) for t in rng.integers(3, 259, n)]  # noqa: E731
    shots = pick(20)
    asked = [[*shots, *pick(int(rng.integers(2, 8)))] for _ in range(questions)]
    return [(question, pick(int(rng.integers(1, 5)))) for question in asked for _ in range(answers)]


def test_any_pairs_in_any_groups_have_the_likelihoods_of_the_forward_pass(model):
    rng = np.random.default_rng(1)
    pairs = few_shot(rng)
    pairs += [pairs[0], (pairs[0][0], pairs[0][1][:1]), ([9], [8]), ([9, 8, 7], [6, 5])]
    pairs += [(pairs[3][0] + pairs[3][1], [77]), (pairs[3][0][:5], pairs[3][0][5:8])]  # inside other contexts
    order = [int(i) for i in rng.permutation(len(pairs))]
    check(model, [pairs[i] for i in order])


def test_a_greedy_continuation_is_known(model):
    context, best = model.tokenizer.encode("hello"), []
    for _ in range(4):
        ids = np.zeros(64, np.int32)
        ids[: len(context) + len(best)] = [*context, *best]
        best.append(int(FORWARD(model.params, ids[None])[0, len(context) + len(best) - 1].argmax()))
    other = [*best[:-1], (best[-1] + 1) % 259]
    found = score(model, [(context, best), (context, other), (context, best[:2])])
    assert [s.greedy for s in found] == [True, False, True]
    assert found[0].logprob > found[1].logprob


def test_what_contexts_share_is_computed_once(model, computed):
    pairs = few_shot(np.random.default_rng(2))
    for group in (pairs[:4], pairs):  # one group, and several, where the examples stay from each to the next
        del computed[:]
        score(model, group)
        distinct = {(*c, *t)[:k] for c, t in group for k in range(1, len(c) + len(t))}
        assert sum(computed) == len(distinct)  # every token of the tree of inputs, once
    assert len(distinct) < sum(len(c) + len(t) - 1 for c, t in pairs) / 2
    del computed[:]
    score(model, [(list(range(10, 20)), [t]) for t in range(50)])
    assert sum(computed) == 10  # all answers are read off one output


def test_long_contexts_lose_their_beginning(model):
    context = [int(t) for t in np.random.default_rng(3).integers(3, 259, 40)]
    (cut,) = score(model, [(context, [5, 6, 7])], max_length=10)
    (by_itself,) = score(model, [(context[-8:], [5, 6, 7])])
    assert cut == by_itself
    (whole,) = score(model, [([9], [5, 6, 7])], max_length=3)
    assert whole == score(model, [([9], [5, 6, 7])])[0]


def test_texts_are_encoded_with_what_is_before_them(model):
    encode = model.tokenizer.encode
    as_text = score(model, [("a question", " answer"), ("a question ", "answer"), ("", "héllo")])
    ids = [(encode("a question"), encode(" answer"))] * 2 + [
        ([0], encode("héllo"))
    ]  # <|end|> as it has no BOS
    assert as_text == score(model, ids)
    assert as_text[0] == as_text[1]
    assert score(model, []) == []


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([("a", "")], {}, "pair 1: the continuation is empty"),
        ([("a", "b"), ([1], [])], {}, "pair 2: the continuation is empty"),
        ([("a", [1])], {}, "two texts or two lists"),
        ([([1], [300])], {}, "token 300 is outside the model's vocabulary of 259"),
        ([([1], [1, 2, 3])], {"max_length": 2}, "has 3 tokens, max_length is 2"),
        ([], {"batch_size": 0}, "batch_size: 0 must be at least 1"),
    ],
)
def test_wrong_pairs_are_named(model, pairs, options, message):
    with pytest.raises(UsageError, match=message):
        score(model, pairs, **options)


def test_blocks_of_the_head_are_one_shape(model):
    rng = np.random.default_rng(4)
    hidden = rng.standard_normal((300, 16)).astype(np.float32)
    targets = [int(t) for t in rng.integers(0, 259, 300)]
    logprobs, greedy = scoring.token_scores(model.params, hidden, targets)
    logits = jax.nn.log_softmax(scoring.head(model.params, jnp.asarray(hidden)))
    np.testing.assert_allclose(logprobs, np.asarray(logits)[range(300), targets], **NEAR)
    assert greedy.tolist() == (np.asarray(logits).argmax(axis=1) == targets).tolist()
    none, _ = scoring.token_scores(model.params, hidden[:0], [])
    assert none.shape == (0,)
