"""The named strategies cut as documented, and no strategy changes what is computed."""

import jax
import numpy as np
import pytest
import tiny
from memory import NEAR, expected

import jaxhybrid as jh
from jaxhybrid.batch import Batch, check_batch
from jaxhybrid.errors import UsageError
from jaxhybrid.splits import Limits, split, split_equal, split_seq, split_simple, split_uneven

# sequence 0 has tokens 0 to 4, sequence 1 has 5 and 6, sequence 2 has 7 to 9
THREE = Batch(list(range(10)), seq_ids=[(0,)] * 5 + [(1,)] * 2 + [(2,)] * 3)
MIXED = Batch([0, 1, 2, 3, 4], seq_ids=[(0,), (1,), (0,), (1,), (0,)])
COUPLED = Batch([0, 1, 2, 3, 4], seq_ids=[(0, 1), (0, 1), (0,), (1,), (0,)])


def test_simple_takes_tokens_as_they_come():
    assert split_simple(THREE, 4) == [[[0], [1], [2], [3]], [[4], [5], [6], [7]], [[8], [9]]]
    assert split_simple(MIXED, 2) == [[[0], [1]], [[2], [3]], [[4]]]


def test_equal_gives_every_row_as_many_tokens():
    # the shortest row ends a piece; what is left goes on in the next
    assert split_equal(THREE, 64) == [[[0, 1], [5, 6], [7, 8]], [[2], [9]], [[3, 4]]]
    # two rows of two, since a third column would make six tokens
    assert split_equal(MIXED, 5) == [[[0, 2], [1, 3]], [[4]]]
    assert split_equal(THREE, 3) == [[[0], [5], [7]], [[1], [6], [8]], [[2], [9]], [[3, 4]]]
    # one token of n_ubatch + 1 sets goes
    assert split_equal(THREE, 2)[0] == [[0], [5], [7]]


def test_equal_in_sequence_takes_only_neighbours():
    apart = Batch([0, 1, 2, 3], seq_ids=[(0,), (2,), (3,), (1,)])
    assert split_equal(apart, 8, sequential=True) == [[[0], [3]], [[1], [2]]]
    assert split_equal(apart, 8) == [[[0], [1], [2], [3]]]


def test_seq_takes_one_set_that_may_shrink():
    assert split_seq(THREE, 4) == [[[0, 1, 2, 3]], [[4]], [[5, 6]], [[7, 8, 9]]]
    assert split_seq(COUPLED, 64) == [[[0, 1, 2, 4]], [[3]]]
    assert split_seq(MIXED, 64) == [[[0, 2, 4]], [[1, 3]]]


def test_no_piece_of_equal_shares_a_sequence_and_order_is_kept():
    assert split_equal(COUPLED, 64) == [[[0, 1]], [[2], [3]], [[4]]]
    # token 1 of sequence 0 comes before token 2 of both
    braided = Batch([0, 1, 2], seq_ids=[(0, 1), (0,), (0, 1)])
    assert split_equal(braided, 64) == [[[0]], [[1]], [[2]]]


@pytest.mark.parametrize("name", ["uneven", "simple", "equal", "seq"])
@pytest.mark.parametrize("batch", [THREE, MIXED, COUPLED], ids=["three", "mixed", "coupled"])
@pytest.mark.parametrize("n_ubatch", [1, 3, 64])
@pytest.mark.parametrize("limits", [Limits(), Limits(row=2), Limits(total=3)], ids=str)
def test_pieces_keep_order_dependencies_and_limits(name, batch, n_ubatch, limits):
    rows = check_batch(batch, 50, [-1] * 3)
    left, done = [len(r.tokens) for r in rows], set()
    for piece in split(name, batch, rows, n_ubatch, limits):
        assert len({k for k, _ in piece}) == len(piece)
        for k, n in piece:
            assert set(rows[k].after) <= done and 0 < n <= (limits.row or n)
        assert sum(n for _, n in piece) <= (limits.total or 99)
        for k, n in piece:
            left[k] -= n
            if left[k] == 0:
                done.add(k)
    assert not any(left)


def test_an_unknown_strategy_is_named():
    with pytest.raises(UsageError, match="'halves' is not one of uneven, simple, equal, seq"):
        split("halves", THREE, [], 4, Limits())


def test_uneven_packs_rows_of_different_lengths():
    rows = check_batch(THREE, 50, [-1] * 3)
    assert list(split_uneven(rows, 64, Limits())) == [[(0, 5), (1, 2), (2, 3)]]


@pytest.mark.parametrize("kind", ["attention", "hybrid_sliding_window"])
def test_no_strategy_changes_the_logits(kind):
    params = tiny.params(kind)
    every = Batch(THREE.tokens, seq_ids=THREE.seq_ids, outputs=[True] * 10)
    histories = [(0, (0,)), (4, (0, 1, 2, 3, 4)), (6, (5, 6)), (9, (7, 8, 9))]
    for name in ("uneven", "simple", "equal", "seq"):
        for n_ubatch in (3, 64):
            cache = jh.create_cache(params.hparams, 16, 3, cell_multiple=8, n_ubatch=8)
            logits, _ = jh.decode(params, cache, every, n_ubatch=n_ubatch, split=name)
            for i, history in histories:
                np.testing.assert_allclose(logits[i], expected(kind, history), **NEAR)
    jax.clear_caches()
