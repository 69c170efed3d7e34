"""Jitted token loops: step, sample and stop on the device, k tokens a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxhybrid.batch import make_ubatch
from jaxhybrid.buckets import bucket
from jaxhybrid.cache.hybrid import Cache
from jaxhybrid.model import NO_ROOM, NON_FINITE, step
from jaxhybrid.params import Params
from jaxhybrid.sampling import (
    Sampling,
    TokenCounts,
    count_prompt,
    count_token,
    empty_counts,
    sample,
)

RUNNING, STOPPED, LENGTH, BROKEN, FULL = 0, 1, 2, 3, 4
"""Why a row ended: not yet; a stop token; its limit of tokens; activations not finite; no room."""


class LoopState(struct.PyTreeNode):
    """Everything a token loop carries beside the cache, one entry a row.

    tokens: int32 [B], the newest token, not yet in the cache. positions: int32 [B], where it will
    stand. finish: int32 [B], RUNNING or why the row ended. n_left: int32 [B], tokens it may still
    write. stop_ids: int32 [B, stops], -1 where unused. seq_ids: int32 [B].
    """

    tokens: Array
    positions: Array
    finish: Array
    n_left: Array
    seq_ids: Array
    stop_ids: Array
    sampling: Sampling
    counts: TokenCounts


def start(
    params: Params,
    logits: Array,
    prompts: Sequence[Sequence[int]],
    seq_ids: Sequence[int],
    positions: Sequence[int],
    max_tokens: Sequence[int],
    stop_ids: Sequence[Sequence[int]],
    sampling: Sampling,
) -> tuple[Array, LoopState]:
    """Sample the first token of each row from the logits [B, V] of its prompt's last token.

    positions: of the token to be sampled. Returns (tokens int32 [B], -1 where a row may write none;
    the state for `advance`).
    """
    rows = len(prompts)
    longest = max(len(p) for p in prompts)
    width = bucket(longest)
    tokens = np.zeros((rows, width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    n_stops = bucket(max((len(s) for s in stop_ids), default=0))
    stops = np.full((rows, n_stops), -1, np.int32)
    for row, ids in enumerate(stop_ids):
        stops[row, : len(ids)] = list(ids)
    state = LoopState(
        tokens=jnp.zeros(rows, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        finish=jnp.where(jnp.asarray(max_tokens) > 0, RUNNING, LENGTH).astype(jnp.int32),
        n_left=jnp.asarray(max_tokens, jnp.int32),
        seq_ids=jnp.asarray(seq_ids, jnp.int32),
        stop_ids=jnp.asarray(stops),
        sampling=sampling,
        counts=empty_counts(rows, params.hparams.vocab_size),
    )
    lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    return _first(logits, jnp.asarray(tokens), lengths, state)


@jax.jit
def _first(logits: Array, prompts: Array, lengths: Array, state: LoopState) -> tuple[Array, LoopState]:
    state = state.replace(counts=count_prompt(state.counts, prompts, lengths))
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return choose(logits, jnp.where(finite, 0, NON_FINITE), state, jnp.bool_(True))


def choose(logits: Array, status: Array, state: LoopState, rows: Array) -> tuple[Array, LoopState]:
    """Sample a token for every running row of `rows` (bool [B]) and find out which rows end with it.

    logits: float32 [B, V]; status: int32 [B], of the step. Returns (tokens int32 [B], -1 where none).
    """
    running = (state.finish == RUNNING) & rows
    broken = running & (status == NON_FINITE)
    full = running & (status == NO_ROOM)
    writes = running & ~broken & ~full
    chosen = sample(logits, state.sampling, state.counts, state.positions)
    stopped = jnp.any(chosen[:, None] == state.stop_ids, axis=1)
    n_left = jnp.where(writes, state.n_left - 1, state.n_left)
    finish = jnp.where(writes & stopped, STOPPED, jnp.where(writes & (n_left <= 0), LENGTH, state.finish))
    finish = jnp.where(broken, BROKEN, jnp.where(full, FULL, finish))
    state = state.replace(
        tokens=jnp.where(writes, chosen, state.tokens),
        finish=finish.astype(jnp.int32),
        n_left=n_left,
        counts=count_token(state.counts, chosen, writes),
    )
    return jnp.where(writes, chosen, -1), state


@partial(jax.jit, static_argnames=("n_tokens", "n_kv", "aligned"), donate_argnames=("cache", "state"))
def advance(
    params: Params,
    cache: Cache,
    state: LoopState,
    *,
    n_tokens: int,
    n_kv: int | None,
    aligned: bool,
) -> tuple[Array, Cache, LoopState]:
    """Up to `n_tokens` more tokens of every running row; ends early when no row runs.

    n_kv: cells to read, enough for all that will be filled. aligned: row r is sequence r. Returns
    (tokens int32 [B, n_tokens], -1 where a row wrote none; cache; state). Consumes cache and state.
    """
    rows = state.tokens.shape[0]

    def running(carry: tuple[Array, Array, Cache, LoopState]) -> Array:
        return (carry[0] < n_tokens) & jnp.any(carry[3].finish == RUNNING)

    def body(carry: tuple[Array, Array, Cache, LoopState]) -> tuple[Array, Array, Cache, LoopState]:
        i, written, cache, state = carry
        ubatch = make_ubatch(
            state.tokens[:, None],
            lengths=(state.finish == RUNNING).astype(jnp.int32),
            seq_ids=state.seq_ids,
            n_kv=n_kv,
            aligned=aligned,
        )
        out, cache = step(params, cache, ubatch)
        state = state.replace(positions=state.positions + (state.finish == RUNNING))
        tokens, state = choose(out.logits, out.status, state, jnp.bool_(True))
        return i + 1, written.at[:, i].set(tokens), cache, state

    written = jnp.full((rows, n_tokens), -1, jnp.int32)
    _, written, cache, state = lax.while_loop(running, body, (jnp.int32(0), written, cache, state))
    return written, cache, state


@jax.jit
def stop_rows(state: LoopState, rows: Array) -> LoopState:
    """End the rows in `rows` (bool [B]): the caller saw a reason that the device cannot see."""
    return state.replace(finish=jnp.where(rows, STOPPED, state.finish))
