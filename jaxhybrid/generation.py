"""Rows that generate side by side: prompts into a cache, then tokens, text and reasons to stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid import speculative
from jaxhybrid import token_loop as loop
from jaxhybrid.batch import Batch
from jaxhybrid.cache import Cache, create_cache, fork, seq_add, seq_rm, state_bytes
from jaxhybrid.cache.hybrid import positions_max
from jaxhybrid.clock import Clock
from jaxhybrid.driver import context_bucket, decode
from jaxhybrid.errors import TokenizerError
from jaxhybrid.sampling import make_sampling
from jaxhybrid.settings import Model, Piece, Result, Settings, Timings
from jaxhybrid.text import Tokenizer
from jaxhybrid.text_stream import StopStrings, TextStream

FINISH_REASONS = {
    loop.STOPPED: "stop",
    loop.LENGTH: "length",
    loop.BROKEN: "not_finite",
    loop.FULL: "length",
}


def prefill(model: Model, cache: Cache, group: list[list[int]], wanted: Settings) -> tuple[Array, Cache]:
    """Logits [len(group), V] after each prompt; a prompt that occurs twice is computed once."""
    first: dict[tuple[int, ...], int] = {}
    owner = [first.setdefault(tuple(p), i) for i, p in enumerate(group)]
    unique = [i for i in range(len(group)) if owner[i] == i]
    batch = Batch(
        tokens=[t for i in unique for t in group[i]],
        seq_ids=[(i,) for i in unique for _ in group[i]],
    )
    logits, cache = decode(model.params, cache, batch, n_ubatch=wanted.n_ubatch, donate=True)
    for i, source in enumerate(owner):
        if source != i:
            cache = fork(cache, source, (i,))
    return logits[np.asarray([unique.index(o) for o in owner])], cache


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many entries two sequences have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Generation:
    """Rows that generate side by side, from the logits after their prompts to their last token."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        prompts: list[list[int]],
        positions: list[int],
        first_index: int,
        wanted: Settings,
        timings: Timings,
    ) -> None:
        self.model, self.cache, self.wanted, self.timings = model, cache, wanted, timings
        self.prompts, self.positions, self.first_index = prompts, positions, first_index
        self.filled = max(positions)  # cells that may be in use
        tokenizer = _tokenizer_or_none(model)
        self.stop_ids = set(wanted.stop_tokens)
        if tokenizer is not None and not wanted.ignore_eos:
            self.stop_ids |= tokenizer.eos_ids
        strings = []
        for text in wanted.stop:
            special = None if tokenizer is None else tokenizer.special_id(text)
            if special is None:
                strings.append(text)
            else:  # it never appears in the text, so it has to stop as a token
                self.stop_ids.add(special)
        self.texts = [_RowText(tokenizer, strings) for _ in prompts]
        self.drafter: Any = None
        self.forgotten = [0] * len(prompts)  # tokens that context shifts dropped from each row

    def run(self, logits: Array) -> Iterator[Piece]:
        wanted, rows = self.wanted, len(self.prompts)
        room = self._room()
        sampling = make_sampling(
            rows,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            seed=wanted.seed + self.first_index,
        )
        with Clock() as clock:
            first, state = loop.start(
                self.model.params,
                logits,
                self.prompts,
                list(range(rows)),
                self.positions,
                room,
                [sorted(self.stop_ids)] * rows,
                sampling,
            )
            written = np.asarray(first)[:, None]
        self._add(clock)
        finish = np.asarray(state.finish)
        self._begin_drafting(written[:, 0])
        while True:
            ended_by_text = []
            for row, text in enumerate(self.texts):
                if text.finished:
                    continue
                reason = FINISH_REASONS.get(int(finish[row]))
                tokens = tuple(int(t) for t in written[row] if t >= 0)
                new, tokens = text.push(tokens, ends_with_stop=reason == "stop")
                if text.stopped:
                    ended_by_text.append(row)
                    reason = "stop"
                if reason is not None:
                    new += text.finish()
                    result = self._result(row, reason)
                    yield Piece(self.first_index + row, new, tokens, self.timings, result)
                elif tokens:
                    yield Piece(self.first_index + row, new, tokens, self.timings)
            if all(text.finished for text in self.texts):
                return
            if ended_by_text:
                mask = np.zeros(rows, bool)
                mask[ended_by_text] = True
                state = loop.stop_rows(state, jnp.asarray(mask))
            with Clock() as clock:
                out, state = self._advance(state)
                written, finish = np.asarray(out), np.asarray(state.finish)
            self._add(clock)

    def _begin_drafting(self, first: np.ndarray) -> None:
        """Make the drafter, which has to know the prompts and the first tokens."""
        wanted, n_cells = self.wanted, self.cache.n_cells
        if wanted.ngram:
            texts = [[*p, max(int(t), 0)] for p, t in zip(self.prompts, first, strict=True)]
            room = max(map(len, texts)) + wanted.max_tokens
            self.drafter = speculative.ngram_drafter(texts, room, wanted.draft_tokens, wanted.ngram)
        elif wanted.draft is not None:
            params, rows = wanted.draft.params, len(self.prompts)
            cells = n_cells or max(map(len, self.prompts)) + wanted.max_tokens
            cache = create_cache(
                params.hparams, cells, rows, dtype=params.dtype, n_rollback=wanted.draft_tokens
            )
            with Clock() as clock:
                _, cache = prefill(wanted.draft, cache, self.prompts, wanted)
            self._add(clock)
            self.drafter = speculative.model_drafter(params, cache, self.model.params, wanted.draft_tokens)

    def _advance(self, state: loop.LoopState) -> tuple[Array, loop.LoopState]:
        """One dispatch: the tokens written, and the state."""
        wanted, n_cells = self.wanted, self.cache.n_cells
        n_rounds = -(-wanted.dispatch // (wanted.n_rollback + 1))
        longest = n_rounds * (wanted.n_rollback + 1) if self.drafter is not None else wanted.dispatch
        if wanted.context_shift != "off":
            self._make_room(longest)
        self.filled = min(self.filled + longest, n_cells or self.filled + longest)
        n_kv = None if n_cells is None else context_bucket(self.filled, n_cells)
        if self.drafter is None:
            out, self.cache, state = loop.advance(
                self.model.params, self.cache, state, n_tokens=wanted.dispatch, n_kv=n_kv, aligned=True
            )
            return out, state
        draft_params = None if wanted.draft is None else wanted.draft.params
        out, self.cache, state, self.drafter, steps = speculative.advance(
            self.model.params, self.cache, state, self.drafter, draft_params, n_rounds=n_rounds, n_kv=n_kv
        )
        self.timings.steps += int(steps)
        return out, state

    def _make_room(self, n_tokens: int) -> None:
        """Shift the rows whose context could not take `n_tokens` more."""
        limit = self._limit()
        if limit is None:
            return
        for row in range(len(self.prompts)):
            self.cache, forgotten = make_room(self.cache, row, n_tokens, limit, self.wanted)
            self.forgotten[row] += forgotten
            if forgotten and self.wanted.draft is not None:
                # a drafter only guesses, and may have a lossy past
                lossy = dataclasses.replace(self.wanted, context_shift="lossy")
                cache, _ = make_room(self.drafter.cache, row, n_tokens, limit, lossy)
                self.drafter = self.drafter.replace(cache=cache)
        self.filled = limit

    def _limit(self) -> int | None:
        """Tokens that a row's context may hold."""
        cells = self.cache.n_cells
        if cells is None:
            return None
        return cells if self.wanted.n_ctx is None else min(cells, self.wanted.n_ctx)

    def _room(self) -> list[int]:
        """Tokens each row may write: the last one never enters the cache."""
        limit = self._limit()
        if limit is None or self.wanted.context_shift != "off":
            return [self.wanted.max_tokens] * len(self.positions)
        return [min(self.wanted.max_tokens, limit - p + 1) for p in self.positions]

    def _add(self, clock: Clock) -> None:
        self.timings.decode += clock.run
        self.timings.compile += clock.compile

    def _result(self, row: int, reason: str) -> Result:
        text = self.texts[row]
        return Result(
            index=self.first_index + row,
            text=text.text,
            tokens=text.tokens,
            prompt_tokens=len(self.prompts[row]),
            finish_reason=reason,
            timings=self.timings,
            cache_bytes={child: sum(layers.values()) for child, layers in state_bytes(self.cache).items()},
        )


def make_room(cache: Cache, row: int, n_tokens: int, limit: int, wanted: Settings) -> tuple[Cache, int]:
    """Shift a sequence until `n_tokens` more fit in `limit`: (cache, tokens forgotten).

    Consumes the cache when it shifts.
    """
    held, lossy, forgotten = int(_ends(cache)[row]) + 1, wanted.context_shift == "lossy", 0
    while held + n_tokens > limit and held > 0:
        keep = min(wanted.keep, held // 2)
        forget = max((held - keep) // 2, 1)
        cache = _shift(cache, row, keep, forget, lossy=lossy)
        held, forgotten = held - forget, forgotten + forget
    return cache, forgotten


_ends = jax.jit(positions_max)


@partial(jax.jit, static_argnames="lossy", donate_argnums=0)
def _shift(cache: Cache, row: int, keep: int, forget: int, *, lossy: bool) -> Cache:
    """Forget [keep, keep + forget) of one sequence, and close the gap."""
    cache, _ = seq_rm(cache, row, keep, keep + forget, lossy)
    return seq_add(cache, row, keep + forget, -1, -forget, lossy)[0]


class _RowText:
    """The text of one row as its tokens come in, cut at the first stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stop = StopStrings(stop)
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = self.finished = False

    def push(self, tokens: Sequence[int], ends_with_stop: bool) -> tuple[str, tuple[int, ...]]:
        """New text, and the tokens up to a stop string. The text of a stop token is left out."""
        emitted, taken = "", 0
        for k, token in enumerate(tokens):
            self.tokens.append(token)
            taken += 1
            if self._stream is None or (ends_with_stop and k == len(tokens) - 1):
                continue
            new, self.stopped = self._stop.push(self._stream.push(token))
            emitted += new
            if self.stopped:
                break
        self.text += emitted
        return emitted, tuple(tokens[:taken])

    def finish(self) -> str:
        """The text held back so far: half a character, half a stop string."""
        self.finished = True
        if self._stream is None or self.stopped:
            return ""
        rest, self.stopped = self._stop.push(self._stream.finish())
        rest += "" if self.stopped else self._stop.finish()
        self.text += rest
        return rest


def _tokenizer_or_none(model: Model) -> Tokenizer | None:
    try:
        return model.tokenizer
    except TokenizerError:
        return None
