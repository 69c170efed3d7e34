"""Operations on the cache as a value: what they do, what they refuse, what they leave alone."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid.errors import UsageError
from jaxhybrid.model import BAD_ROW, NO_ROOM, OK

N_SEQ, N_CTX, WIDTH = 3, 32, 4
KINDS = [
    *((name, unified) for name in ("attention", "hybrid", *tiny.WINDOWED) for unified in (False, True)),
    ("recurrent", False),
]
NEAR = {"atol": 1e-5}  # float32 rounding where other shapes or cells change the order of sums

step = jax.jit(jh.step)


@pytest.fixture(params=KINDS, ids=lambda k: f"{k[0]}{'-unified' if k[1] else ''}")
def kind(request):
    return request.param


def empty(kind):
    name, unified = kind
    # steps have up to N_SEQ rows of WIDTH tokens
    return jh.create_cache(
        tiny.hparams(name), N_CTX, N_SEQ, unified=unified, n_ubatch=WIDTH * N_SEQ, cell_multiple=8
    )


def has_state(kind):
    return kind[0] not in ("attention", "sliding_window")


def feed(kind, cache, *rows):
    """rows: (sequence, tokens); at most WIDTH tokens each, in one step. Logits after each, new cache."""
    tokens, lengths = np.zeros((N_SEQ, WIDTH), np.int32), np.zeros(N_SEQ, np.int32)
    seq_ids = np.zeros(N_SEQ, np.int32)
    for r, (seq, ids) in enumerate(rows):
        tokens[r, : len(ids)], lengths[r], seq_ids[r] = ids, len(ids), seq
    out, cache = step(tiny.params(kind[0]), cache, jh.make_ubatch(tokens, lengths, seq_ids))
    assert np.asarray(out.status)[: len(rows)].tolist() == [OK] * len(rows)
    return np.asarray(out.logits)[: len(rows)], cache


def filled(kind):
    """Sequence 0 holds 4 tokens, sequence 1 two, sequence 2 none."""
    return feed(kind, empty(kind), (0, [1, 2, 3, 4]), (1, [5, 6]))[1]


def ends(cache):
    return [(int(jh.seq_pos_min(cache, i)), int(jh.seq_pos_max(cache, i))) for i in range(N_SEQ)]


def first_position(kind, end):
    """A recurrent state knows the tail only, so that is the first position every child holds."""
    return end if has_state(kind) else 0


# ------------------------------------------------------------------------------------------ making


def test_predicates_choose_the_children(kind):
    cache = empty(kind)
    assert cache.kind == kind[0]
    assert (cache.attention is None) == (kind[0] == "recurrent")
    assert (cache.recurrent is None) == (not has_state(kind))
    assert (cache.windowed is None) == (kind[0] not in tiny.WINDOWED)
    sizes = jh.state_bytes(cache)
    hp = tiny.hparams(kind[0])
    if cache.attention is not None:
        assert cache.n_cells == N_CTX
        streams = 1 if kind[1] else N_SEQ
        # a window of 5 (of each sequence when unified) and a ubatch of 12, in eights
        cells = {i: {False: 24, True: 32}[kind[1]] if hp.is_windowed_layer(i) else N_CTX for i in range(3)}
        expected = {i: 2 * streams * cells[i] * 2 * 4 * 4 for i in hp.attention_layer_indices}
        assert sizes["attention"] == expected
    if cache.recurrent is not None:
        state = 3 * (32 + 2 * 2 * 6) + 4 * 8 * 6
        layers = hp.recurrent_layer_indices
        assert sizes["recurrent"] == dict.fromkeys(layers, (N_SEQ + 1) * state * 4)


def test_cells_are_rounded_up_and_dtypes_are_chosen_apart():
    cache = jh.create_cache(
        tiny.hparams("hybrid"), 100, dtype=jnp.bfloat16, v_dtype=jnp.float32, conv_dtype=jnp.float16
    )
    assert cache.n_cells == 128
    assert cache.attention.keys[0].dtype == jnp.bfloat16
    assert cache.attention.values[0].dtype == jnp.float32
    assert cache.recurrent.states[0]["conv"].dtype == jnp.float16
    assert cache.recurrent.states[0]["ssm"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["n_ctx", "n_seq_max", "cell_multiple"])
def test_sizes_below_one_are_refused(name):
    sizes = {"n_ctx": 8, "n_seq_max": 1, "cell_multiple": 8} | {name: 0}
    with pytest.raises(UsageError, match=f"{name}: 0 must be at least 1"):
        jh.create_cache(tiny.hparams("hybrid"), **sizes)


# --------------------------------------------------------------------------------------- operations


def test_positions(kind):
    cache = filled(kind)
    assert ends(cache) == [(first_position(kind, 3), 3), (first_position(kind, 1), 1), (-1, -1)]
    assert int(jh.seq_pos_max(cache, -1)) == 3
    assert int(jh.seq_pos_min(cache, -1)) == first_position(kind, 1)
    assert int(jh.seq_pos_max(cache, 9)) == -1 and int(jh.seq_pos_max(cache, -2)) == -1


@pytest.mark.parametrize("data", [False, True])
def test_clear_forgets_everything(kind, data):
    cache = jh.clear(filled(kind), data=data)
    assert ends(cache) == [(-1, -1)] * N_SEQ
    if data:
        for child in (cache.attention, cache.windowed, cache.recurrent):
            buffers = child and (getattr(child, "keys", None) or child.states)
            assert all(not np.any(leaf) for leaf in jax.tree.leaves(buffers))
    again, _ = feed(kind, cache, (0, [1, 2, 3, 4]), (1, [5, 6]))
    fresh, _ = feed(kind, empty(kind), (0, [1, 2, 3, 4]), (1, [5, 6]))
    np.testing.assert_allclose(again, fresh, **NEAR)


def test_removing_a_sequence_leaves_the_others(kind):
    cache = filled(kind)
    expected, _ = feed(kind, cache, (1, [7]))
    for p0, p1 in ((-1, -1), (0, 4), (0, 99)):
        without, ok = jh.seq_rm(cache, 0, p0, p1)
        assert bool(ok) and ends(without)[0] == (-1, -1) and ends(without)[1] == ends(cache)[1]
    logits, _ = feed(kind, without, (1, [7]))
    np.testing.assert_allclose(logits, expected, **NEAR)
    refilled, _ = feed(kind, without, (0, [1, 2, 3, 4]))
    fresh, _ = feed(kind, empty(kind), (0, [1, 2, 3, 4]))
    np.testing.assert_allclose(refilled, fresh, **NEAR)
    everyone, ok = jh.seq_rm(cache, -1, -1, -1)
    assert bool(ok) and ends(everyone) == [(-1, -1)] * N_SEQ


@pytest.mark.parametrize(("p0", "p1"), [(2, -1), (0, 2), (1, 3)])
def test_a_state_cannot_be_cut_back_unless_lossy(kind, p0, p1):
    cache = filled(kind)
    cut, ok = jh.seq_rm(cache, 0, p0, p1)
    if not has_state(kind):
        assert bool(ok) and not jh.is_lossy(cut, 0)
        assert ends(cut)[0] == {(2, -1): (0, 1), (0, 2): (2, 3), (1, 3): (0, 3)}[p0, p1]
        return
    reaches_tail = p1 == -1
    assert not ok
    chex.assert_trees_all_equal(cut, cache)
    lossy, ok = jh.seq_rm(cache, 0, p0, p1, lossy=True)
    if reaches_tail:
        assert not ok
        chex.assert_trees_all_equal(lossy, cache)
    else:
        assert bool(ok) and bool(jh.is_lossy(lossy, 0)) and not jh.is_lossy(lossy, 1)
        assert bool(jh.is_lossy(lossy, -1))
        clean, _ = jh.seq_rm(lossy, 0, -1, -1)
        assert not jh.is_lossy(clean, 0)


def test_ranges_beyond_the_end_and_empty_ranges_change_nothing(kind):
    cache = filled(kind)
    for seq, p0, p1 in ((0, 4, -1), (0, 2, 2), (2, -1, -1), (2, 0, 5)):
        after, ok = jh.seq_rm(cache, seq, p0, p1)
        assert bool(ok)
        chex.assert_trees_all_equal(after, cache)


@pytest.mark.parametrize("seq", [-2, N_SEQ, 99])
def test_unknown_sequences_are_refused_and_touch_nothing(kind, seq):
    cache = filled(kind)
    for after, ok in (
        jh.seq_rm(cache, seq, -1, -1),
        jh.seq_cp(cache, seq, 0, -1, -1),
        jh.seq_cp(cache, 0, seq, -1, -1),
        (jh.fork(cache, 0, (seq,)), False),
        (jh.seq_keep(cache, seq), False),
    ):
        assert not ok
        chex.assert_trees_all_equal(after, cache)


def test_a_fork_equals_a_recompute_and_leaves_its_source(kind):
    cache = filled(kind)
    forked = jh.fork(cache, 0, (1, 2))
    assert ends(forked) == [ends(cache)[0]] * 3
    chex.assert_trees_all_equal(jh.fork(cache, 0, ()), cache)
    for same in (range(1, 3), iter([1, 2]), np.array([1, 2]), [jnp.int32(1), 2]):
        chex.assert_trees_all_equal(jh.fork(cache, 0, same), forked)
    logits, after = feed(kind, forked, (0, [7]), (1, [8]), (2, [9]))
    for r, token in enumerate((7, 8, 9)):
        _, recomputed = feed(kind, empty(kind), (0, [1, 2, 3, 4]))
        alone, _ = feed(kind, recomputed, (0, [token]))
        np.testing.assert_allclose(logits[r], alone[0], **NEAR)
    # branches go on apart, and the past still answers as it did
    second, _ = feed(kind, after, (0, [3]), (1, [3]), (2, [3]))
    assert not np.allclose(second[0], second[1], atol=1e-3)
    before, _ = feed(kind, cache, (1, [7]))
    again, _ = feed(kind, filled(kind), (1, [7]))
    np.testing.assert_array_equal(before, again)


def test_states_are_shared_until_one_side_writes():
    kind = ("hybrid", False)
    forked = jh.fork(filled(kind), 0, (1, 2))
    assert len(set(np.asarray(forked.recurrent.slots)[:, 0].tolist())) == 1
    _, after = feed(kind, forked, (1, [8]))
    slots = np.asarray(after.recurrent.slots)[:, 0].tolist()
    assert slots[0] == slots[2] != slots[1]
    _, after = feed(kind, after, (0, [8]), (2, [9]))
    slots = np.asarray(after.recurrent.slots)[:, 0].tolist()
    assert sorted(slots) == [0, 1, 2]  # every slot in use, none lost


def test_copying_part_of_a_sequence(kind):
    cache = filled(kind)
    part, ok = jh.seq_cp(cache, 0, 2, 0, 2)
    if not has_state(kind):
        assert bool(ok) and ends(part)[2] == (0, 1)
        logits, _ = feed(kind, part, (2, [3]))
        alone, _ = feed(kind, empty(kind), (0, [1, 2, 3]))
        np.testing.assert_allclose(logits, alone, **NEAR)
        return
    assert not ok
    chex.assert_trees_all_equal(part, cache)
    lossy, ok = jh.seq_cp(cache, 0, 2, 0, 2, lossy=True)
    assert bool(ok) and bool(jh.is_lossy(lossy, 2)) and not jh.is_lossy(lossy, 0)
    beyond, ok = jh.seq_cp(cache, 0, 2, 0, 4)
    assert bool(ok) and ends(beyond)[2] == ends(cache)[0] and not jh.is_lossy(beyond, 2)


def test_copying_drops_what_the_target_held_and_a_copy_onto_itself_is_nothing(kind):
    cache = filled(kind)
    same, ok = jh.seq_cp(cache, 0, 0, 1, 2)
    assert bool(ok)
    chex.assert_trees_all_equal(same, cache)
    over, ok = jh.seq_cp(cache, 1, 0, -1, -1)
    assert bool(ok) and ends(over)[0] == ends(cache)[1]
    emptied, ok = jh.seq_cp(cache, 2, 0, -1, -1)
    assert bool(ok) and ends(emptied)[0] == (-1, -1)


def test_keeping_one_sequence(kind):
    kept = jh.seq_keep(filled(kind), 1)
    assert ends(kept) == [(-1, -1), ends(filled(kind))[1], (-1, -1)]
    logits, _ = feed(kind, kept, (1, [7]))
    expected, _ = feed(kind, filled(kind), (1, [7]))
    np.testing.assert_allclose(logits, expected, **NEAR)


def test_operations_are_the_same_under_jit_with_traced_numbers(kind):
    cache = filled(kind)
    for name, arguments in {
        "seq_rm": (0, -1, -1),
        "seq_cp": (0, 2, -1, -1),
        "seq_keep": (1,),
        "seq_pos_max": (1,),
        "seq_pos_min": (-1,),
        "is_lossy": (0,),
    }.items():
        operation = getattr(jh, name)
        traced = jax.jit(operation)(cache, *map(jnp.int32, arguments))
        chex.assert_trees_all_equal(traced, operation(cache, *arguments))
    chex.assert_trees_all_equal(
        jax.jit(jh.fork)(cache, jnp.int32(0), jnp.asarray([1, 2])), jh.fork(cache, 0, (1, 2))
    )
    chex.assert_trees_all_equal(jax.jit(partial(jh.clear, data=True))(cache), jh.clear(cache, data=True))


# --------------------------------------------------------------------------------------- no leaks


def test_what_lies_in_unused_cells_and_slots_never_matters(kind):
    cache = filled(kind)
    expected, _ = feed(kind, cache, (0, [7]), (1, [8]), (2, [9]))
    recurrent = cache.recurrent

    def poisoned_cells(child):
        unused = (np.asarray(child.positions) < 0)[:, None, :, None]
        return child.replace(
            keys=tuple(jnp.where(unused, jnp.nan, k) for k in child.keys),
            values=tuple(jnp.where(unused, 1e30, v) for v in child.values),
        )

    if recurrent is not None:
        used = {*np.asarray(recurrent.slots)[:, 0].tolist(), recurrent.zero_slot}
        free = [s for s in range(recurrent.zero_slot) if s not in used]
        assert free
        poison = partial(jax.tree.map, lambda a: a.at[jnp.asarray(free)].set(jnp.nan))
        recurrent = recurrent.replace(states=poison(recurrent.states))
    poisoned = cache.with_cells(poisoned_cells).replace(recurrent=recurrent)
    logits, _ = feed(kind, poisoned, (0, [7]), (1, [8]), (2, [9]))
    np.testing.assert_array_equal(logits, expected)


def test_a_sequence_that_went_wrong_does_not_infect_its_neighbours(kind):
    name, params = kind[0], tiny.params(kind[0])
    embed = params.tensors["embed"]["weight"]
    broken = params.replace(tensors=params.tensors | {"embed": {"weight": embed.at[9].set(jnp.nan)}})
    tokens = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 9], [5, 6, 7, 8]])
    out, cache = step(broken, empty(kind), jh.make_ubatch(tokens))
    assert not np.isfinite(out.logits[1]).any()
    assert np.asarray(out.status).tolist() == [0, 2, 0]
    alone, _ = step(params, empty(kind), jh.make_ubatch(tokens, lengths=[4, 0, 4]))
    others = np.arange(tiny.VOCAB) != 9  # the head is tied to the embedding that was broken
    np.testing.assert_allclose(out.logits[::2, others], alone.logits[::2, others], **NEAR)
    for aligned in (False, True):  # later tokens too, in both ways of reaching the states
        one = jh.make_ubatch(jnp.asarray([[3], [3], [3]]), aligned=aligned)
        later, _ = step(params, cache, one)
        assert np.isfinite(later.logits[::2]).all(), (name, aligned)


@pytest.mark.parametrize("aligned", [False, True])
def test_the_zero_slot_stays_zero(aligned):
    kind = ("recurrent", False)
    cache = filled(kind)
    for token in range(3):
        lengths = [1, token % 2, 1]
        ubatch = jh.make_ubatch(jnp.full((N_SEQ, 1), token), lengths, aligned=aligned)
        _, cache = step(tiny.params("recurrent"), cache, ubatch)
    for state in cache.recurrent.states:
        assert all(not np.any(array[cache.recurrent.zero_slot]) for array in state.values())


# ------------------------------------------------------------------------------------- refused steps


@pytest.mark.parametrize(
    ("seq_ids", "starts", "lengths"),
    [
        ([0, 0, 1], [-1] * 3, [1, 1, 1]),  # a sequence twice
        ([0, 7, 1], [-1] * 3, [1, 1, 1]),  # unknown
        ([0, 1, 2], [9, -1, -1], [1, 1, 1]),  # does not continue
        ([0, 1, 2], [-1] * 3, [5, 1, 1]),  # longer than the row
    ],
)
def test_a_bad_row_changes_nothing(kind, seq_ids, starts, lengths):
    cache = filled(kind)
    tokens = np.full((N_SEQ, WIDTH), 3)
    out, after = step(tiny.params(kind[0]), cache, jh.make_ubatch(tokens, lengths, seq_ids, starts))
    assert BAD_ROW in np.asarray(out.status)
    assert OK not in np.asarray(out.status)
    chex.assert_trees_all_equal(after, cache)


def test_a_full_cache_changes_nothing(kind):
    cache = empty(kind)
    for _ in range(N_CTX // WIDTH):
        _, cache = feed(kind, cache, (0, [1, 2, 3, 4]))
    tokens = np.full((N_SEQ, WIDTH), 3)
    out, after = step(tiny.params(kind[0]), cache, jh.make_ubatch(tokens, [1, 0, 0], [0, 1, 2]))
    if kind[0] == "recurrent":  # no limit of length
        assert np.asarray(out.status).tolist() == [OK] * 3
        return
    assert np.asarray(out.status).tolist() == [NO_ROOM] * 3
    # every buffer, and every cell and slot of the books, is as it was
    chex.assert_trees_all_equal(after, cache)


def test_a_context_shorter_than_the_window_can_be_filled():
    params = tiny.params("sliding_window")
    hp = params.hparams
    attention = tuple(a and dataclasses.replace(a, window=a.window and 300) for a in hp.attention)
    params = params.replace(hparams=dataclasses.replace(hp, attention=attention))
    cache = jh.create_cache(params.hparams, 16, 1, cell_multiple=8)
    for length in (12, 4):
        _, cache = jh.decode(params, cache, jh.Batch([1] * length))
    assert jh.seq_pos_max(cache, 0) == 15
    with pytest.raises(jh.CacheFullError, match="attention cache"):
        jh.decode(params, cache, jh.Batch([1]))
