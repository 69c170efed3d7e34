"""What a batch may say, how it is split, and in which order outputs come back."""

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxhybrid as jh
from jaxhybrid import batch as rules
from jaxhybrid.batch import Batch, check_batch
from jaxhybrid.splits import Limits, bucket, lay_out, split_uneven

pytestmark = pytest.mark.quick

ENDS = [4, -1, -1]  # sequence 0 holds positions 0 to 4


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (Batch([]), rules.EmptyBatchError, "give at least one token"),
        (Batch([1, 2], positions=[5]), rules.BatchShapeError, "positions: 1 entries for 2 tokens"),
        (Batch([1, 2], seq_ids=[(0,)]), rules.BatchShapeError, "seq_ids: 1 entries for 2 tokens"),
        (Batch([1], outputs=[]), rules.BatchShapeError, "outputs: 0 entries for 1 tokens"),
        (Batch([1, 50]), rules.TokenRangeError, "token 1: id 50 is outside the vocabulary of 50"),
        (Batch([-1]), rules.TokenRangeError, "token 0: id -1"),
        (Batch([1], seq_ids=[(3,)]), rules.SequenceIdError, "token 0: sequence 3 is outside the cache's 3"),
        (Batch([1], seq_ids=[(-1,)]), rules.SequenceIdError, "token 0: sequence -1"),
        (Batch([1], seq_ids=[()]), rules.SequenceIdError, "token 0: no sequence id"),
        (Batch([1], positions=[6]), rules.PositionError, "token 0: position 6 does not follow 4"),
        (Batch([1], positions=[-2]), rules.PositionError, "token 0: position -2 is negative"),
        (Batch([1, 1], positions=[5, 7]), rules.PositionError, "token 1: position 7 .* should be 6"),
        (Batch([1], seq_ids=[(0, 2)]), rules.CoupledTokenError, "token 0: sequences 0 and 2 have different"),
    ],
)
def test_each_rule_has_its_error(batch, error, message):
    with pytest.raises(error, match=message) as caught:
        check_batch(batch, vocab_size=50, ends=ENDS)
    assert isinstance(caught.value, jh.BatchError) and isinstance(caught.value, ValueError)


def test_an_empty_sequence_may_start_anywhere():
    (row,) = check_batch(Batch([1, 2], positions=[7, 8], seq_ids=[(1,), (1,)]), 50, ENDS)
    assert row.start == 7


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    n_ubatch=st.integers(1, 70),
    spare=st.integers(0, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_a_split_loses_nothing_and_keeps_the_order(lengths, n_ubatch, spare, seed):
    draw = np.random.default_rng(seed)
    order = draw.permutation(np.repeat(np.arange(len(lengths)), lengths))
    outputs = draw.integers(0, 2, len(order)).astype(bool)
    batch = Batch(list(range(len(order))), seq_ids=[(int(i),) for i in order], outputs=outputs.tolist())
    n_seq_max = len(lengths) + spare
    rows = check_batch(batch, 10_000, [-1] * n_seq_max)
    seen: dict[int, list[int]] = {i: [] for i in range(len(lengths))}
    answered = []
    done = [0] * len(rows)
    for piece in split_uneven(rows, n_ubatch, Limits()):
        ubatch, where = lay_out(piece, rows, done, n_seq_max, None)
        for k, n in piece:
            done[k] += n
        tokens, taken = np.asarray(ubatch.tokens), np.asarray(ubatch.lengths)
        height, width = tokens.shape
        assert width == bucket(width) and height <= n_seq_max
        active = np.flatnonzero(taken)
        assert len(set(np.asarray(ubatch.seq_ids)[active])) == len(active)
        if ubatch.aligned:
            assert np.asarray(ubatch.seq_ids).tolist() == list(range(n_seq_max))
        for r in active:
            seq = int(ubatch.seq_ids[r])
            assert int(ubatch.starts[r]) == len(seen[seq])
            seen[seq] += tokens[r, : taken[r]].tolist()
        answered += tokens.reshape(-1)[np.asarray(ubatch.outputs)[: len(where)]].tolist()
        assert answered[len(answered) - len(where) :] == where  # here a token is its own index
    assert all(seen[i] == np.flatnonzero(order == i).tolist() for i in seen)
    assert sorted(answered) == np.flatnonzero(outputs).tolist()


def test_logits_come_in_the_order_of_the_batch():
    params = tiny.params("hybrid")

    def cache():
        return jh.create_cache(params.hparams, 16, 3, cell_multiple=8)

    interleaved = Batch(
        [1, 9, 2, 8, 3, 7],
        seq_ids=[(2,), (0,), (2,), (0,), (2,), (0,)],
        outputs=[True, False, True, True, False, True],
    )
    logits, _ = jh.decode(params, cache(), interleaved)
    ones, _ = jh.decode(params, cache(), Batch([1, 2, 3], seq_ids=[(2,)] * 3, outputs=[True] * 3))
    nines, _ = jh.decode(params, cache(), Batch([9, 8, 7], seq_ids=[(0,)] * 3, outputs=[True] * 3))
    expected = np.stack([ones[0], ones[1], nines[1], nines[2]])
    np.testing.assert_allclose(logits, expected, atol=1e-5)  # float32 rounding of other shapes
    none, after = jh.decode(params, cache(), Batch([1, 2], outputs=[False, False]))
    assert none.shape == (0, tiny.VOCAB) and int(jh.seq_pos_max(after, 0)) == 1


def test_a_batch_that_is_refused_leaves_the_cache_usable():
    params = tiny.params("hybrid")
    for unified in (False, True):
        cache = jh.create_cache(params.hparams, 8, 2, unified=unified, cell_multiple=8)
        _, cache = jh.decode(params, cache, Batch([1, 2, 3]))
        with pytest.raises(jh.CacheFullError, match="raise n_ctx"):
            jh.decode(params, cache, Batch([1] * 6), donate=True)
        with pytest.raises(jh.BatchError):
            jh.decode(params, cache, Batch([99]), donate=True)
        logits, after = jh.decode(params, cache, Batch([1] * 5))
        assert np.isfinite(logits).all() and int(jh.seq_pos_max(after, 0)) == 7
