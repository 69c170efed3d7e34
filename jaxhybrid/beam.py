"""Several continuations of one prompt in one call: beam search, and the best of n samples.

Both fork the prompt in sequence 0, so that unified K/V and recurrent states are shared until they differ, and
leave one result a sequence. As in a token loop, the last token of a result is not yet in its sequence: to go
on, step it. Where the cache has no more room, or logits are not finite, results end with what they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxhybrid.batch import make_ubatch
from jaxhybrid.buckets import bucket
from jaxhybrid.cache.hybrid import Cache, seq_pos_max
from jaxhybrid.cache.operations import fork, gather
from jaxhybrid.errors import UsageError
from jaxhybrid.model import NON_FINITE, OK, step
from jaxhybrid.params import Params
from jaxhybrid.sampling import Sampling, TokenCounts, empty_counts
from jaxhybrid.token_loop import RUNNING, LoopState, choose


class _Beams(struct.PyTreeNode):
    """Best first. tokens: int32 [beams, n_tokens], -1 where none; the rest is [beams].

    scores: float32, -inf where there is no such beam. lengths: int32, tokens written. running: bool.
    """

    tokens: Array
    scores: Array
    lengths: Array
    running: Array


def beam_search(
    params: Params,
    cache: Cache,
    logits: Array,
    *,
    n_beams: int,
    n_tokens: int,
    stop_ids: Sequence[int] | Array = (),
    length_penalty: float | Array = 0.0,
    n_kv: int | None = None,
) -> tuple[Array, Array, Cache]:
    """The n_beams likeliest continuations that a beam search finds, of up to n_tokens tokens.

    Sequence 0 holds the prompt, `logits` [V] are those after its last token; sequences 1 to n_beams - 1 are
    overwritten, later ones are kept. A beam that wrote a token of stop_ids (int32 [stops], -1 where unused)
    is finished: it competes on with the score it has. Beams are ranked by score / length ** length_penalty,
    the score being the sum of log probabilities: the normalisation of arXiv:1609.08144, section 7, with the
    length in the place of (5 + length) / 6 and no coverage term. 0 ranks by the score alone. n_kv (static):
    cells attention reads, at least all that will be filled; None for all.

    Returns (tokens int32 [n_beams, n_tokens], -1 after the end; scores float32 [n_beams], not normalised;
    cache, with result r in sequence r), best first. A result that does not exist, because there are fewer
    continuations than beams, has score -inf and no tokens. Jittable with n_beams, n_tokens and n_kv static;
    raises UsageError naming the argument that is out of range.
    """
    _check(params, cache, logits, "n_beams", n_beams, n_tokens)
    penalty = jnp.asarray(length_penalty, jnp.float32)
    return _beam_search(
        params, cache, logits, _stops(stop_ids), penalty, n_beams=n_beams, n_tokens=n_tokens, n_kv=n_kv
    )


@partial(jax.jit, static_argnames=("n_beams", "n_tokens", "n_kv"))
def _beam_search(
    params: Params,
    cache: Cache,
    logits: Array,
    stop_ids: Array,
    length_penalty: Array,
    *,
    n_beams: int,
    n_tokens: int,
    n_kv: int | None,
) -> tuple[Array, Array, Cache]:
    aligned, first = n_beams == cache.n_seq_max, jnp.arange(n_beams) == 0
    beams = _Beams(
        tokens=jnp.full((n_beams, n_tokens), -1, jnp.int32),
        scores=jnp.where(first, 0.0, -jnp.inf),  # equal beams would all choose the same
        lengths=jnp.zeros(n_beams, jnp.int32),
        running=first,
    )
    logits = jnp.broadcast_to(logits.astype(jnp.float32), (n_beams, *logits.shape))
    beams, _ = _select(beams, jnp.int32(0), logits, _usable(logits), stop_ids, length_penalty)

    def running(carry: tuple[Array, _Beams, Cache]) -> Array:
        return (carry[0] < n_tokens) & jnp.any(carry[1].running)

    def body(carry: tuple[Array, _Beams, Cache]) -> tuple[Array, _Beams, Cache]:
        i, beams, cache = carry
        newest = jnp.maximum(beams.tokens[:, i - 1], 0)[:, None]
        ubatch = make_ubatch(newest, beams.running.astype(jnp.int32), n_kv=n_kv, aligned=aligned)
        out, cache = step(params, cache, ubatch)
        usable = (out.status == OK) & _usable(out.logits)
        beams, parents = _select(beams, i, out.logits, usable, stop_ids, length_penalty)
        return i + 1, beams, _reordered(cache, parents)

    cache = fork(cache, 0, jnp.arange(1, n_beams))
    _, beams, cache = lax.while_loop(running, body, (jnp.int32(1), beams, cache))
    return beams.tokens, beams.scores, cache


def _select(
    beams: _Beams, i: Array, logits: Array, usable: Array, stop_ids: Array, length_penalty: Array
) -> tuple[_Beams, Array]:
    """The best of all beams and of their continuations by one token, and the beam each came from.

    i: int32 [], the column to write. logits: float32 [beams, V]; usable: bool [beams], else the beam ends.
    """
    n_beams = len(beams.scores)
    grows = beams.running & usable
    width = min(n_beams, logits.shape[1])  # no beam can have more children
    gains, tokens = lax.top_k(jax.nn.log_softmax(logits), width)
    itself = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
    scores = beams.scores[:, None] + jnp.where(grows[:, None], gains, itself)
    lengths = beams.lengths + grows
    ranks = scores / jnp.maximum(lengths, 1)[:, None] ** length_penalty
    _, found = lax.top_k(ranks.reshape(-1), n_beams)
    parents, scores = found // width, scores.reshape(-1)[found]
    exists = scores > -jnp.inf
    new = jnp.where(grows[parents] & exists, tokens.reshape(-1)[found], -1)
    written = beams.tokens[parents].at[:, i].set(new)
    beams = _Beams(
        tokens=jnp.where(exists[:, None], written, -1),
        scores=scores,
        lengths=lengths[parents],
        running=(new >= 0) & ~jnp.any(new[:, None] == stop_ids, axis=1),
    )
    return beams, parents


_Samples = tuple[Array, Array, Array, Cache, LoopState]
"""Tokens a row so far; int32 [n, n_tokens]; float32 [n], the sum of log probabilities; and the rest."""


def best_of_n(
    params: Params,
    cache: Cache,
    logits: Array,
    *,
    n: int,
    n_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int] | Array = (),
    counts: TokenCounts | None = None,
    n_kv: int | None = None,
) -> tuple[Array, Array, Cache]:
    """n samples of up to n_tokens tokens, ranked by how likely the model finds them.

    Cache, logits, stop_ids and n_kv are as in `beam_search`. sampling: n rows; each writes what a token loop
    would. counts: n rows, what the penalties take as seen (`sampling.count_prompt`); None for nothing, not
    even the prompt. The rank is the mean log probability of a sample's tokens in the model's own
    distribution, at temperature 1 without filters and penalties.

    Returns (tokens int32 [n, n_tokens], -1 after the end; means float32 [n], -inf where nothing was written;
    cache, with result r in sequence r), best first. Jittable with n, n_tokens and n_kv static; raises
    UsageError naming the argument that is out of range.
    """
    _check(params, cache, logits, "n", n, n_tokens)
    if sampling.seed.shape != (n,):
        raise UsageError(f"sampling: rows {sampling.seed.shape}, n={n} expected; make_sampling({n}, ...)")
    counts = empty_counts(n, params.hparams.vocab_size) if counts is None else counts
    if counts.generated.shape != (n, params.hparams.vocab_size):
        expected = (n, params.hparams.vocab_size)
        raise UsageError(f"counts: shape {counts.generated.shape}, {expected} expected; one row a sample")
    return _best_of_n(
        params, cache, logits, sampling, counts, _stops(stop_ids), n=n, n_tokens=n_tokens, n_kv=n_kv
    )


@partial(jax.jit, static_argnames=("n", "n_tokens", "n_kv"))
def _best_of_n(
    params: Params,
    cache: Cache,
    logits: Array,
    sampling: Sampling,
    counts: TokenCounts,
    stop_ids: Array,
    *,
    n: int,
    n_tokens: int,
    n_kv: int | None,
) -> tuple[Array, Array, Cache]:
    state = LoopState(
        tokens=jnp.zeros(n, jnp.int32),
        positions=jnp.full(n, seq_pos_max(cache, 0) + 1, jnp.int32),
        finish=jnp.full(n, RUNNING, jnp.int32),
        n_left=jnp.full(n, n_tokens, jnp.int32),
        seq_ids=jnp.arange(n, dtype=jnp.int32),
        stop_ids=jnp.broadcast_to(stop_ids, (n, len(stop_ids))),
        sampling=sampling,
        counts=counts,
    )

    def draw(logits: Array, status: Array, state: LoopState) -> tuple[Array, Array, LoopState]:
        tokens, state = choose(logits, status, state, jnp.bool_(True))
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
        return tokens, jnp.where(tokens >= 0, own, 0.0), state

    def running(carry: _Samples) -> Array:
        return (carry[0] < n_tokens) & jnp.any(carry[4].finish == RUNNING)

    def body(carry: _Samples) -> _Samples:
        i, written, total, cache, state = carry
        feeds = state.finish == RUNNING
        ubatch = make_ubatch(
            state.tokens[:, None], feeds.astype(jnp.int32), n_kv=n_kv, aligned=n == cache.n_seq_max
        )
        out, cache = step(params, cache, ubatch)
        state = state.replace(positions=state.positions + feeds)
        tokens, own, state = draw(out.logits, out.status, state)
        return i + 1, written.at[:, i].set(tokens), total + own, cache, state

    logits = jnp.broadcast_to(logits.astype(jnp.float32), (n, *logits.shape))
    tokens, total, state = draw(logits, jnp.where(_usable(logits), OK, NON_FINITE), state)
    written = jnp.full((n, n_tokens), -1, jnp.int32).at[:, 0].set(tokens)
    first = (jnp.int32(1), written, total, fork(cache, 0, jnp.arange(1, n)), state)
    _, written, total, cache, _ = lax.while_loop(running, body, first)
    n_written = jnp.sum(written >= 0, axis=1)
    means = jnp.where(n_written > 0, total / jnp.maximum(n_written, 1), -jnp.inf)
    order = jnp.argsort(means, descending=True, stable=True)
    return written[order], means[order], _reordered(cache, order)


def _usable(logits: Array) -> Array:
    """bool [B]: no NaN and no +inf in logits [B, V], and not all are -inf."""
    return jnp.isfinite(jnp.max(logits, axis=1))


def _reordered(cache: Cache, parents: Array) -> Cache:
    """`gather` for the first sequences; the others stay."""
    return gather(cache, jnp.concatenate([parents, jnp.arange(len(parents), cache.n_seq_max)]))


def _stops(stop_ids: Sequence[int] | Array) -> Array:
    """int32 [stops], filled up to a power of two, so that few shapes are compiled."""
    ids = jnp.asarray(stop_ids, jnp.int32).reshape(-1)
    width = bucket(len(ids))
    return jnp.pad(ids, (0, width - len(ids)), constant_values=-1)


def _check(params: Params, cache: Cache, logits: Array, name: str, n: int, n_tokens: int) -> None:
    for argument, value in ((name, n), ("n_tokens", n_tokens)):
        if value < 1:
            raise UsageError(f"{argument}: {value} must be at least 1")
    if n > cache.n_seq_max:
        raise UsageError(
            f"{name}: {n} is more than the cache's {cache.n_seq_max} sequences; create it with n_seq_max={n}"
        )
    if logits.shape != (params.hparams.vocab_size,):
        raise UsageError(
            f"logits: shape {logits.shape}, {(params.hparams.vocab_size,)} expected; "
            "give those of the prompt's last token"
        )
