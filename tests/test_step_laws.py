"""However the work is cut, packed, placed or padded, the logits are the same."""

from functools import cache as remember

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxhybrid as jh

N_SEQ, N_CTX, LONGEST, WIDTHS = 3, 64, 20, (1, 4, 8)
TOLERANCE = 1e-5
"""float32 sums over other shapes and cells; logits here are below 4."""

step = jax.jit(jh.step)
kinds = pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.WINDOWED])
layouts = pytest.mark.parametrize("unified", [False, True], ids=["streams", "unified"])
examples = settings(max_examples=20)


def new_cache(kind, unified=False):
    # few cells for a window, so that they are used again
    n_ubatch = max(WIDTHS) * (N_SEQ if unified else 1)
    return jh.create_cache(
        tiny.hparams(kind), N_CTX, N_SEQ, unified=unified, n_ubatch=n_ubatch, cell_multiple=8
    )


@remember
def text(seed):
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, LONGEST)


@remember
def whole(kind, seed):
    """Logits of every token of `text(seed)`, computed alone and in one piece without a cache."""
    return np.asarray(jax.jit(jh.forward)(tiny.params(kind), text(seed)[None]))[0]


def run(kind, cache, width, rows, aligned=False):
    """rows: {row: (sequence, tokens)}; what lies behind them is noise. Logits [row][token], cache."""
    tokens = np.random.default_rng(width).integers(0, tiny.VOCAB, (N_SEQ, width))
    lengths, seq_ids = np.zeros(N_SEQ, np.int32), np.arange(N_SEQ, dtype=np.int32)
    for row, (seq, ids) in rows.items():
        tokens[row, : len(ids)], lengths[row], seq_ids[row] = ids, len(ids), seq
    every = np.arange(N_SEQ * width)
    ubatch = jh.make_ubatch(tokens, lengths, seq_ids, outputs=every, aligned=aligned)
    out, cache = step(tiny.params(kind), cache, ubatch)
    assert not np.any(np.asarray(out.status))
    return np.asarray(out.logits).reshape(N_SEQ, width, -1), cache


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@layouts
@kinds
@given(data=st.data())
@examples
def test_any_split_company_place_and_padding(kind, unified, data):
    """Sequences of other lengths advance together by pieces of any size, in any rows."""
    seeds = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=N_SEQ, unique=True), "texts")
    numbers = data.draw(st.permutations(range(N_SEQ)), "sequence numbers")
    cache, done = new_cache(kind, unified), dict.fromkeys(seeds, 0)
    lengths = {s: data.draw(st.integers(1, LONGEST), f"length of {s}") for s in seeds}
    while any(done[s] < lengths[s] for s in seeds):
        width = data.draw(st.sampled_from(WIDTHS), "width")
        places = data.draw(st.permutations(range(N_SEQ)), "rows")
        rows, spans = {}, {}
        for k, s in enumerate(seeds):
            most = min(width, lengths[s] - done[s])
            n = data.draw(st.integers(min(1, most), most), "piece")
            if n:
                rows[places[k]] = (numbers[k], text(s)[done[s] : done[s] + n])
                spans[places[k]] = (s, done[s], done[s] + n)
                done[s] += n
        logits, cache = run(kind, cache, width, rows)
        for row, (s, first, last) in spans.items():
            close(logits[row, : last - first], whole(kind, s)[first:last])


@kinds
@given(data=st.data())
@examples
def test_aligned_rows_are_only_faster(kind, data):
    """Steps with and without `aligned` alternate, with forks between, on a scrambled table of slots."""
    cache = new_cache(kind)
    held = {seq: [] for seq in range(N_SEQ)}
    for _ in range(data.draw(st.integers(2, 5), "steps")):
        src, dst = data.draw(st.tuples(*[st.integers(0, N_SEQ - 1)] * 2), "fork")
        cache = jh.fork(cache, src, (dst,))
        held[dst] = list(held[src])
        active = data.draw(st.sets(st.integers(0, N_SEQ - 1), min_size=1), "rows")
        rows = {seq: (seq, [data.draw(st.integers(0, tiny.VOCAB - 1), "token")]) for seq in active}
        plain, plain_cache = run(kind, cache, 1, rows)
        fast, fast_cache = run(kind, cache, 1, rows, aligned=True)
        for seq in active:
            held[seq] += rows[seq][1]
            close(fast[seq], plain[seq])
        cache = data.draw(st.sampled_from([plain_cache, fast_cache]), "which goes on")
    for seq, ids in held.items():
        if ids:
            padded = np.zeros((1, LONGEST), np.int32)
            padded[0, : len(ids)] = ids
            alone = np.asarray(forward(tiny.params(kind), padded))[0, len(ids) - 1]
            if seq in active:
                close(fast[seq, 0], alone)


forward = jax.jit(jh.forward)


@layouts
@kinds
@given(data=st.data())
@examples
def test_a_fork_equals_a_recompute_and_the_past_still_answers(kind, unified, data):
    seed, n = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 8))
    src, *dsts = data.draw(st.permutations(range(N_SEQ)))
    _, cache = run(kind, new_cache(kind, unified), 8, {0: (src, text(seed)[:n])})
    before = jax.tree.map(np.asarray, cache)
    forked = jh.fork(cache, src, tuple(dsts))
    rest = text(seed)[n : n + 4]
    own, after = run(kind, forked, 4, {1: (dsts[0], rest), 2: (src, rest[:2])})
    close(own[1], whole(kind, seed)[n : n + 4])
    close(own[2, :2], whole(kind, seed)[n : n + 2])
    late, _ = run(kind, after, 4, {0: (dsts[1], rest)})  # the branch that waited
    close(late[0], whole(kind, seed)[n : n + 4])
    jax.tree.map(np.testing.assert_array_equal, before, cache)
    again, _ = run(kind, cache, 4, {1: (src, rest)})
    close(again[1], whole(kind, seed)[n : n + 4])


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_reading_more_cells_than_are_filled_changes_nothing(kind):
    _, cache = run(kind, new_cache(kind), 8, {0: (0, text(0)[:8])})
    found = []
    for n_kv in (16, 32, None):
        ubatch = jh.make_ubatch(np.full((N_SEQ, 1), 3), [1, 0, 0], n_kv=n_kv)
        found.append(np.asarray(step(tiny.params(kind), cache, ubatch)[0].logits[0]))
    close(found[0], found[2])
    close(found[1], found[2])
