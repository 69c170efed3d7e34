"""Rollback windows, checkpoints and forks: exact, known by position, refused where the past is another."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory import KINDS, N_SEQ, STATES, WIDTH, check_next, empty, ends, feed, name_of

import jaxhybrid as jh
from jaxhybrid import checked

kinds = pytest.mark.parametrize("kind", KINDS, ids=name_of)
stateful = pytest.mark.parametrize("kind", STATES, ids=name_of)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def has_state(kind):
    return kind in STATES


@kinds
@pytest.mark.parametrize("pieces", [[10], [4, 4, 2], [9, 1], [1] * 10], ids=str)
def test_the_last_states_are_kept_however_the_tokens_were_split(kind, pieces):
    cache, at = empty(kind, n_rollback=3), 0
    for n in pieces:
        _, cache = feed(kind, cache, {1: TEXT[at : at + n]})
        at += n
    there = jh.restorable_positions(cache, 1)
    if kind[0] == "attention":
        assert there == list(range(10))
    elif kind[0] == "sliding_window":
        assert there[-4:] == [6, 7, 8, 9]
    else:
        assert there == [6, 7, 8, 9]
    for end in (8, 6):
        back, ok = jh.seq_rm(cache, 1, end + 1, -1)
        assert bool(ok) and ends(back)[1] == end and not jh.is_lossy(back, 1)
        check_next(kind, back, {1: TEXT[: end + 1]})
    # a second time, from where the first led
    again, ok = jh.seq_rm(jh.seq_rm(cache, 1, 9, -1)[0], 1, 7, -1)
    assert bool(ok)
    check_next(kind, again, {1: TEXT[:7]})


@stateful
def test_too_far_back_is_refused_and_changes_nothing(kind):
    _, cache = feed(kind, empty(kind, n_rollback=2), {0: TEXT})
    for p0 in (1, 5, 7):
        for lossy in (False, True):
            back, ok = jh.seq_rm(cache, 0, p0, -1, lossy=lossy)
            assert not bool(ok)
            chex.assert_trees_all_equal(back, cache)
    with pytest.raises(jh.RefusedError, match=r"cannot be taken back to position 4: .* exactly at 7, 8, 9;"):
        checked.seq_rm(cache, 0, 5, -1)


@kinds
def test_roll_back_of_several_sequences_is_all_or_nothing(kind):
    _, cache = feed(kind, empty(kind, n_rollback=2), {0: TEXT[:8], 1: TEXT[:3], 2: TEXT[:5]})
    back, ok = jax.jit(jh.roll_back)(cache, jnp.asarray([5, 99, 2]))
    assert bool(ok) and ends(back) == [5, 2, 2]
    check_next(kind, back, {0: TEXT[:6], 1: TEXT[:3], 2: TEXT[:3]})
    gone, ok = jh.roll_back(cache, jnp.asarray([-1, 99, 99]))
    assert bool(ok) and ends(gone) == [-1, 2, 4]
    if has_state(kind):
        refused, ok = jh.roll_back(cache, jnp.asarray([6, 99, 1]))
        assert not bool(ok)
        chex.assert_trees_all_equal(refused, cache)


@stateful
def test_a_window_of_states_costs_states_only(kind):
    plain, window = jh.state_bytes(empty(kind)), jh.state_bytes(empty(kind, n_rollback=3))
    assert plain.get("attention") == window.get("attention")
    for layer, size in plain["recurrent"].items():
        state = size // (N_SEQ + 1)
        assert window["recurrent"][layer] == state * (4 * N_SEQ + 1)


@kinds
def test_a_checkpoint_leads_back_exactly_and_more_than_once(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT[:6], 1: [9, 9]})
    snapshot = jh.checkpoint(cache, 0)
    assert int(snapshot.position) == 5
    _, later = feed(kind, cache, {0: [8, 8, 8], 1: [2]})
    back = jh.rewind(later, 0, snapshot)
    assert ends(back)[:2] == [5, 2]
    check_next(kind, back, {0: TEXT[:6], 1: [9, 9, 2]})
    _, other = feed(kind, back, {0: [1]})
    check_next(kind, jh.rewind(other, 0, snapshot), {0: TEXT[:6]})
    traced, ok = jax.jit(jh.try_rewind)(later, jnp.int32(0), snapshot)
    assert bool(ok)
    chex.assert_trees_all_equal(traced, back)


@kinds
def test_a_checkpoint_of_nothing_leads_back_to_nothing(kind):
    cache = empty(kind)
    snapshot = jh.checkpoint(cache, 0)
    _, later = feed(kind, cache, {0: TEXT[:3], 1: [4]})
    back = jh.rewind(later, 0, snapshot)
    assert ends(back) == [-1, 0, -1]
    check_next(kind, back, {0: [], 1: [4]})


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0] != "recurrent"], ids=name_of)
def test_a_checkpoint_of_another_past_is_refused(kind):
    _, cache = feed(kind, empty(kind), {0: TEXT[:4], 1: TEXT[1:5]})
    snapshot = jh.checkpoint(cache, 0)
    changed, _ = jh.seq_rm(cache, 0, -1, -1)
    _, changed = feed(kind, changed, {0: [*TEXT[:3], 8, 8, 8]})  # the token at position 3 is another
    for seq, held in ((0, changed), (1, cache), (2, cache)):
        with pytest.raises(jh.RefusedError, match="no longer holds the past"):
            jh.rewind(held, seq, snapshot)
        after, ok = jh.try_rewind(held, seq, snapshot)
        assert not bool(ok)
        chex.assert_trees_all_equal(after, held)
    shifted, _ = jh.seq_add(cache, 0, -1, -1, 3)
    with pytest.raises(jh.RefusedError, match="position 3"):
        jh.rewind(shifted, 0, snapshot)
    with pytest.raises(jh.RefusedError, match="sequence 7 is outside"):
        jh.rewind(cache, 7, snapshot)
    # the same tokens in another sequence are the same past
    _, twin = feed(kind, changed, {2: [*TEXT[:4], 6]})
    back = jh.rewind(twin, 2, snapshot)
    check_next(kind, back, {2: TEXT[:4]})


@kinds
def test_branches_and_their_windows_are_apart(kind):
    _, cache = feed(kind, empty(kind, n_rollback=2), {0: TEXT[:6]})
    forked = jh.fork(cache, 0, (1, 2))
    back, ok = jh.seq_rm(forked, 1, 4, -1)
    assert bool(ok) and ends(back) == [5, 3, 5]
    check_next(kind, back, {0: TEXT[:6], 1: TEXT[:4], 2: TEXT[:6]})
    _, grown = feed(kind, back, {1: [7, 7, 7], 0: [8]})
    check_next(kind, grown, {0: [*TEXT[:6], 8], 1: [*TEXT[:4], 7, 7, 7], 2: TEXT[:6]})
    back, ok = jh.seq_rm(grown, 2, 5, -1)  # the branch that waited still has its own window
    assert bool(ok)
    check_next(kind, back, {2: TEXT[:5]})


@stateful
def test_copying_up_to_a_remembered_state_is_exact(kind):
    _, cache = feed(kind, empty(kind, n_rollback=2), {0: TEXT[:6]})
    part, ok = jh.seq_cp(cache, 0, 2, 0, 5)
    assert bool(ok) and ends(part)[2] == 4 and not jh.is_lossy(part, 2)
    check_next(kind, part, {0: TEXT[:6], 2: TEXT[:5]})
    _, ok = jh.seq_cp(cache, 0, 2, 0, 3)
    assert not bool(ok)
    with pytest.raises(jh.RefusedError, match="seq_cp: sequence 0 cannot be taken back to position 2"):
        checked.seq_cp(cache, 0, 2, 0, 3)


@kinds
def test_slots_are_never_short(kind):
    """Every sequence full of remembered states, all shared, all rewritten at once, again and again."""
    _, cache = feed(kind, empty(kind, n_rollback=3), {0: TEXT})
    histories = {s: list(TEXT) for s in range(N_SEQ)}
    cache = jh.fork(cache, 0, (1, 2))
    draw = np.random.default_rng(0)
    for turn in range(6):
        rows = {s: draw.integers(0, 50, draw.integers(1, WIDTH)).tolist() for s in range(N_SEQ)}
        _, cache = feed(kind, cache, rows)
        for s, new in rows.items():
            histories[s] = histories[s] + new
        if turn % 2:
            cache, ok = jh.roll_back(cache, jnp.asarray([len(h) - 3 for h in histories.values()]))
            assert bool(ok)
            histories = {s: h[:-2] for s, h in histories.items()}
            check_next(kind, cache, histories)
        if turn == 3:
            cache, histories[2] = jh.fork(cache, 1, (2,)), list(histories[1])


@pytest.mark.parametrize("unified", [False, True])
def test_a_window_that_lost_what_is_seen_is_not_cut_back(unified):
    kind = ("sliding_window", unified)
    cache, text = empty(kind), np.random.default_rng(1).integers(0, 50, 28).tolist()
    cache = empty(kind, n_seq=1, n_ubatch=WIDTH)  # 5 + 4 cells, in eights: 16
    from memory import step as jitted
    from tiny import params

    for at in range(0, 28, 4):
        _, cache = jitted(params(kind[0]), cache, jh.make_ubatch([text[at : at + 4]]))
    assert int(cache.windowed.lost[0]) == 11
    there = jh.restorable_positions(cache, 0)
    assert there == list(range(15, 28))  # a query at 16 sees 12 to 16
    back, ok = jh.seq_rm(cache, 0, 16, -1)
    assert bool(ok)
    out, _ = jitted(params(kind[0]), back, jh.make_ubatch([[7, 0, 0, 0]], [1]))
    whole = np.asarray(jh.forward(params(kind[0]), jnp.asarray([[*text[:16], 7]])))[0, -1]
    np.testing.assert_allclose(out.logits[0], whole, atol=2e-5)
    refused, ok = jh.seq_rm(cache, 0, 15, -1)
    assert not bool(ok)
    chex.assert_trees_all_equal(refused, cache)
    lossy, ok = jh.seq_rm(cache, 0, 15, -1, lossy=True)
    assert bool(ok) and bool(jh.is_lossy(lossy, 0))
