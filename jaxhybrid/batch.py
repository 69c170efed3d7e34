"""What a caller wants computed (`Batch`), its checks, and what one step takes (`Ubatch`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.typing import ArrayLike

from jaxhybrid.errors import BatchError


class Ubatch(struct.PyTreeNode):
    """Rows of tokens for one step: one sequence a row, real tokens first, padding behind.

    tokens: int32 [B, T]. lengths: int32 [B], 0 for a padding row. seq_ids: int32 [B]. starts: int32
    [B], position of each row's first token, -1 to continue its sequence. outputs: int32 [O], flat
    indices row * T + column of the tokens whose logits are wanted, in any order. members: bool
    [B, sequences], the sequences that a row's tokens belong to, when not seq_ids alone; they must have equal
    histories, and that of seq_ids is used.
    n_kv (static): how many cells attention reads, at least all that are filled; None for all.
    aligned (static): row r is sequence r, for every sequence of the cache; nothing is gathered then.
    """

    tokens: Array
    lengths: Array
    seq_ids: Array
    starts: Array
    outputs: Array
    members: Array | None = None
    n_kv: int | None = struct.field(pytree_node=False, default=None)
    aligned: bool = struct.field(pytree_node=False, default=False)


def make_ubatch(
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    seq_ids: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    outputs: ArrayLike | None = None,
    *,
    members: ArrayLike | None = None,
    n_kv: int | None = None,
    aligned: bool = False,
) -> Ubatch:
    """A ubatch with the usual defaults: full rows, row r for sequence r, continuing, last token out."""
    ids = jnp.asarray(tokens, jnp.int32)
    rows, n_tokens = ids.shape
    row = np.arange(rows, dtype=np.int32)  # defaults are numpy's: a new shape compiles nothing
    real = jnp.asarray(np.full(rows, n_tokens, np.int32) if lengths is None else lengths, jnp.int32)
    if outputs is None:
        outputs = row * n_tokens + jnp.maximum(real - 1, 0)
    return Ubatch(
        tokens=ids,
        lengths=real,
        seq_ids=jnp.asarray(row if seq_ids is None else seq_ids, jnp.int32),
        starts=jnp.asarray(np.full(rows, -1, np.int32) if starts is None else starts, jnp.int32),
        outputs=jnp.asarray(outputs, jnp.int32),
        members=None if members is None else jnp.asarray(members, bool),
        n_kv=n_kv,
        aligned=aligned,
    )


# ------------------------------------------------------------------------------------ the batch

MAX_POSITION = 2**30
"""Positions are int32, and sums of two of them must not overflow."""


class EmptyBatchError(BatchError):
    """A batch has no tokens."""


class BatchShapeError(BatchError):
    """The lists of a batch have different lengths."""


class TokenRangeError(BatchError):
    """A token id is outside the vocabulary."""


class SequenceIdError(BatchError):
    """A sequence id is outside the cache."""


class PositionError(BatchError):
    """A position does not follow the one before it in its sequence."""


class CoupledTokenError(BatchError):
    """A token belongs to sequences whose histories differ."""


@dataclass(frozen=True)
class Batch:
    """A flat list of tokens.

    positions: None continues each sequence. seq_ids: one tuple of sequence ids per token, None for
    sequence 0; a token of several sequences needs them to have the same history. outputs: which tokens
    want logits, None for the last of each sequence.
    """

    tokens: Sequence[int]
    positions: Sequence[int] | None = None
    seq_ids: Sequence[tuple[int, ...]] | None = None
    outputs: Sequence[bool] | None = None

    def sequences_of(self, i: int) -> tuple[int, ...]:
        """The sequence ids of token i, each once, in order."""
        return (0,) if self.seq_ids is None else tuple(sorted({int(s) for s in self.seq_ids[i]}))


@dataclass
class Row:
    """Consecutive tokens of one set of sequences in a checked batch.

    where: their indices in the batch. after: rows that have to be done first, by their place in the list.
    """

    seq_ids: tuple[int, ...]
    start: int
    after: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    where: list[int] = field(default_factory=list)


def is_coupled(batch: Batch) -> bool:
    """Whether a token belongs to several sequences."""
    return batch.seq_ids is not None and any(len(ids) > 1 for ids in batch.seq_ids)


def check_batch(
    batch: Batch, vocab_size: int, ends: Sequence[int], histories: Sequence[Hashable] | None = None
) -> list[Row]:
    """Check a batch against a cache whose sequences end at `ends`; its rows in order of appearance.

    histories: one value a sequence, equal where the sequences' pasts are (needed for coupled tokens only).
    Raises the subclass of BatchError whose rule is broken, naming index, value and rule.
    """
    n, n_seq_max = len(batch.tokens), len(ends)
    if n == 0:
        raise EmptyBatchError("batch is empty: give at least one token")
    for name in ("positions", "seq_ids", "outputs"):
        values = getattr(batch, name)
        if values is not None and len(values) != n:
            raise BatchShapeError(f"{name}: {len(values)} entries for {n} tokens")
    end = dict(enumerate(ends))
    past: dict[int, Hashable] = dict(enumerate(histories if histories is not None else [None] * n_seq_max))
    newest: dict[int, int] = {}  # the row that holds the last token of each sequence so far
    rows: list[Row] = []
    for i in range(n):
        token, ids = int(batch.tokens[i]), batch.sequences_of(i)
        if not 0 <= token < vocab_size:
            raise TokenRangeError(f"token {i}: id {token} is outside the vocabulary of {vocab_size}")
        if not ids:
            raise SequenceIdError(f"token {i}: no sequence id, give at least one")
        for seq in ids:
            if not 0 <= seq < n_seq_max:
                raise SequenceIdError(
                    f"token {i}: sequence {seq} is outside the cache's {n_seq_max} sequences"
                )
        for seq in ids[1:]:
            if (end[seq], past[seq]) != (end[ids[0]], past[ids[0]]):
                raise CoupledTokenError(
                    f"token {i}: sequences {ids[0]} and {seq} have different histories; "
                    "fork one from the other first"
                )
        position = _position(batch, i, ids, end[ids[0]], newest)
        held_by = {newest.get(seq, -1) for seq in ids}
        row = max(held_by)
        if len(held_by) > 1 or row < 0 or rows[row].seq_ids != ids:
            rows.append(Row(ids, position, tuple(sorted(held_by - {-1}))))
            row = len(rows) - 1
        rows[row].tokens.append(token)
        rows[row].where.append(i)
        rows[row].wanted.append(batch.outputs is not None and bool(batch.outputs[i]))
        for seq in ids:
            end[seq], newest[seq], past[seq] = position, row, hash((past[seq], token))
    if batch.outputs is None:
        for row in set(newest.values()):
            rows[row].wanted[-1] = True
    return rows


def _position(batch: Batch, i: int, ids: tuple[int, ...], end: int, newest: Mapping[int, int]) -> int:
    """Where token i stands; PositionError if the batch says something that does not follow."""
    if batch.positions is None:
        return end + 1
    position = int(batch.positions[i])
    if position < 0:
        raise PositionError(f"token {i}: position {position} is negative")
    if position >= MAX_POSITION:
        raise PositionError(f"token {i}: position {position} is too large, the limit is {MAX_POSITION - 1}")
    if ids[0] in newest and position != end + 1:
        raise PositionError(f"token {i}: position {position} of sequence {ids[0]} should be {end + 1}")
    if end >= 0 and position != end + 1:
        raise PositionError(
            f"token {i}: position {position} does not follow {end}, the last of sequence {ids[0]}"
        )
    return position
