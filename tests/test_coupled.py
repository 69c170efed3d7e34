"""One token in several sequences: computed once, remembered by all, in every kind of cache."""

import chex
import jax
import numpy as np
import pytest
import tiny
from memory import KINDS, N_SEQ, NEAR, check_next, empty, ends, expected, feed, name_of

import jaxhybrid as jh
from jaxhybrid.batch import Batch, CoupledTokenError
from jaxhybrid.model import BAD_ROW

kinds = pytest.mark.parametrize("kind", KINDS, ids=name_of)


@kinds
def test_a_shared_prefix_with_tails_of_their_own(kind):
    members = {0: (0, 1), 2: (2,)}
    _, cache = feed(kind, empty(kind, n_rollback=1), {0: [1, 2, 3, 4, 5], 2: [9]}, members=members)
    assert ends(cache) == [4, 4, 0]
    check_next(kind, cache, {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 4, 5], 2: [9]})
    _, apart = feed(kind, cache, {1: [6], 0: [7, 7]})
    check_next(kind, apart, {0: [1, 2, 3, 4, 5, 7, 7], 1: [1, 2, 3, 4, 5, 6], 2: [9]})
    back, ok = jh.seq_rm(apart, 1, 5, -1)  # each has the window of states
    assert bool(ok)
    check_next(kind, back, {1: [1, 2, 3, 4, 5]})


@kinds
def test_sequences_with_equal_pasts_of_their_own_may_join(kind):
    _, cache = feed(kind, empty(kind), {0: [1, 2], 2: [1, 2], 1: [5]})
    batch = Batch([3, 4, 6], seq_ids=[(2, 0), (0, 2), (1,)])
    logits, joined = jh.decode(tiny.params(kind[0]), cache, batch)
    assert ends(joined) == [3, 1, 3]
    np.testing.assert_allclose(logits[0], expected(kind[0], (1, 2, 3, 4)), **NEAR)
    np.testing.assert_allclose(logits[1], expected(kind[0], (5, 6)), **NEAR)
    check_next(kind, joined, {0: [1, 2, 3, 4], 1: [5, 6], 2: [1, 2, 3, 4]})


@kinds
def test_sequences_with_other_pasts_are_refused(kind):
    params = tiny.params(kind[0])
    _, cache = feed(kind, empty(kind), {0: [1, 2], 1: [1, 3], 2: [1]})
    before = jax.tree.map(np.asarray, cache)
    for ids in ((0, 1), (0, 2), (1, 2)):
        with pytest.raises(CoupledTokenError, match=f"sequences {ids[0]} and {ids[1]} have different"):
            jh.decode(params, cache, Batch([4], seq_ids=[ids]))
    diverging = Batch([4, 5, 6], seq_ids=[(0,), (1,), (0, 1)])
    forked = jh.fork(cache, 0, (1,))
    with pytest.raises(CoupledTokenError, match="token 2"):
        jh.decode(params, forked, diverging)
    same = Batch([4, 4, 6], seq_ids=[(0,), (1,), (0, 1)])
    _, joined = jh.decode(params, forked, same)
    check_next(kind, joined, {0: [1, 2, 4, 6], 1: [1, 2, 4, 6]})
    moved, _ = jh.seq_add(forked, 1, -1, -1, 2)  # the same tokens at other places
    with pytest.raises(CoupledTokenError):
        jh.decode(params, moved, Batch([4], seq_ids=[(0, 1)]))
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, cache))


@kinds
def test_overlapping_sets_in_one_step_are_bad_rows(kind):
    _, cache = feed(kind, empty(kind), {0: [1]})
    cache = jh.fork(cache, 0, (1, 2))
    members = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)
    ubatch = jh.make_ubatch(np.full((N_SEQ, 4), 3), [1, 1, 0], [0, 1, 2], members=members)
    out, after = jax.jit(jh.step)(tiny.params(kind[0]), cache, ubatch)
    assert BAD_ROW in np.asarray(out.status)
    chex.assert_trees_all_equal(after, cache)


@kinds
def test_a_prefix_of_all_then_one_tail_each_in_one_batch(kind):
    batch = Batch(
        [1, 2, 3, 4, 5, 6],
        seq_ids=[(0, 1, 2), (0, 1, 2), (1,), (0, 2), (2,), (0,)],
        outputs=[False, True, True, True, True, True],
    )
    for name in ("uneven", "simple", "equal", "seq"):
        logits, cache = jh.decode(tiny.params(kind[0]), empty(kind), batch, n_ubatch=4, split=name)
        histories = [(1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 5), (1, 2, 4, 6)]
        for found, history in zip(logits, histories, strict=True):
            np.testing.assert_allclose(found, expected(kind[0], history), **NEAR)
        assert ends(cache) == [3, 2, 3]


def test_a_token_of_all_takes_one_cell_of_a_pool():
    kind = ("hybrid", True)
    _, cache = jh.decode(tiny.params("hybrid"), empty(kind), Batch([1, 2], seq_ids=[(0, 1, 2)] * 2))
    assert int(np.sum(np.asarray(cache.attention.positions) >= 0)) == 2
    assert len(set(np.asarray(cache.recurrent.slots)[:, 0].tolist())) == 1
