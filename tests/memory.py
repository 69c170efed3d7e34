"""Caches of every kind for tests, fed in steps of one shape, and what their logits should be."""

from functools import cache as remember

import jax
import numpy as np
import tiny

import jaxhybrid as jh

N_SEQ, N_CTX, WIDTH, LONGEST = 3, 32, 4, 24
NAMES = ("attention", "sliding_window", "recurrent", "hybrid", "hybrid_sliding_window")
KINDS = [(name, unified) for name in NAMES for unified in (False, True) if name != "recurrent" or not unified]
STATES = [kind for kind in KINDS if kind[0] not in ("attention", "sliding_window")]
CELLS = [kind for kind in KINDS if kind[0] != "recurrent"]
NEAR = {"rtol": 0, "atol": 2e-5}
"""float32 rounding where shapes, cells or turned keys change the order of sums; logits are below 4."""

step = jax.jit(jh.step)
_forward = jax.jit(jh.forward)


def name_of(kind):
    return f"{kind[0]}{'-unified' if kind[1] else ''}"


def empty(kind, n_rollback=0, n_ctx=N_CTX, n_seq=N_SEQ, n_ubatch=WIDTH * N_SEQ):
    name, unified = kind
    return jh.create_cache(
        tiny.hparams(name),
        n_ctx,
        n_seq,
        unified=unified,
        n_rollback=n_rollback,
        n_ubatch=n_ubatch,
        cell_multiple=8,
    )


def feed(kind, cache, rows, starts=None, members=None):
    """rows: {sequence: tokens}, in steps of WIDTH. ({sequence: logits after its last token}, cache)."""
    done, found = dict.fromkeys(rows, 0), {}
    while any(done[s] < len(rows[s]) for s in rows):
        tokens, lengths = np.zeros((N_SEQ, WIDTH), np.int32), np.zeros(N_SEQ, np.int32)
        seq_ids, first = np.zeros(N_SEQ, np.int32), np.full(N_SEQ, -1, np.int32)
        for r, (seq, ids) in enumerate(rows.items()):
            part = ids[done[seq] : done[seq] + WIDTH]
            tokens[r, : len(part)], lengths[r], seq_ids[r] = part, len(part), seq
            if starts and seq in starts:
                first[r] = starts[seq] + done[seq]
        together = None
        if members is not None:
            together = np.zeros((N_SEQ, cache.n_seq_max), bool)
            for r, seq in enumerate(rows):
                together[r, list(members[seq])] = True
        ubatch = jh.make_ubatch(tokens, lengths, seq_ids, first, members=together)
        out, cache = step(tiny.params(kind[0]), cache, ubatch)
        assert not np.any(np.asarray(out.status)[: len(rows)]), out.status
        for r, seq in enumerate(rows):
            if lengths[r]:
                done[seq] += int(lengths[r])
                found[seq] = np.asarray(out.logits)[r]
    return found, cache


@remember
def expected(name, tokens):
    """Logits after the last of `tokens` (a tuple), computed in one piece without a cache."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_forward(tiny.params(name), padded))[0, len(tokens) - 1]


def check_next(kind, cache, histories, token=7):
    """Each sequence answers to one more token as if its history had just been computed."""
    found, _ = feed(kind, cache, {seq: [token] for seq in histories})
    for seq, history in histories.items():
        np.testing.assert_allclose(found[seq], expected(kind[0], (*history, token)), **NEAR)


def ends(cache):
    return [int(jh.seq_pos_max(cache, s)) for s in range(cache.n_seq_max)]
