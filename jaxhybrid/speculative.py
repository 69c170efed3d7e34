"""Speculative decoding: a drafter guesses the next tokens, one step checks them all, on the device.

Every token is drawn from the model's own distribution with the key of its row and place (`sampling.py`), as
without a drafter; a guess is taken only if it is that very token. So the text is the same as without, for
greedy decoding and for sampling, and its distribution with it; a drafter changes the speed alone. (The
rejection rule of arXiv:2211.17192 keeps the distribution, but not the text.) What was guessed in vain is
rolled back inside the loop: cells are dropped and remembered states taken up again, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxhybrid.batch import make_ubatch
from jaxhybrid.buckets import bucket
from jaxhybrid.cache.attention import n_free
from jaxhybrid.cache.hybrid import FOREVER, Cache, positions_max
from jaxhybrid.cache.operations import roll_back
from jaxhybrid.errors import UsageError
from jaxhybrid.model import NO_ROOM, step
from jaxhybrid.params import Params
from jaxhybrid.sampling import count_token, sample
from jaxhybrid.token_loop import RUNNING, LoopState, choose

D = TypeVar("D", bound="Drafter")


class Drafter(Protocol):
    """Guesses up to `n_draft` tokens a row; a pytree, so that it lives on the device."""

    @property
    def n_draft(self) -> int: ...

    def propose(self: D, params: Params | None, state: LoopState, most: Array) -> tuple[Array, Array, D]:
        """(guesses int32 [B, n_draft], how many of each row's count int32 [B], at most `most`; drafter).

        params: of the draft model, if there is one.
        """
        ...

    def settle(self: D, state: LoopState, written: Array, kept: Array) -> D:
        """After a round: what each row wrote, int32 [B, n_draft + 1], -1 where nothing, and how many of the
        tokens that a row fed (its newest and the guesses) are kept, int32 [B]."""
        ...


# ------------------------------------------------------------------------------------------ n-grams


class NgramDrafter(struct.PyTreeNode):
    """Prompt lookup: what followed the latest earlier place that ends as the text does now.

    text: int32 [B, H], prompt and what was written; lengths: int32 [B]. The longest match of up to `n_gram`
    tokens wins, then the latest.
    """

    text: Array
    lengths: Array
    n_draft: int = struct.field(pytree_node=False)
    n_gram: int = struct.field(pytree_node=False)

    def propose(
        self, params: Params | None, state: LoopState, most: Array
    ) -> tuple[Array, Array, NgramDrafter]:
        rows, room = self.text.shape
        row, place = jnp.arange(rows)[:, None], jnp.arange(room)
        last = self.lengths[:, None] - 1
        matching, length = jnp.ones((rows, room), bool), jnp.zeros((rows, room), jnp.int32)
        for j in range(self.n_gram):
            earlier = jnp.pad(self.text, ((0, 0), (j, 0)))[:, :room]  # the token j places before
            pattern = self.text[row, jnp.maximum(last - j, 0)]
            matching = matching & (earlier == pattern) & (place >= j) & (last >= j)
            length = length + matching
        score = jnp.where(place < last, length * room + place, -1)
        found = jnp.argmax(score, axis=1)
        matched = jnp.max(score, axis=1) >= room  # at least one token
        at = found[:, None] + 1 + jnp.arange(self.n_draft)
        guesses = self.text[row, jnp.minimum(at, room - 1)]
        there = jnp.where(matched, last[:, 0] - found, 0)
        return guesses, jnp.minimum(jnp.minimum(there, self.n_draft), most), self

    def settle(self, state: LoopState, written: Array, kept: Array) -> NgramDrafter:
        at = self.lengths[:, None] + jnp.arange(written.shape[1])
        at = jnp.where(written >= 0, at, self.text.shape[1])
        text = self.text.at[jnp.arange(len(at))[:, None], at].set(written, mode="drop")
        return self.replace(text=text, lengths=self.lengths + jnp.sum(written >= 0, axis=1))


def ngram_drafter(texts: Sequence[Sequence[int]], n_room: int, n_draft: int, n_gram: int = 3) -> NgramDrafter:
    """For rows whose text so far is `texts`, the newest token included; n_room: most tokens of a text."""
    for name, value in (("n_draft", n_draft), ("n_gram", n_gram)):
        if value < 1:
            raise UsageError(f"{name}: {value} must be at least 1")
    room = bucket(max(n_room, *(len(t) for t in texts)))
    table = np.zeros((len(texts), room), np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    lengths = jnp.asarray([len(t) for t in texts], jnp.int32)
    return NgramDrafter(jnp.asarray(table), lengths, n_draft, n_gram)


# -------------------------------------------------------------------------------------- a draft model


class ModelDrafter(struct.PyTreeNode):
    """A smaller model with the same vocabulary. Its cache holds the same sequences as the model's.

    ends: int32 [sequences], where they ended before the guesses.
    """

    cache: Cache
    ends: Array
    n_draft: int = struct.field(pytree_node=False)
    n_kv: int | None = struct.field(pytree_node=False, default=None)

    def propose(
        self, params: Params | None, state: LoopState, most: Array
    ) -> tuple[Array, Array, ModelDrafter]:
        assert params is not None
        running, ends = state.finish == RUNNING, positions_max(self.cache)
        most = jnp.clip(jnp.minimum(most, _room(self.cache, state)), 0, self.n_draft)

        def guess(
            carry: tuple[Cache, Array, LoopState], i: Array
        ) -> tuple[tuple[Cache, Array, LoopState], Array]:
            cache, tokens, ahead = carry
            feeds = running & (i <= most)
            ubatch = make_ubatch(
                tokens[:, None], feeds.astype(jnp.int32), seq_ids=state.seq_ids, n_kv=self.n_kv
            )
            out, cache = step(params, cache, ubatch)
            ahead = ahead.replace(positions=ahead.positions + feeds)
            tokens = jnp.where(
                feeds, sample(out.logits, ahead.sampling, ahead.counts, ahead.positions), tokens
            )
            ahead = ahead.replace(counts=count_token(ahead.counts, tokens, feeds))
            return (cache, tokens, ahead), tokens

        # the last guess is fed too, or this cache would lack it when it is taken
        first = (self.cache, state.tokens, state)
        (cache, _, _), guesses = lax.scan(guess, first, jnp.arange(self.n_draft + 1))
        guesses = guesses[: self.n_draft].T
        return guesses, most, self.replace(cache=cache, ends=ends)

    def settle(self, state: LoopState, written: Array, kept: Array) -> ModelDrafter:
        return self.replace(cache=_ending(self.cache, state.seq_ids, kept, self.ends))


def model_drafter(params: Params, cache: Cache, target: Params, n_draft: int) -> ModelDrafter:
    """`cache` must hold the same sequences as the target's, up to the same token."""
    if params.hparams.vocab_size != target.hparams.vocab_size:
        raise UsageError(
            f"draft model: its vocabulary of {params.hparams.vocab_size} is not the model's "
            f"{target.hparams.vocab_size}; they need the same tokenizer"
        )
    check_rollback(cache, n_draft, "draft cache")
    return ModelDrafter(cache, positions_max(cache), n_draft)


# -------------------------------------------------------------------------------------------- the loop


def check_rollback(cache: Cache, n_draft: int, what: str = "cache") -> None:
    """UsageError unless the cache can be rolled back by as many tokens as are guessed."""
    if n_draft < 1:
        raise UsageError(f"n_draft: {n_draft} must be at least 1")
    if cache.n_rollback is not None and cache.n_rollback < n_draft:
        raise UsageError(
            f"{what}: n_rollback={cache.n_rollback} is less than the {n_draft} tokens of a draft; "
            f"create it with n_rollback={n_draft}"
        )


@partial(jax.jit, static_argnames=("n_rounds", "n_kv"), donate_argnames=("cache", "state", "drafter"))
def advance(
    params: Params,
    cache: Cache,
    state: LoopState,
    drafter: D,
    draft_params: Params | None = None,
    *,
    n_rounds: int,
    n_kv: int | None,
) -> tuple[Array, Cache, LoopState, D, Array]:
    """`token_loop.advance` with a drafter: up to n_rounds steps, each of 1 to n_draft + 1 tokens a row.

    The cache needs `n_rollback` of at least n_draft. Returns (tokens int32 [B, n_rounds * (n_draft + 1)], -1
    where a row wrote none; cache; state; drafter; rounds int32 []). Consumes cache, state and drafter.
    """
    check_rollback(cache, drafter.n_draft)
    rows, width = state.tokens.shape[0], drafter.n_draft + 1

    def running(carry: tuple[Array, Array, Cache, LoopState, D]) -> Array:
        return (carry[0] < n_rounds) & jnp.any(carry[3].finish == RUNNING)

    def round_(carry: tuple[Array, Array, Cache, LoopState, D]) -> tuple[Array, Array, Cache, LoopState, D]:
        i, written, cache, state, drafter = carry
        active = state.finish == RUNNING
        # the last token of a row never enters the cache, so no more guesses than it may still write
        most = jnp.clip(jnp.minimum(state.n_left - 1, _room(cache, state)), 0, drafter.n_draft)
        most = jnp.where(active, most, 0)
        guesses, n_guessed, drafter = drafter.propose(draft_params, state, most)
        before = positions_max(cache)
        ubatch = make_ubatch(
            jnp.concatenate([state.tokens[:, None], guesses], axis=1),
            lengths=jnp.where(active, 1 + n_guessed, 0),
            seq_ids=state.seq_ids,
            outputs=jnp.arange(rows * width),
            n_kv=n_kv,
        )
        out, cache = step(params, cache, ubatch)
        logits = out.logits.reshape(rows, width, -1)
        alive, chosen = active, []
        for k in range(width):
            state = state.replace(positions=state.positions + alive)
            tokens, state = choose(logits[:, k], out.status, state, alive)
            chosen.append(tokens)
            if k < width - 1:
                alive = alive & (k < n_guessed) & (tokens == guesses[:, k]) & (state.finish == RUNNING)
        new = jnp.stack(chosen, axis=1)
        # the newest token and the guesses that came true; a row that broke keeps its newest token
        fed = active & (out.status != NO_ROOM)
        kept = jnp.where(fed, jnp.maximum(jnp.sum(new >= 0, axis=1), 1), 0)
        cache = _ending(cache, state.seq_ids, kept, before)
        drafter = drafter.settle(state, new, kept)
        return i + 1, lax.dynamic_update_slice(written, new, (0, i * width)), cache, state, drafter

    written = jnp.full((rows, n_rounds * width), -1, jnp.int32)
    first = (jnp.int32(0), written, cache, state, drafter)
    i, written, cache, state, drafter = lax.while_loop(running, round_, first)
    return written, cache, state, drafter, i


def _room(cache: Cache, state: LoopState) -> Array:
    """int32 [B]: how many guesses fit beside each row's newest token."""
    child, active = cache.attention, state.finish == RUNNING
    if child is None:
        return jnp.full(len(active), FOREVER)
    free = n_free(child)
    if child.unified:
        return jnp.broadcast_to(free[0] // jnp.maximum(jnp.sum(active), 1) - 1, active.shape)
    return free[state.seq_ids] - 1


def _ending(cache: Cache, seq_ids: Array, kept: Array, before: Array) -> Cache:
    """Each row's sequence ends `kept` (int32 [B]) tokens after where it ended before."""
    ends = jnp.full(cache.n_seq_max, FOREVER)
    ends = ends.at[seq_ids].set(before[seq_ids] + kept, mode="drop")
    return roll_back(cache, ends)[0]
