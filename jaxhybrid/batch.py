"""What a caller wants computed (`Batch`), its checks, and what one step takes (`Ubatch`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    row = jnp.arange(rows, dtype=jnp.int32)
    real = jnp.full(rows, n_tokens, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    if outputs is None:
        outputs = row * n_tokens + jnp.maximum(real - 1, 0)
    return Ubatch(
        tokens=ids,
        lengths=real,
        seq_ids=row if seq_ids is None else jnp.asarray(seq_ids, jnp.int32),
        starts=jnp.full(rows, -1, jnp.int32) if starts is None else jnp.asarray(starts, jnp.int32),
        outputs=jnp.asarray(outputs, jnp.int32),
        members=None if members is None else jnp.asarray(members, bool),
        n_kv=n_kv,
        aligned=aligned,
    )


# ------------------------------------------------------------------------------------ the batch


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
    """A token names several sequences."""


@dataclass(frozen=True)
class Batch:
    """A flat list of tokens.

    positions: None continues each sequence. seq_ids: one tuple of sequence ids per token, None for
    sequence 0. outputs: which tokens want logits, None for the last of each sequence.
    """

    tokens: Sequence[int]
    positions: Sequence[int] | None = None
    seq_ids: Sequence[tuple[int, ...]] | None = None
    outputs: Sequence[bool] | None = None


@dataclass(frozen=True)
class Row:
    """The tokens of one sequence in a checked batch; `where` are their indices in the batch."""

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    wanted: tuple[bool, ...]
    where: tuple[int, ...]


def check_batch(batch: Batch, vocab_size: int, ends: Sequence[int]) -> list[Row]:
    """Check a batch against a cache whose sequences end at `ends`; its rows in order of appearance.

    Raises the subclass of BatchError whose rule is broken, naming index, value and rule.
    """
    n, n_seq_max = len(batch.tokens), len(ends)
    if n == 0:
        raise EmptyBatchError("batch is empty: give at least one token")
    for name in ("positions", "seq_ids", "outputs"):
        values = getattr(batch, name)
        if values is not None and len(values) != n:
            raise BatchShapeError(f"{name}: {len(values)} entries for {n} tokens")
    found: dict[int, list[int]] = {}
    for i in range(n):
        token = int(batch.tokens[i])
        if not 0 <= token < vocab_size:
            raise TokenRangeError(f"token {i}: id {token} is outside the vocabulary of {vocab_size}")
        ids = {0} if batch.seq_ids is None else set(batch.seq_ids[i])
        for seq in sorted(ids):
            if not 0 <= seq < n_seq_max:
                raise SequenceIdError(
                    f"token {i}: sequence {seq} is outside the cache's {n_seq_max} sequences"
                )
        if not ids:
            raise SequenceIdError(f"token {i}: no sequence id, give at least one")
        if len(ids) > 1:
            raise CoupledTokenError(
                f"token {i}: belongs to sequences {sorted(ids)}; decode it in one and fork that"
            )
        found.setdefault(ids.pop(), []).append(i)
    rows = []
    for seq, where in found.items():
        start = ends[seq] + 1
        if batch.positions is not None:
            first = int(batch.positions[where[0]])
            if first < 0:
                raise PositionError(f"token {where[0]}: position {first} is negative")
            if ends[seq] >= 0 and first != start:
                raise PositionError(
                    f"token {where[0]}: position {first} does not follow {ends[seq]}, "
                    f"the last of sequence {seq}"
                )
            start = first
            for k, i in enumerate(where):
                if int(batch.positions[i]) != start + k:
                    raise PositionError(
                        f"token {i}: position {int(batch.positions[i])} of sequence {seq} "
                        f"should be {start + k}"
                    )
        wanted = [k == len(where) - 1 for k in range(len(where))]
        if batch.outputs is not None:
            wanted = [bool(batch.outputs[i]) for i in where]
        tokens = tuple(int(batch.tokens[i]) for i in where)
        rows.append(Row(seq, start, tokens, tuple(wanted), tuple(where)))
    return rows


# ------------------------------------------------------------------------------------ the split


def bucket(n: int) -> int:
    """The next power of two: the shapes that get compiled."""
    return 1 << max(n - 1, 0).bit_length()


def split(
    rows: Sequence[Row], n_ubatch: int, n_seq_max: int, n_kv: int | None
) -> Iterator[tuple[Ubatch, list[int]]]:
    """Pack rows of different lengths into padded ubatches of at most about `n_ubatch` tokens.

    Yields each ubatch with the batch indices of its outputs. Shapes come from powers of two. When most
    sequences of the cache take part, rows are laid out so that nothing is gathered.
    """
    done = [0] * len(rows)
    while any(d < len(r.tokens) for d, r in zip(done, rows, strict=True)):
        active = [k for k, r in enumerate(rows) if done[k] < len(r.tokens)]
        active = active[: max(1, n_ubatch)]
        longest = max(len(rows[k].tokens) - done[k] for k in active)
        width = bucket(min(longest, max(1, n_ubatch // len(active))))
        aligned = 2 * len(active) > n_seq_max
        height = n_seq_max if aligned else min(bucket(len(active)), n_seq_max)
        tokens = np.zeros((height, width), np.int32)
        lengths, starts = np.zeros(height, np.int32), np.full(height, -1, np.int32)
        seq_ids = np.arange(height, dtype=np.int32)
        outputs: list[int] = []
        where: list[int] = []
        for line, k in enumerate(active):
            row = rows[k]
            line = row.seq_id if aligned else line
            part = slice(done[k], min(done[k] + width, len(row.tokens)))
            lengths[line] = part.stop - part.start
            tokens[line, : lengths[line]] = row.tokens[part]
            seq_ids[line], starts[line] = row.seq_id, row.start + done[k]
            for column, i in enumerate(range(part.start, part.stop)):
                if row.wanted[i]:
                    outputs.append(line * width + column)
                    where.append(row.where[i])
            done[k] = part.stop
        padded = np.zeros(bucket(len(outputs)) if outputs else 0, np.int32)
        padded[: len(outputs)] = outputs
        yield (
            make_ubatch(tokens, lengths, seq_ids, starts, padded, n_kv=n_kv, aligned=aligned),
            where,
        )
