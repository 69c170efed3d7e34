"""How likely given tokens are: continuations of contexts, what contexts share being computed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.batch import make_ubatch
from jaxhybrid.buckets import bucket
from jaxhybrid.cache import Cache, clear, create_cache, fork, seq_keep
from jaxhybrid.engine import encode_prompt
from jaxhybrid.errors import JaxHybridError, UsageError
from jaxhybrid.generation import common_length
from jaxhybrid.model import BAD_ROW, NO_ROOM, NON_FINITE, encode, head
from jaxhybrid.params import Params
from jaxhybrid.settings import Model, Prompt

BLOCK = 128
"""Tokens whose logits exist at one time, 77 MB for a vocabulary of 150,000. One shape is compiled."""


@dataclass(frozen=True)
class Score:
    """logprob: natural logarithm of a continuation's probability. greedy: whether each of its tokens is the
    likeliest one."""

    logprob: float
    greedy: bool


def score(
    model: Model,
    pairs: Sequence[tuple[Prompt, Prompt]],
    *,
    max_length: int | None = None,
    batch_size: int = 16,
    n_ubatch: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """How likely each continuation is after its context; pairs of texts, or of token ids.

    What contexts share (the question of several answers, the examples before several questions) is computed
    once and forked. An empty context is the model's BOS, or EOS where it has none. A text is encoded together
    with its context, whose spaces at the end belong to the continuation. max_length: most tokens of a pair
    that are read; longer contexts lose their beginning (None: no limit). batch_size: sequences side by side.
    n_ubatch: tokens of a step.
    progress: called with (pairs done, pairs in all). Raises UsageError for an empty continuation, one longer
    than max_length, or a token outside the vocabulary.
    """
    for name, value in (("max_length", max_length), ("batch_size", batch_size), ("n_ubatch", n_ubatch)):
        if value is not None and value < 1:
            raise UsageError(f"{name}: {value} must be at least 1")
    leaves: dict[tuple[int, ...], _Leaf] = {}
    for i, (context, continuation) in enumerate(pairs):
        tokens, n = _encoded(model, context, continuation, i, max_length)
        leaf = leaves.setdefault(tokens[:-1], _Leaf(tokens[:-1], len(tokens)))
        leaf.first = min(leaf.first, len(tokens) - n - 1)
        leaf.asked.append((i, list(tokens[-n:])))
    found: dict[int, Score] = {}
    for leaf, logprobs, greedy in _scored(model.params, list(leaves.values()), batch_size, n_ubatch):
        for (i, _), values, best in zip(leaf.asked, logprobs, greedy, strict=True):
            found[i] = Score(float(values.sum(dtype=np.float64)), bool(best.all()))
        if progress is not None:
            progress(len(found), len(pairs))
    return [found[i] for i in range(len(pairs))]


NOT_FINITE = "activations are not finite; check the weights"
advance = jax.jit(encode, donate_argnums=1)
"""(params, cache, ubatch) to (hidden states [O, D], status of the rows, cache); consumes the cache."""


def check_status(status: Array) -> bool:
    """Whether a row of a step has values that are not finite; it must have had room."""
    found = np.asarray(status)
    if np.isin(found, (NO_ROOM, BAD_ROW)).any():
        raise JaxHybridError("a step found no room for tokens that were counted; please report this")
    return bool((found == NON_FINITE).any())


def token_scores(params: Params, hidden: np.ndarray, targets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(log-probabilities float32 [N], whether each is the likeliest, bool [N]) of tokens `targets`, each of
    which follows one of the hidden states [N, D] (after the final norm)."""
    parts = []
    for k in range(0, len(targets), BLOCK):
        states, ids = np.zeros((BLOCK, hidden.shape[-1]), np.float32), np.zeros(BLOCK, np.int32)
        n = len(targets[k : k + BLOCK])
        states[:n], ids[:n] = hidden[k : k + n], targets[k : k + n]
        parts.append(_block_scores(params, states, ids))
    n = len(targets)
    if not parts:
        return np.zeros(0, np.float32), np.zeros(0, bool)
    logprobs, greedy = (
        np.concatenate([np.asarray(x) for x in half])[:n] for half in zip(*parts, strict=True)
    )
    return logprobs, greedy


@jax.jit
def _block_scores(params: Params, hidden: Array, targets: Array) -> tuple[Array, Array]:
    logits = head(params, hidden.astype(params.dtype))
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1), jnp.argmax(logits, axis=1) == targets


# ------------------------------------------------------------------------------------------ the pairs


@dataclass
class _Leaf:
    """Tokens to run through the model. first: where the outputs that are asked for begin. asked: pairs that
    need them, each with its continuation, whose last token is not among them."""

    tokens: tuple[int, ...]
    first: int
    asked: list[tuple[int, list[int]]] = field(default_factory=list)


def _encoded(
    model: Model, context: Prompt, continuation: Prompt, index: int, max_length: int | None
) -> tuple[tuple[int, ...], int]:
    """Token ids of a pair, cut to what fits, and how many of them are the continuation."""
    if isinstance(context, str) != isinstance(continuation, str):
        raise UsageError(f"pair {index + 1}: give two texts or two lists of token ids")
    if isinstance(context, str) and isinstance(continuation, str):
        context, continuation = encode_pair(model, context, continuation)
    before, after = [int(t) for t in context], [int(t) for t in continuation]
    n = len(after)
    if n == 0:
        raise UsageError(f"pair {index + 1}: the continuation is empty, there is nothing to score")
    if max_length is not None and n > max_length:
        raise UsageError(f"pair {index + 1}: the continuation has {n} tokens, max_length is {max_length}")
    if not before:
        prefix = model.tokenizer.prefix_id
        if prefix is None:
            raise UsageError(f"pair {index + 1}: the context is empty, and the model has neither BOS nor EOS")
        before = [prefix]
    tokens = tuple(encode_prompt(model, before + after, index))
    return (tokens if max_length is None else tokens[-max_length - 1 :]), n


def encode_pair(model: Model, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of what follows it, encoded as one text."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not stripped:
        return [], model.tokenizer.encode(continuation, add_special_tokens=False)
    before = model.tokenizer.encode(stripped)
    return before, model.tokenizer.encode(stripped + continuation)[len(before) :]


# -------------------------------------------------------------------------------- computing them


def _scored(
    params: Params, leaves: list[_Leaf], batch_size: int, n_ubatch: int
) -> Iterator[tuple[_Leaf, list[np.ndarray], list[np.ndarray]]]:
    """Each leaf, with the log-probabilities of its continuations, and which of their tokens are likeliest.

    One more sequence than those of a group stays from group to group: the stem, what the next group shares
    with this one.
    """
    leaves.sort(key=lambda leaf: leaf.tokens)  # those with the same beginning are neighbours
    groups = [leaves[k : k + batch_size] for k in range(0, len(leaves), batch_size)]
    if not groups:
        return
    spare = min(batch_size, bucket(len(leaves)))
    n_ctx = max(len(leaf.tokens) for leaf in leaves)
    area = min(bucket(n_ubatch), bucket(max(sum(len(leaf.tokens) for leaf in group) for group in groups)))
    cache = create_cache(params.hparams, n_ctx, spare + 1, dtype=params.dtype, n_ubatch=area)
    stem: tuple[int, ...] = ()
    for group, after in zip(groups, [*groups[1:], []], strict=True):
        if stem and _length_shared([_Leaf(stem, len(stem)), *group]) < len(stem):
            stem, cache = (), clear(cache)
        elif stem:
            cache = fork(cache, spare, tuple(range(spare)))
        longer = group[0].tokens[: _length_shared([group[0], group[-1], *after]) if after else 0]
        before, stem = len(stem), max(stem, longer, key=len)
        rows = [*group, *[_Leaf((), 0)] * (spare - len(group)), _Leaf(stem, len(stem))]
        hidden, where, cache = _run(params, cache, rows, before, area)
        cache = seq_keep(cache, spare)
        states, targets = [], []
        for leaf, places in zip(group, where, strict=False):  # the rest has no outputs
            for _, continuation in leaf.asked:
                first = len(leaf.tokens) - len(continuation)
                states += [places[p] for p in range(first, len(leaf.tokens))]
                targets += continuation
        logprobs, greedy = token_scores(params, hidden[states], targets)
        ends = np.cumsum([len(c) for leaf in group for _, c in leaf.asked])[:-1]
        parts = zip(np.split(logprobs, ends), np.split(greedy, ends), strict=True)
        for leaf in group:
            own = [next(parts) for _ in leaf.asked]
            yield leaf, [values for values, _ in own], [best for _, best in own]


def _length_shared(leaves: Sequence[_Leaf]) -> int:
    """How many tokens all begin with, up to the first whose output is asked for."""
    shared = min(common_length(leaves[0].tokens, leaf.tokens) for leaf in leaves)
    return min(shared, *(leaf.first for leaf in leaves))


def _run(
    params: Params, cache: Cache, leaves: Sequence[_Leaf], start: int, area: int
) -> tuple[np.ndarray, list[dict[int, int]], Cache]:
    """Run leaf i in sequence i, which holds the first `start` of its tokens.

    A step takes the next tokens of all rows whose beginning is done, or of the first that fit; its height
    times its width is `area`, so few shapes are compiled. Returns hidden states float32 [tokens, D] and, for
    each leaf, which of them belongs to which position.
    """
    rows = _rows(leaves, start)
    where: list[dict[int, int]] = [{} for _ in leaves]
    parts: list[np.ndarray] = []
    n_states, bad = 0, False
    while waiting := [row for row in rows if row.left and (row.parent is None or not row.parent.left)]:
        active = waiting[: min(area, bucket(cache.n_seq_max))]
        height = bucket(len(active))
        width = area // height
        tokens, lengths = np.zeros((height, width), np.int32), np.zeros(height, np.int32)
        seq_ids, members = np.arange(height, dtype=np.int32), np.zeros((height, cache.n_seq_max), bool)
        kept: list[int] = []
        for line, row in enumerate(active):
            n = min(width, row.left)
            tokens[line, :n] = leaves[row.members[0]].tokens[row.end - row.left : row.end - row.left + n]
            lengths[line], seq_ids[line] = n, row.members[0]
            members[line, row.members] = True
            for position in range(row.end - row.left, row.end - row.left + n):
                asking = [seq for seq in row.members if position >= leaves[seq].first]
                for seq in asking:
                    where[seq][position] = n_states + len(kept)
                if asking:
                    kept.append(line * width + position - (row.end - row.left))
            row.left -= n
        ubatch = make_ubatch(tokens, lengths, seq_ids, outputs=np.arange(area), members=members)
        hidden, status, cache = advance(params, cache, ubatch)
        bad |= check_status(status)
        if kept:
            parts.append(np.asarray(hidden, np.float32)[kept])
            n_states += len(kept)
    if bad:
        warnings.warn(NOT_FINITE, stacklevel=4)
    return np.concatenate(parts), where, cache


@dataclass
class _Row:
    """Consecutive tokens of the same leaves, up to position `end`; `left` of them are not computed yet."""

    members: list[int]
    end: int
    left: int
    parent: _Row | None


def _rows(leaves: Sequence[_Leaf], start: int) -> list[_Row]:
    """The tree of what leaves have in common from position `start` on, each token once, parents first."""
    rows: list[_Row] = []
    waiting: list[tuple[list[int], int, _Row | None]] = [(list(range(len(leaves))), start, None)]
    while waiting:
        members, begin, parent = waiting.pop()
        by_token: dict[int, list[int]] = {}
        for seq in members:
            if begin < len(leaves[seq].tokens):
                by_token.setdefault(leaves[seq].tokens[begin], []).append(seq)
        for branch in by_token.values():
            first = leaves[branch[0]].tokens
            end = min(common_length(first, leaves[seq].tokens) for seq in branch)
            rows.append(_Row(branch, end, end - begin, parent))
            waiting.append((branch, end, rows[-1]))
    return rows
