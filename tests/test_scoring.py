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
LAYERS = {"hybrid": None, "attention": ["attention", "attention"], "recurrent": ["mamba", "mamba"]}


@pytest.fixture(scope="module", params=LAYERS)
def model(request, tmp_path_factory):
    layers = LAYERS[request.param]
    config = tiny.CONFIG | ({} if layers is None else {"layer_types": layers})
    return jh.load(tiny.write_folder(tmp_path_factory.mktemp(request.param), config))


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each batch ran through the model."""
    counts, decode = [], scoring.decode_hidden

    def counting(params, cache, batch, **options):
        counts.append(len(batch.tokens))
        return decode(params, cache, batch, **options)

    monkeypatch.setattr(scoring, "decode_hidden", counting)
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
    found = jh.score(model, pairs, **options)
    expected = [by_hand(model, list(c), list(t)) for c, t in pairs]
    np.testing.assert_allclose([s.logprob for s in found], [logprob for logprob, _ in expected], **NEAR)
    assert [s.greedy for s in found] == [greedy for _, greedy in expected]


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
    for batch_size in (16, 3):
        check(model, [pairs[i] for i in order], batch_size=batch_size, n_ubatch=16)


def test_a_greedy_continuation_is_known(model):
    context = model.tokenizer.encode("hello")
    best = jh.generate(model, context, max_tokens=4, ignore_eos=True).tokens
    other = [*best[:-1], (best[-1] + 1) % 259]
    found = jh.score(model, [(context, best), (context, other), (context, best[:2])])
    assert [s.greedy for s in found] == [True, False, True]
    assert found[0].logprob > found[1].logprob


def test_what_contexts_share_is_computed_once(model, computed):
    pairs = few_shot(np.random.default_rng(2))
    distinct = {(*c, *t)[:k] for c, t in pairs for k in range(1, len(c) + len(t))}
    jh.score(model, pairs)
    assert computed == [len(distinct)]  # every token of the tree of inputs, once
    del computed[:]
    jh.score(model, pairs, batch_size=3)  # group by group: the examples stay
    alone = sum(len(c) + len(t) - 1 for c, t in pairs)
    assert len(computed) > 2 and sum(computed[1:]) < len(distinct) < alone / 3
    assert all(n < 20 for n in computed[1:])
    del computed[:]
    one_token = [(list(range(10, 20)), [t]) for t in range(50)]
    jh.score(model, one_token)
    assert computed == [10]  # all answers are read off one output


def test_long_contexts_lose_their_beginning(model):
    context = [int(t) for t in np.random.default_rng(3).integers(3, 259, 40)]
    (cut,) = jh.score(model, [(context, [5, 6, 7])], max_length=10)
    (by_itself,) = jh.score(model, [(context[-8:], [5, 6, 7])])
    assert cut == by_itself
    (whole,) = jh.score(model, [([9], [5, 6, 7])], max_length=3)
    assert whole == jh.score(model, [([9], [5, 6, 7])])[0]


def test_texts_are_encoded_with_what_is_before_them(model):
    encode = model.tokenizer.encode
    as_text = jh.score(model, [("a question", " answer"), ("a question ", "answer"), ("", "héllo")])
    ids = [(encode("a question"), encode(" answer"))] * 2 + [
        ([0], encode("héllo"))
    ]  # <|end|> as it has no BOS
    assert as_text == jh.score(model, ids)
    assert as_text[0] == as_text[1]
    assert jh.score(model, []) == []


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
        jh.score(model, pairs, **options)


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
