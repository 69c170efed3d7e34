"""Random operations on random caches, against a dict from sequence to the tokens it should hold.

JAXHYBRID_NIGHTLY=1 runs 300 examples of 30 operations, the default a few shorter ones for each kind.
"""

import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory import KINDS, LONGEST, N_SEQ, NEAR, WIDTH, empty, expected, name_of, step

import jaxhybrid as jh

NIGHTLY = bool(os.environ.get("JAXHYBRID_NIGHTLY"))
EXAMPLES, STEPS = (-(-300 // len(KINDS)), 30) if NIGHTLY else (5, 14)
N_ROLLBACK = 2
sequences = st.integers(0, N_SEQ - 1)
tokens = st.integers(0, 5)  # few, so that histories coincide now and then

NAMES = ("seq_rm", "seq_cp", "seq_keep", "seq_add", "fork", "gather", "roll_back", "checkpoint", "try_rewind")
operations = {name: jax.jit(getattr(jh, name)) for name in NAMES}


class Memory(RuleBasedStateMachine):
    """`model`: sequence to (position of the first token, tokens). Sequences have no holes here."""

    kind = KINDS[0]

    @initialize()
    def begin(self):
        # few cells for a window, so that they are used again
        n_ubatch = WIDTH * (N_SEQ if self.kind[1] else 1)
        self.cache = empty(self.kind, n_rollback=N_ROLLBACK, n_ubatch=n_ubatch)
        self.model = {s: (0, ()) for s in range(N_SEQ)}
        self.snapshots = []
        self.stateful = self.cache.recurrent is not None

    # ------------------------------------------------------------------------------- the oracle

    def end(self, seq):
        start, history = self.model[seq]
        return start + len(history) - 1 if history else -1

    def room(self, seq):
        """Tokens that still fit, and that the oracle can recompute."""
        most = LONGEST - len(self.model[seq][1])
        if self.cache.attention is not None and self.cache.attention.unified:
            used = int(np.sum(np.asarray(self.cache.attention.positions) >= 0))
            return min(most, (self.cache.attention.n_cells - used) // N_SEQ)
        return most

    def untouched(self, before, seqs):
        """K/V and states of all other sequences are bit for bit what they were."""
        others = [s for s in range(N_SEQ) if s not in seqs]
        for old, new in zip(before.cell_children, self.cache.cell_children, strict=True):
            for s in others:
                cells_old, cells_new = cells_of(old, s), cells_of(new, s)
                assert cells_old.keys() == cells_new.keys()
                for position in cells_old:
                    for a, b in zip(cells_old[position], cells_new[position], strict=True):
                        np.testing.assert_array_equal(a, b)
        if self.stateful:
            old, new = before.recurrent, self.cache.recurrent
            for s in others:
                np.testing.assert_array_equal(old.positions[s], new.positions[s])
                for a, b in zip(jax.tree.leaves(old.states), jax.tree.leaves(new.states), strict=True):
                    np.testing.assert_array_equal(a[old.slots[s]], b[new.slots[s]])

    def apply(self, name, *arguments):
        before = self.cache
        after, ok = operations[name](before, *arguments)
        if not bool(ok):
            chex.assert_trees_all_equal(after, before)
        self.cache = after
        return bool(ok), before

    # ----------------------------------------------------------------------------------- rules

    @rule(data=st.data())
    def decode(self, data):
        """Rows of different lengths for some sequences, in one step; now and then coupled."""
        chosen = data.draw(st.lists(sequences, min_size=1, max_size=N_SEQ, unique=True))
        rows, members = {}, {}
        for seq in chosen:
            if any(seq in m for m in members.values()):
                continue
            most = min(WIDTH, self.room(seq))
            if most < 1:
                continue
            rows[seq] = data.draw(st.lists(tokens, min_size=1, max_size=most))
            taken = set(chosen).union(*members.values())
            twins = [t for t in range(N_SEQ) if t not in taken and self.model[t] == self.model[seq]]
            joined = data.draw(st.sets(st.sampled_from(twins))) if twins else set()
            members[seq] = {seq, *joined} if self.model[seq][1] else {seq}
        if not rows:
            return
        ids = np.zeros((N_SEQ, WIDTH), np.int32)
        lengths, seq_ids = np.zeros(N_SEQ, np.int32), np.zeros(N_SEQ, np.int32)
        together = np.zeros((N_SEQ, N_SEQ), bool)
        for r, (seq, new) in enumerate(rows.items()):
            ids[r, : len(new)], lengths[r], seq_ids[r] = new, len(new), seq
            together[r, list(members[seq])] = True
        before = self.cache
        coupled = any(len(m) > 1 for m in members.values())
        ubatch = jh.make_ubatch(ids, lengths, seq_ids, members=together if coupled else None)
        out, self.cache = step(tiny.params(self.kind[0]), before, ubatch)
        assert not np.any(np.asarray(out.status)[: len(rows)])
        for r, (seq, new) in enumerate(rows.items()):
            start, history = self.model[seq]
            for member in members[seq]:
                self.model[member] = (start, history + tuple(new))
            wanted = expected(self.kind[0], history + tuple(new))
            np.testing.assert_allclose(np.asarray(out.logits)[r], wanted, **NEAR)
        self.untouched(before, set().union(*members.values()))

    @rule(seq=st.integers(-1, N_SEQ), n=st.integers(0, 6))
    def cut_the_end(self, seq, n):
        """The last n tokens; all of them when there are fewer."""
        known = -1 <= seq < N_SEQ
        meant = range(N_SEQ) if seq == -1 else [seq] if known else []
        p0 = max(self.end(meant[0]) - n + 1, 0) if len(meant) == 1 else 0
        there = {s: jh.restorable_positions(self.cache, s) for s in meant}
        ok, before = self.apply("seq_rm", seq, p0, -1)
        if not known:
            assert not ok
            return
        for s in meant:
            start, history = self.model[s]
            kept = max(p0 - start, 0)
            fine = kept == 0 or kept >= len(history) or p0 - 1 in there[s]
            assert ok == fine, (ok, s, p0, there[s])
            if ok:
                self.model[s] = (start, history[:kept]) if kept else (0, ())
        self.untouched(before, set(meant))

    @rule(cuts=st.lists(st.integers(0, 3), min_size=N_SEQ, max_size=N_SEQ))
    def roll_several_back(self, cuts):
        ends = [max(self.end(s) - n, -1) for s, n in enumerate(cuts)]
        there = [jh.restorable_positions(self.cache, s) for s in range(N_SEQ)]
        ok, before = self.apply("roll_back", jnp.asarray(ends, jnp.int32))
        fine = True
        for s, end in enumerate(ends):
            start, history = self.model[s]
            fine &= (
                not history
                or end >= self.end(s)
                or end < start
                or end in there[s]
                or (start > 0 and not self.cache.cell_children and end < 0)
            )
        if fine:
            assert ok
        if ok:
            for s, end in enumerate(ends):
                start, history = self.model[s]
                kept = history[: max(end - start + 1, 0)]
                self.model[s] = (start, kept) if kept else (0, ())
        self.untouched(before, {s for s in range(N_SEQ) if cuts[s]})

    @rule(src=sequences, dst=st.integers(0, N_SEQ), n=st.integers(0, 5))
    def copy(self, src, dst, n):
        """All but the last n tokens."""
        start, history = self.model[src]
        p1 = self.end(src) + 1 - n
        if history and p1 <= start:
            p1 = start + 1
        there = jh.restorable_positions(self.cache, src)
        ok, before = self.apply("seq_cp", src, dst, -1, max(p1, 0))
        if dst == N_SEQ:
            assert not ok
            return
        if src == dst:
            assert ok
        elif history:
            assert ok == (p1 - 1 in there)
        if ok and src != dst:
            self.model[dst] = (start, history[: p1 - start]) if history else (0, ())
        self.untouched(before, {dst} if ok else set())

    @rule(src=sequences, dsts=st.lists(st.integers(0, N_SEQ), min_size=2, max_size=2))
    def fork(self, src, dsts):
        before = self.cache
        self.cache = operations["fork"](before, src, jnp.asarray(dsts))
        for dst in dsts:
            if dst < N_SEQ:
                self.model[dst] = self.model[src]
        self.untouched(before, set(dsts))

    @rule(parents=st.lists(sequences, min_size=N_SEQ, max_size=N_SEQ))
    def reorder(self, parents):
        self.cache = operations["gather"](self.cache, jnp.asarray(parents))
        self.model = {s: self.model[p] for s, p in enumerate(parents)}

    @rule(seq=sequences)
    def keep(self, seq):
        before = self.cache
        self.cache = operations["seq_keep"](before, seq)
        self.model = {s: self.model[s] if s == seq else (0, ()) for s in range(N_SEQ)}
        self.untouched(before, {s for s in range(N_SEQ) if s != seq})

    @rule(seq=sequences, delta=st.integers(-3, 5))
    def shift(self, seq, delta):
        start, history = self.model[seq]
        delta = max(delta, -start)  # nothing falls below 0
        if self.cache.cell_children and not self.has_room_to_split(seq):
            return
        ok, before = self.apply("seq_add", seq, -1, -1, delta)
        assert ok
        if history:
            self.model[seq] = (start + delta, history)
        self.untouched(before, {seq})

    def has_room_to_split(self, seq):
        for child in self.cache.cell_children:
            if child.unified:
                shared = np.asarray(child.owners[0])
                needed = np.sum(shared[:, seq] & (shared.sum(axis=1) > 1))
                if needed > np.sum(np.asarray(child.positions) < 0):
                    return False
        return True

    @rule(seq=sequences)
    def remember(self, seq):
        self.snapshots.append((operations["checkpoint"](self.cache, seq), self.model[seq]))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), seq=sequences)
    def rewind(self, data, seq):
        snapshot, (start, history) = data.draw(st.sampled_from(self.snapshots))
        mine = self.model[seq]
        ok, before = self.apply("try_rewind", seq, snapshot)
        if not self.cache.cell_children:
            assert ok  # the state is all there is
        elif not history:
            assert ok
        else:
            # its cells must hold that very past; a window may have lost it
            same = mine[0] == start and mine[1][: len(history)] == history
            assert ok <= same or self.cache.attention is None
            assert ok or not same or self.cache.windowed is not None
        if ok:
            self.model[seq] = (start, history) if history else (0, ())
        self.untouched(before, {seq} if ok else set())

    # ------------------------------------------------------------------------------- invariants

    @invariant()
    def positions_agree(self):
        if not hasattr(self, "cache"):
            return
        for seq in range(N_SEQ):
            assert int(jh.seq_pos_max(self.cache, seq)) == self.end(seq), (seq, self.model)
            there = jh.restorable_positions(self.cache, seq)
            assert (there[-1] if there else -1) == self.end(seq)

    @invariant()
    def books_are_in_order(self):
        if not hasattr(self, "cache"):
            return
        assert not np.any(np.asarray(self.cache.lossy))
        for child in self.cache.cell_children:
            if child.unified:
                owned = np.asarray(child.owners[0]).any(axis=1)
                np.testing.assert_array_equal(owned, np.asarray(child.positions[0]) >= 0)
        child = self.cache.recurrent
        if child is not None:
            slots, positions = np.asarray(child.slots), np.asarray(child.positions)
            assert np.all((slots >= 0) & (slots <= child.zero_slot))
            np.testing.assert_array_equal(slots == child.zero_slot, positions < 0)
            assert np.all((np.diff(positions, axis=1) < 0) | (positions[:, 1:] == -1))
            for leaf in jax.tree.leaves(child.states):
                assert not np.any(np.asarray(leaf[child.zero_slot]))


def cells_of(child, seq):
    """{position: the K and V rows} of one sequence."""
    stream = 0 if child.unified else seq
    where = np.asarray(child.positions[stream])
    mine = where >= 0
    if child.unified:
        mine = mine & np.asarray(child.owners[0, :, seq])
    found = {}
    buffers = [np.asarray(b[stream]) for b in child.keys + child.values]
    for cell in np.flatnonzero(mine):
        found[int(where[cell])] = [b[:, cell] for b in buffers]
    return found


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_operations_agree_with_a_dict(kind):
    machine = type("MemoryOf" + name_of(kind).replace("-", "_"), (Memory,), {"kind": kind})
    case = machine.TestCase
    case.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS)
    case().runTest()
