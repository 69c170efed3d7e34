"""From a folder and a prompt to text: `load`, `generate`, `stream`."""

from __future__ import annotations

import importlib.resources
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid import cache as memory
from jaxhybrid import token_loop as loop
from jaxhybrid.batch import Batch
from jaxhybrid.cache import Cache, create_cache
from jaxhybrid.checkpoint.hub import resolve_model
from jaxhybrid.checkpoint.load import Progress, load_params
from jaxhybrid.clock import Clock
from jaxhybrid.driver import context_bucket, decode
from jaxhybrid.errors import TokenizerError, UsageError
from jaxhybrid.params import Params
from jaxhybrid.sampling import make_sampling
from jaxhybrid.text import Tokenizer
from jaxhybrid.text_stream import StopStrings, TextStream

Prompt = str | Sequence[int]
FINISH_REASONS = {
    loop.STOPPED: "stop",
    loop.LENGTH: "length",
    loop.BROKEN: "not_finite",
    loop.FULL: "length",
}


@dataclass(frozen=True)
class Model:
    """Parameters with their tokenizer. `load_seconds` is how long reading them took."""

    params: Params
    folder: Path
    load_seconds: float

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when first needed: token ids work without one."""
        return Tokenizer.load(self.folder)

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))


@dataclass(frozen=True)
class Settings:
    """How to generate. Times in seconds, sizes in tokens; a scalar holds for every prompt.

    temperature 0 is greedy. seed: prompt i draws with seed + i. stop: strings that end the text and
    are not part of it. stop_tokens: ids that do so too. n_ctx: cells a sequence, None for what is
    needed. batch_size: sequences side by side. dispatch: tokens between two looks at the text.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    n_ctx: int | None = None
    n_ubatch: int = 512
    batch_size: int = 16
    dispatch: int = 8

    def __post_init__(self) -> None:
        for name in ("max_tokens", "n_ubatch", "batch_size", "dispatch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.n_ctx is not None and self.n_ctx < 1:
            raise UsageError(f"n_ctx: {self.n_ctx} must be at least 1")


@dataclass
class Timings:
    """Seconds, without compiling but for `compile`; the rows of a batch share them."""

    prompt: float = 0.0
    decode: float = 0.0
    compile: float = 0.0


@dataclass
class Result:
    """What one prompt gave. finish_reason: stop, length, not_finite, or interrupted."""

    index: int
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    timings: Timings
    cache_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """New text and tokens of prompt `index`; `result` is set on its last piece.

    timings: those of its batch, which go on counting until the batch ends.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    timings: Timings
    result: Result | None = None


def load(path: str | Path | None = None, *, dtype: Any = None, progress: Progress | None = None) -> Model:
    """A model from a Hugging Face folder or hub id, or the small one inside this package for None.

    dtype: of the weights, None for that of the files.
    """
    began = time.perf_counter()
    folder = embedded_folder() if path is None else resolve_model(str(path))
    params = load_params(folder, dtype, progress=progress)
    jax.block_until_ready(params)
    return Model(params, folder, time.perf_counter() - began)


def embedded_folder() -> Path:
    """Where the model inside this package lies."""
    return Path(str(importlib.resources.files("jaxhybrid") / "models" / "tiny"))


def generate(model: Model, prompts: Prompt | Sequence[Prompt], **settings: Any) -> Any:
    """Continue one prompt (a Result) or several side by side (a list of Results, in order).

    A prompt is text, or token ids. Keywords are the fields of `Settings`.
    """
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
    several: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[assignment, list-item]
    results = [p.result for p in stream(model, several, **settings) if p.result is not None]
    results.sort(key=lambda r: r.index)
    return results[0] if single else results


def stream(model: Model, prompts: Sequence[Prompt], **settings: Any) -> Iterator[Piece]:
    """The same as `generate`, piece by piece, as the text appears.

    Closing the iterator ends the generation. Raises before anything is computed when a prompt is
    empty or does not fit.
    """
    wanted = Settings(**settings)
    ids = [encode_prompt(model, p, i) for i, p in enumerate(prompts)]
    _check_lengths(model, ids, wanted)
    return _stream(model, ids, wanted)


def _stream(model: Model, ids: list[list[int]], wanted: Settings) -> Iterator[Piece]:
    for first in range(0, len(ids), wanted.batch_size):
        group = ids[first : first + wanted.batch_size]
        cells = wanted.n_ctx or max(len(p) for p in group) + wanted.max_tokens
        cache = create_cache(model.params.hparams, cells, len(group), dtype=model.params.dtype)
        timings = Timings()
        with Clock() as clock:
            logits, cache = prefill(model, cache, group, wanted)
            jax.block_until_ready(logits)
        timings.prompt, timings.compile = clock.run, clock.compile
        session = Session(model, cache, group, [len(p) for p in group], first, wanted, timings)
        yield from session.run(logits)


def encode_prompt(model: Model, prompt: Prompt, index: int = 0) -> list[int]:
    """Token ids of a prompt; UsageError when there are none or one is outside the vocabulary."""
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
    if not ids:
        raise UsageError(f"prompt {index + 1} is empty: it has no tokens to continue from")
    vocab = model.params.hparams.vocab_size
    for token in ids:
        if not 0 <= token < vocab:
            raise UsageError(
                f"prompt {index + 1}: token {token} is outside the model's vocabulary of {vocab}; "
                "the tokenizer and the weights do not belong together"
            )
    return ids


def _check_lengths(model: Model, ids: list[list[int]], wanted: Settings) -> None:
    hp = model.params.hparams
    if wanted.n_ctx is not None and not hp.is_recurrent:
        for i, prompt in enumerate(ids):
            if len(prompt) > wanted.n_ctx:
                raise UsageError(
                    f"prompt {i + 1} has {len(prompt)} tokens, the context holds {wanted.n_ctx}; "
                    "raise n_ctx (--ctx) or shorten the prompt"
                )
    longest = max((len(p) for p in ids), default=0)
    if hp.context_length is not None and longest > hp.context_length:
        warnings.warn(
            f"a prompt of {longest} tokens is longer than the {hp.context_length} the model was "
            "trained on; expect poor text",
            stacklevel=3,
        )


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
            cache = memory.fork(cache, source, (i,))
    return logits[np.asarray([unique.index(o) for o in owner])], cache


class Session:
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
        filled = max(self.positions)
        n_cells = self.cache.n_cells
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
            filled += wanted.dispatch
            with Clock() as clock:
                out, self.cache, state = loop.advance(
                    self.model.params,
                    self.cache,
                    state,
                    n_tokens=wanted.dispatch,
                    n_kv=None if n_cells is None else context_bucket(filled, n_cells),
                    aligned=True,
                )
                written, finish = np.asarray(out), np.asarray(state.finish)
            self._add(clock)

    def _room(self) -> list[int]:
        """Tokens each row may write: the last one never enters the cache."""
        cells = self.cache.n_cells
        if cells is None:
            return [self.wanted.max_tokens] * len(self.positions)
        limit = cells if self.wanted.n_ctx is None else min(cells, self.wanted.n_ctx)
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
            cache_bytes={
                child: sum(layers.values()) for child, layers in memory.state_bytes(self.cache).items()
            },
        )


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
