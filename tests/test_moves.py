"""seq_add and seq_div: positions move, keys turn with them, neighbours never do."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory import CELLS, KINDS, NEAR, STATES, check_next, empty, ends, feed, name_of

import jaxhybrid as jh
from jaxhybrid import checked

kinds = pytest.mark.parametrize("kind", KINDS, ids=name_of)
with_cells = pytest.mark.parametrize("kind", CELLS, ids=name_of)
stateful = pytest.mark.parametrize("kind", STATES, ids=name_of)
TEXT = [3, 1, 4, 1, 5, 9, 2]


@kinds
@pytest.mark.parametrize("delta", [5, 1, -3])
def test_a_whole_sequence_that_moves_says_the_same(kind, delta):
    """Only distances count, for rotated keys and for those that are not."""
    _, cache = feed(kind, empty(kind), {0: TEXT, 1: [9, 9, 9]}, starts={0: 4})
    moved, ok = jh.seq_add(cache, 0, -1, -1, delta)
    assert bool(ok) and ends(moved) == [10 + delta, 2, -1] and not jh.is_lossy(moved, 0)
    check_next(kind, moved, {0: TEXT, 1: [9, 9, 9]})
    back, ok = jh.seq_add(moved, 0, 0, -1, -delta)
    assert bool(ok) and ends(back) == ends(cache)
    check_next(kind, back, {0: TEXT})


def keys_of(cache, seq):
    """{position: first layer's key} of a sequence; that key depends on token and position alone."""
    child = cache.cell_children[0]
    stream = 0 if child.unified else seq
    mine = np.asarray(child.owners[0, :, seq]) if child.unified else np.ones(child.n_cells, bool)
    where = np.asarray(child.positions[stream])
    return {
        int(p): np.asarray(child.keys[0][stream, :, c]) for c, p in enumerate(where) if p >= 0 and mine[c]
    }


@pytest.mark.parametrize("unified", [False, True])
def test_keys_end_where_they_would_have_been_computed(unified):
    kind = ("attention", unified)
    _, cache = feed(kind, empty(kind), {0: [8] * 7, 1: [8]})
    tokens_at = {}
    for position in (0, 1, 2, 3, 9, 10):
        _, alone = feed(kind, empty(kind), {0: [8]}, starts={0: position})
        tokens_at[position] = keys_of(alone, 0)[position]
    divided, ok = jh.seq_div(cache, 0, 0, -1, 2)
    assert bool(ok) and ends(divided)[:2] == [3, 0]
    moved, ok = jh.seq_add(cache, 0, 5, 7, 4)
    assert bool(ok) and ends(moved)[:2] == [10, 0]
    for found, wanted in ((divided, (0, 1, 2, 3)), (moved, (0, 1, 2, 3, 9, 10))):
        keys = keys_of(found, 0)
        for position in wanted:
            np.testing.assert_allclose(keys[position], tokens_at[position], atol=1e-5)
    np.testing.assert_array_equal(keys_of(divided, 1)[0], keys_of(cache, 1)[0])


@with_cells
@pytest.mark.parametrize("operation", ["add", "div"])
def test_a_neighbour_that_shares_never_moves(kind, operation):
    _, cache = feed(kind, empty(kind), {0: TEXT})
    forked = jh.fork(cache, 0, (1,))
    if operation == "add":
        moved, ok = jh.seq_add(forked, 0, -1, -1, 6)
    else:
        moved, ok = jh.seq_div(forked, 0, -1, -1, 3)
    assert bool(ok) and ends(moved)[:2] == [12 if operation == "add" else 2, 6]
    check_next(kind, moved, {1: TEXT, **({0: TEXT} if operation == "add" else {})})
    for position, key in keys_of(forked, 1).items():
        np.testing.assert_array_equal(keys_of(moved, 1)[position], key)


@with_cells
def test_what_falls_below_zero_is_dropped(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT, 1: [5, 5]})
    moved, ok = jh.seq_add(cache, 0, -1, -1, -3)
    assert bool(ok) and ends(moved)[:2] == [3, 1]
    if kind in STATES:  # the state remembers what attention dropped, and says so
        assert bool(jh.is_lossy(moved, 0)) and not jh.is_lossy(moved, 1)
    else:
        cut, _ = jh.seq_rm(cache, 0, 0, 3)
        found, _ = feed(kind, moved, {0: [7]})
        wanted, _ = feed(kind, cut, {0: [7]})
        np.testing.assert_allclose(found[0], wanted[0], **NEAR)
    gone, ok = jh.seq_add(cache, 0, -1, -1, -99)
    assert bool(ok) and ends(gone)[:2] == [-1, 1]
    check_next(kind, gone, {0: [], 1: [5, 5]})


@stateful
def test_moving_part_of_a_past_and_not_its_tail_is_refused_unless_lossy(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT})
    for operation, last in ((jh.seq_add, 2), (jh.seq_div, 2)):
        after, ok = operation(cache, 0, 1, 4, last)
        assert not bool(ok)
        chex.assert_trees_all_equal(after, cache)
        after, ok = operation(cache, 0, 1, 4, last, lossy=True)
        assert bool(ok) and bool(jh.is_lossy(after, 0)) and ends(after)[0] == 6
        after, ok = operation(cache, 0, 3, -1, last)  # the tail moves too
        assert bool(ok) and not jh.is_lossy(after, 0)
    with pytest.raises(jh.RefusedError, match="seq_add: .* not its tail; lossy=True"):
        checked.seq_add(cache, 0, 1, 4, 2)


@kinds
def test_nothing_to_move_changes_nothing(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT})
    for after, ok in (
        jh.seq_add(cache, 0, -1, -1, 0),
        jh.seq_add(cache, 0, 5, 5, 3),
        jh.seq_add(cache, 2, -1, -1, 3),
        jh.seq_add(cache, 0, 50, -1, 3),
        jh.seq_div(cache, 0, -1, -1, 1),
    ):
        assert bool(ok)
        chex.assert_trees_all_equal(after, cache)
    for after, ok in (
        jh.seq_add(cache, 3, -1, -1, 1),
        jh.seq_div(cache, -2, -1, -1, 2),
        jh.seq_div(cache, 0, -1, -1, 0),
    ):
        assert not bool(ok)
        chex.assert_trees_all_equal(after, cache)
    with pytest.raises(jh.RefusedError, match="0 must be at least 1"):
        checked.seq_div(cache, 0, -1, -1, 0)


@kinds
def test_every_sequence_moves_at_once_and_shared_cells_once(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT})
    forked = jh.fork(cache, 0, (2,))
    moved, ok = jax.jit(partial(jh.seq_add, lossy=False))(forked, -1, -1, -1, 4)
    assert bool(ok) and ends(moved) == [10, -1, 10]
    check_next(kind, moved, {0: TEXT, 2: TEXT})


def test_a_pool_too_full_to_split_refuses():
    kind = ("attention", True)
    cache = empty(kind, n_ctx=8)
    _, cache = feed(kind, cache, {0: TEXT})
    forked = jh.fork(cache, 0, (1,))
    after, ok = jh.seq_add(forked, 0, -1, -1, 2)
    assert not bool(ok)
    chex.assert_trees_all_equal(after, forked)
    with pytest.raises(jh.RefusedError, match="too few of 8 are free; raise n_ctx"):
        checked.seq_add(forked, 0, -1, -1, 2)
    alone, ok = jh.seq_add(forked, 0, 6, -1, 2)  # one cell, and one is free
    assert bool(ok) and ends(alone)[:2] == [8, 6]


@pytest.mark.parametrize("unified", [False, True])
def test_a_context_shift_of_attention_is_exact(unified):
    """Remove a middle, close the gap: as a model that attends to what is left, at the closed positions."""
    kind = ("attention", unified)
    _, cache = feed(kind, empty(kind), {0: TEXT, 1: [2, 2]})
    cut, ok = jh.seq_rm(cache, 0, 2, 4)
    shifted, ok2 = jh.seq_add(cut, 0, 4, -1, -2)
    assert bool(ok) and bool(ok2) and ends(shifted)[:2] == [4, 1]
    # one layer's keys are those of tokens at the new places
    keys = keys_of(shifted, 0)
    for position, token in enumerate([3, 1, 5, 9, 2]):
        _, alone = feed(kind, empty(kind), {0: [token]}, starts={0: position})
        np.testing.assert_allclose(keys[position], keys_of(alone, 0)[position], atol=1e-5)
    found, after = feed(kind, shifted, {0: [7]})
    assert np.isfinite(found[0]).all() and ends(after)[0] == 5
    assert jnp.allclose(found[0], feed(kind, shifted, {0: [7]})[0][0])
