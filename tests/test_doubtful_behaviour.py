"""Where llama.cpp's memory does something doubtful or aborts, this one does what the contract says.

Each test names the behaviour it rules out. Shifts of shared cells and divided keys are in test_moves.py.
"""

import chex
import numpy as np
import pytest
import tiny
from memory import CELLS, KINDS, NEAR, STATES, check_next, empty, ends, feed, name_of

import jaxhybrid as jh
from jaxhybrid.batch import Batch, PositionError, SequenceIdError
from jaxhybrid.cache.portable import put_sequence, take_sequence
from jaxhybrid.errors import CacheFullError

kinds = pytest.mark.parametrize("kind", KINDS, ids=name_of)
with_cells = pytest.mark.parametrize("kind", CELLS, ids=name_of)
stateful = pytest.mark.parametrize("kind", STATES, ids=name_of)
TEXT = [3, 1, 4, 1, 5, 9]


@kinds
def test_keeping_one_sequence_empties_every_other_stream(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT, 1: [5], 2: [6, 6]})
    kept = jh.seq_keep(cache, 1)
    assert ends(kept) == [-1, 0, -1]
    check_next(kind, kept, {0: [], 1: [5], 2: []})  # a new prompt meets no stale cells


@with_cells
def test_a_saved_sequence_has_its_keys_turned_and_copied(kind):
    """There a shift or a copy waits for the next decode, and saving in between stores the old keys."""
    _, cache = feed(kind, empty(kind), {0: TEXT})
    shifted, _ = jh.seq_add(cache, 0, -1, -1, 5)
    check_next(kind, put_sequence(empty(kind), 1, take_sequence(shifted, 0)), {1: TEXT})
    copied, ok = jh.seq_cp(cache, 0, 2, -1, -1)
    assert bool(ok)
    check_next(kind, put_sequence(empty(kind), 1, take_sequence(copied, 2)), {1: TEXT})


@kinds
def test_equal_positions_in_a_batch_are_refused(kind):
    with pytest.raises(PositionError, match="token 1: position 0 of sequence 0 should be 1"):
        jh.decode(tiny.params(kind[0]), empty(kind), Batch([1, 2], positions=[0, 0]))


@kinds
def test_a_copy_replaces_what_was_there(kind):
    """There the cells of a shared pool are merged."""
    _, cache = feed(kind, empty(kind), {0: TEXT, 1: [8, 8]})
    for src, dst in ((0, 1), (1, 0)):
        copied, ok = jh.seq_cp(cache, src, dst, -1, -1)
        assert bool(ok)
        held = TEXT if src == 0 else [8, 8]
        check_next(kind, copied, {0: held, 1: held})


@kinds
def test_a_copy_of_nothing_is_nothing(kind):
    """There a pool leaves the target alone, a state and separate streams empty it."""
    _, cache = feed(kind, empty(kind), {1: TEXT})
    copied, ok = jh.seq_cp(cache, 0, 1, -1, -1)
    assert bool(ok) and ends(copied) == [-1, -1, -1]
    check_next(kind, copied, {1: []})


@kinds
def test_loading_an_empty_sequence_empties_the_target(kind):
    _, cache = feed(kind, empty(kind), {1: TEXT})
    loaded = put_sequence(cache, 1, take_sequence(cache, 0))
    assert ends(loaded) == [-1, -1, -1]
    check_next(kind, loaded, {1: []})


@stateful
def test_a_rollback_deeper_than_the_last_batch_is_exact_or_refused(kind):
    """There it is granted by count, and the state is stale."""
    _, cache = feed(kind, empty(kind, n_rollback=3), {0: TEXT[:5]})
    _, cache = feed(kind, cache, {0: TEXT[5:]})  # the last batch has one token
    back, ok = jh.seq_rm(cache, 0, 3, -1)
    assert bool(ok)
    check_next(kind, back, {0: TEXT[:3]})
    _, ok = jh.seq_rm(cache, 0, 2, -1)
    assert not bool(ok)


@stateful
def test_a_fork_taken_after_a_rollback_has_the_restored_state(kind):
    """There it gets the old state with the new position."""
    _, cache = feed(kind, empty(kind, n_rollback=2), {0: TEXT})
    back, _ = jh.seq_rm(cache, 0, 5, -1)
    forked = jh.fork(back, 0, (1,))
    check_next(kind, forked, {0: TEXT[:5], 1: TEXT[:5]})


@stateful
def test_rolling_one_fork_back_leaves_the_other(kind):
    """There both lose the tail while they share a state."""
    _, cache = feed(kind, empty(kind, n_rollback=2), {0: TEXT})
    forked = jh.fork(cache, 0, (1,))
    back, _ = jh.seq_rm(forked, 1, 4, -1)
    assert ends(back)[:2] == [5, 3]
    check_next(kind, back, {0: TEXT, 1: TEXT[:4]})


@stateful
def test_snapshots_stay_with_their_sequence_whoever_else_decodes(kind):
    """There another sequence's decode moves states, snapshots stay behind, and a rollback finds garbage."""
    _, cache = feed(kind, empty(kind, n_rollback=2), {0: TEXT})
    for turn in range(3):
        _, cache = feed(kind, cache, {1: [turn] * 4, 2: [turn]})
    back, ok = jh.seq_rm(cache, 0, 4, -1)
    assert bool(ok)
    check_next(kind, back, {0: TEXT[:4], 1: [0] * 4 + [1] * 4 + [2] * 4, 2: [0, 1, 2]})


# ------------------------------------------------------------------------------- aborts over there


@kinds
def test_a_batch_of_more_tokens_than_a_ubatch_is_split(kind):
    long = (TEXT * 4)[:21]
    _, cache = jh.decode(tiny.params(kind[0]), empty(kind, n_rollback=3), Batch(long), n_ubatch=3)
    check_next(kind, cache, {0: long})
    back, ok = jh.seq_rm(cache, 0, 18, -1)  # a window of states longer than a ubatch
    assert bool(ok)
    check_next(kind, back, {0: long[:18]})


@pytest.mark.parametrize("kind", [k for k in CELLS if k not in STATES], ids=name_of)
def test_part_of_a_stream_can_be_copied(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT})
    part, ok = jh.seq_cp(cache, 0, 1, 0, 4)
    assert bool(ok) and ends(part)[:2] == [5, 3]
    check_next(kind, part, {1: TEXT[:4]})


@pytest.mark.parametrize("unified", [False, True])
def test_keys_without_rotation_can_be_shifted(unified):
    """There a shift of a model without positions in its keys aborts at the next decode."""
    import dataclasses

    import jax

    hp = tiny.hparams("hybrid")
    hp = dataclasses.replace(hp, attention=dataclasses.replace(tiny.ATTENTION, rope=None))
    params = jh.init_params(hp, jax.random.key(3))
    cache = jh.create_cache(hp, 16, 2, unified=unified, cell_multiple=8)
    _, cache = jh.decode(params, cache, Batch(TEXT))
    moved, ok = jh.seq_add(jh.fork(cache, 0, (1,)), 0, -1, -1, 4)
    assert bool(ok)
    both, moved = jh.decode(params, moved, Batch([7, 7], seq_ids=[(0,), (1,)]))
    np.testing.assert_allclose(both[0], both[1], **NEAR)
    assert ends(moved) == [10, 6]


@kinds
@pytest.mark.parametrize("seq", [3, 255, 256, 2**30, -2])
def test_sequences_outside_the_cache_are_refused_everywhere(kind, seq):
    _, cache = feed(kind, empty(kind), {0: TEXT})
    for after, ok in (
        jh.seq_rm(cache, seq, -1, -1),
        jh.seq_cp(cache, seq, 0, -1, -1),
        jh.seq_cp(cache, 0, seq, -1, -1),
        jh.seq_add(cache, seq, -1, -1, 1),
        jh.seq_div(cache, seq, -1, -1, 2),
        jh.try_rewind(cache, seq, jh.checkpoint(cache, 0)),
    ):
        assert not bool(ok)
        chex.assert_trees_all_equal(after, cache)
    chex.assert_trees_all_equal(jh.seq_keep(cache, seq), cache)
    chex.assert_trees_all_equal(jh.fork(cache, seq, (1,)), cache)
    assert int(jh.seq_pos_max(cache, seq)) == int(jh.seq_pos_min(cache, seq)) == -1
    assert jh.restorable_positions(cache, seq) == []
    with pytest.raises(SequenceIdError):
        jh.decode(tiny.params(kind[0]), cache, Batch([1], seq_ids=[(seq,)]))


@with_cells
def test_loading_without_room_changes_nothing(kind):
    """There the attention half is emptied and the recurrent half kept."""
    _, cache = feed(kind, empty(kind), {0: (TEXT * 4)[:20]})
    image = take_sequence(cache, 0)
    small = empty(kind, n_ctx=16)
    _, small = feed(kind, small, {0: TEXT, 1: [2]})
    before = chex.assert_trees_all_equal
    with pytest.raises(CacheFullError, match="needs 20 cells"):
        put_sequence(small, 0, image)
    before(small, small)
    check_next(kind, small, {0: TEXT, 1: [2]})


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0].startswith("hybrid") and k[1]], ids=name_of)
def test_rows_of_any_number_fit_any_ubatch(kind):
    """There a context whose ubatch is no multiple of its sequences aborts."""
    batch = Batch([1, 2, 3, 4, 5], seq_ids=[(2,), (0,), (2,), (1,), (0,)])
    for n_ubatch in (1, 2, 5):
        _, cache = jh.decode(tiny.params(kind[0]), empty(kind), batch, n_ubatch=n_ubatch)
        assert ends(cache) == [1, 0, 1]
