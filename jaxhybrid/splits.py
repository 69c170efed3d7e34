"""How a checked batch is cut into ubatches.

A strategy cuts the batch into pieces, each a list of (row, number of its next tokens); `lay_out` makes a
padded ubatch of a piece. The default, `split_uneven`, packs rows of different lengths. The others give
the results of llama.cpp's strategies of those names; they never change what is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxhybrid.batch import Batch, Row, Ubatch, make_ubatch
from jaxhybrid.buckets import bucket
from jaxhybrid.errors import UsageError

Piece = list[tuple[int, int]]
"""What one step takes: indices of rows, and how many of their next tokens."""


@dataclass(frozen=True)
class Limits:
    """What a step may take. row: tokens of one row; total: tokens of all; None for any number."""

    row: int | None = None
    total: int | None = None


# --------------------------------------------------------------------------- strategies, by token index


def split_simple(batch: Batch, n_ubatch: int) -> list[list[list[int]]]:
    """The next `n_ubatch` tokens as they come, each a row of its own; indices into the batch."""
    return [
        [[i] for i in range(first, min(first + n_ubatch, len(batch.tokens)))]
        for first in range(0, len(batch.tokens), n_ubatch)
    ]


def split_equal(batch: Batch, n_ubatch: int, sequential: bool = False) -> list[list[list[int]]]:
    """Rows of equal length, one a set of sequences; no two sets of a piece share a sequence.

    A piece has as many tokens a row as all its rows have, and at most `n_ubatch` in all (but one token of
    up to n_ubatch + 1 sets always goes). sequential: only sets whose first sequence follows the one before.
    """
    waiting = _Waiting(batch)
    pieces = []
    while waiting.left:
        chosen: list[tuple[int, ...]] = []
        for i in waiting.left:
            ids = batch.sequences_of(i)
            apart = not any(set(ids) & set(other) for other in chosen)
            follows = not sequential or not chosen or ids[0] == chosen[-1][0] + 1
            if apart and follows and waiting.is_next(i):
                chosen.append(ids)
                if len(chosen) > n_ubatch:
                    break
        rows: list[list[int]] = [[] for _ in chosen]
        while all(waiting.next_of(ids) is not None for ids in chosen):
            for ids, row in zip(chosen, rows, strict=True):
                row.append(waiting.take(ids))
            if (len(rows[0]) + 1) * len(rows) > n_ubatch:
                break
        pieces.append(rows)
    return pieces


def split_seq(batch: Batch, n_ubatch: int) -> list[list[list[int]]]:
    """One row a piece: the next tokens of one set of sequences, which may only lose members on the way."""
    waiting = _Waiting(batch)
    pieces = []
    while waiting.left:
        i: int | None = next(iter(waiting.left))
        row: list[int] = []
        while i is not None and len(row) < n_ubatch:
            ids = batch.sequences_of(i)
            row.append(waiting.take(ids))
            later = (j for j in waiting.left if j > row[-1] and set(batch.sequences_of(j)) <= set(ids))
            i = next((j for j in later if waiting.is_next(j)), None)
        pieces.append([row])
    return pieces


class _Waiting:
    """The tokens that no piece has taken. A sequence gives them in its order only."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.left = dict.fromkeys(range(len(batch.tokens)))  # in order, and quick to remove from
        self._of_sequence: dict[int, deque[int]] = {}
        for i in self.left:
            for seq in batch.sequences_of(i):
                self._of_sequence.setdefault(seq, deque()).append(i)

    def is_next(self, i: int) -> bool:
        return all(self._of_sequence[seq][0] == i for seq in self._batch.sequences_of(i))

    def next_of(self, ids: tuple[int, ...]) -> int | None:
        """The next token of exactly this set of sequences, if it is their turn."""
        queue = self._of_sequence[ids[0]]
        if queue and self._batch.sequences_of(queue[0]) == ids and self.is_next(queue[0]):
            return queue[0]
        return None

    def take(self, ids: tuple[int, ...]) -> int:
        for seq in ids:
            i = self._of_sequence[seq].popleft()
        del self.left[i]
        return i


NAMED: dict[str, Callable[[Batch, int], list[list[list[int]]]]] = {
    "simple": split_simple,
    "equal": split_equal,
    "seq": split_seq,
}


# ------------------------------------------------------------------------------------ strategies, by row


def split(name: str, batch: Batch, rows: Sequence[Row], n_ubatch: int, limits: Limits) -> Iterator[Piece]:
    """The pieces of a strategy: uneven, simple, equal or seq."""
    if name == "uneven":
        return split_uneven(rows, n_ubatch, limits)
    if name not in NAMED:
        raise UsageError(f"split: {name!r} is not one of uneven, {', '.join(NAMED)}")
    return _by_rows(NAMED[name](batch, n_ubatch), rows, limits)


def split_uneven(rows: Sequence[Row], n_ubatch: int, limits: Limits) -> Iterator[Piece]:
    """All rows that can go, of different lengths, in at most about `n_ubatch` tokens with their padding."""
    left = [len(row.tokens) for row in rows]
    most = min(n_ubatch, limits.total or n_ubatch)
    while any(left):
        ready = [k for k, row in enumerate(rows) if left[k] and not any(left[j] for j in row.after)]
        active = ready[: max(1, most)]
        width = bucket(min(max(left[k] for k in active), max(1, n_ubatch // len(active))))
        if limits.row is not None:
            width = min(width, limits.row)
        if limits.total is not None:
            width = min(width, max(1, limits.total // len(active)))
        piece = [(k, min(width, left[k])) for k in active]
        for k, n in piece:
            left[k] -= n
        yield piece


def _by_rows(pieces: list[list[list[int]]], rows: Sequence[Row], limits: Limits) -> Iterator[Piece]:
    """Token indices as pieces of rows; a piece is cut where a row waits for another, or at a limit."""
    row_of = {i: k for k, row in enumerate(rows) for i in row.where}
    left = [len(row.tokens) for row in rows]
    for piece in pieces:
        taken: dict[int, int] = {}
        for i in sorted(i for row in piece for i in row):
            k = row_of[i]
            total = sum(taken.values())
            waits = any(left[j] or j in taken for j in rows[k].after)
            full = total == limits.total or taken.get(k, 0) == limits.row
            if taken and (waits or full):
                yield list(taken.items())
                taken = {}
            taken[k] = taken.get(k, 0) + 1
            left[k] -= 1
        yield list(taken.items())


def _bucket_of_outputs(n: int, height: int, width: int) -> int:
    """None, one a row, or four times as many as the step before: few shapes to compile."""
    size = 0 if n == 0 else height
    while size < n:
        size *= 4
    return min(size, height * width)


def lay_out(
    piece: Piece, rows: Sequence[Row], done: Sequence[int], n_seq_max: int, n_kv: int | None
) -> tuple[Ubatch, list[int]]:
    """A piece as a padded ubatch, and the batch indices of its outputs; done: tokens of each row before it.

    Shapes come from powers of two. When most sequences of the cache take part, rows are laid out so that
    nothing is gathered.
    """
    width = bucket(max(n for _, n in piece))
    coupled = any(len(rows[k].seq_ids) > 1 for k, _ in piece)
    aligned = 2 * len(piece) > n_seq_max and not coupled
    height = n_seq_max if aligned else min(bucket(len(piece)), n_seq_max)
    tokens = np.zeros((height, width), np.int32)
    lengths, starts = np.zeros(height, np.int32), np.full(height, -1, np.int32)
    seq_ids = np.arange(height, dtype=np.int32)
    members = np.zeros((height, n_seq_max), bool)
    outputs: list[int] = []
    where: list[int] = []
    for line, (k, n) in enumerate(piece):
        row = rows[k]
        line = row.seq_ids[0] if aligned else line
        part = slice(done[k], done[k] + n)
        lengths[line], starts[line] = n, row.start + done[k]
        tokens[line, :n] = row.tokens[part]
        seq_ids[line] = row.seq_ids[0]
        members[line, list(row.seq_ids)] = True
        for column, i in enumerate(range(part.start, part.stop)):
            if row.wanted[i]:
                outputs.append(line * width + column)
                where.append(row.where[i])
    padded = np.zeros(_bucket_of_outputs(len(outputs), height, width), np.int32)
    padded[: len(outputs)] = outputs
    ubatch = make_ubatch(
        tokens,
        lengths,
        seq_ids,
        starts,
        padded,
        members=members if coupled else None,
        n_kv=n_kv,
        aligned=aligned,
    )
    return ubatch, where
