"""How likely a whole text is: perplexity, in windows or with a state that runs on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from jaxhybrid.batch import make_ubatch
from jaxhybrid.cache import clear, create_cache
from jaxhybrid.engine import encode_prompt
from jaxhybrid.errors import UsageError
from jaxhybrid.hparams import Hparams
from jaxhybrid.params import Params
from jaxhybrid.scoring import NOT_FINITE, advance, check_status, token_scores
from jaxhybrid.settings import Model, Prompt

DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text. nll: -log of its probability, in nats. n_tokens: of the text. n_scored:
    those with something before them. n_bytes: of UTF-8 that these stand for, 0 for a text of token ids.
    windows: how many. seconds: of computing, with compiling."""

    nll: float
    n_tokens: int
    n_scored: int
    n_bytes: int
    windows: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp of the mean over tokens; infinity where float64 ends."""
        mean = self.nll / self.n_scored
        return math.exp(mean) if not mean > 709 else math.inf

    @property
    def bits_per_token(self) -> float:
        return self.nll / self.n_scored / math.log(2)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None for a text of token ids."""
        return self.nll / self.n_bytes / math.log(2) if self.n_bytes else None


def perplexity(
    model: Model,
    text: Prompt,
    *,
    ctx: int | None = None,
    stride: int | None = None,
    continuous: bool = False,
    batch_size: int = 1,
    n_ubatch: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Every token of a text (or of token ids) is predicted once, from at least ctx - stride before it.

    Windows of `ctx` tokens (None: 2,048, or the model's context where that is shorter) begin with an empty
    cache, and each scores the `stride` tokens (None: half of ctx) that none before it did. Where texts begin
    with BOS, every window does, and all of the text is scored; otherwise all but its first token. continuous:
    no windows, the state runs on from the first token to the last; exact where all layers are recurrent or
    have a sliding window, and refused for others, which see no further than their cells. batch_size: windows
    side by side. n_ubatch: tokens of each that a step takes; one shape is compiled. progress: called with
    (tokens run, tokens in all). Raises UsageError.
    """
    for name, value in (("batch_size", batch_size), ("n_ubatch", n_ubatch)):
        if value < 1:
            raise UsageError(f"{name}: {value} must be at least 1")
    bos: list[int] = []
    if isinstance(text, str):
        tokens = model.tokenizer.encode_long(text)
        if model.tokenizer.bos_id is not None and model.tokenizer.adds_bos:
            bos = [model.tokenizer.bos_id]
    else:
        tokens = np.asarray(text, np.int64)
    if len(bos) + len(tokens) < 2:
        needed = "one is" if bos else "two are"
        raise UsageError(f"the text is too short, {needed} needed: tokens in it: {len(tokens)}")
    encode_prompt(model, [tokens.min(), tokens.max()])  # complains of those outside the vocabulary
    if continuous:
        if ctx is not None or stride is not None:
            raise UsageError("continuous: there are no windows; leave ctx and stride (--ctx, --stride) out")
        _check_continuous(model.params.hparams)
        windows = _Windows(tokens, bos, len(bos) + len(tokens), 1)
    else:
        windows = _windows(model.params.hparams, tokens, bos, ctx, stride)
    began = time.perf_counter()
    nll = _nll(model.params, windows, min(batch_size, windows.count), n_ubatch, progress)
    n_bytes = 0
    if isinstance(text, str):
        unscored = "" if bos else model.tokenizer.decode(tokens[:1])
        n_bytes = len(text.encode()) - len(unscored.encode())
    seconds = time.perf_counter() - began
    return Perplexity(nll, len(tokens), len(bos) + len(tokens) - 1, n_bytes, windows.count, seconds)


@dataclass(frozen=True)
class _Windows:
    """Windows of a text, `ctx` tokens each, with BOS, unless the text is shorter; the last ends with it."""

    tokens: np.ndarray
    bos: list[int]
    ctx: int
    stride: int

    @property
    def length(self) -> int:
        return min(self.ctx, len(self.bos) + len(self.tokens))

    @property
    def count(self) -> int:
        return 1 + -(-(len(self.bos) + len(self.tokens) - self.length) // self.stride)

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        """Tokens of each window, and which of them is the first to be scored."""
        width = self.length - len(self.bos)
        ends = [*range(width, len(self.tokens), self.stride), len(self.tokens)]
        for before, end in zip([0, *ends], ends, strict=False):
            new = min(end - before, self.length - 1)
            yield [*self.bos, *self.tokens[end - width : end].tolist()], self.length - new


def _windows(
    hp: Hparams, tokens: np.ndarray, bos: list[int], ctx: int | None, stride: int | None
) -> _Windows:
    if ctx is None:
        ctx = min(DEFAULT_WINDOW, hp.context_length or DEFAULT_WINDOW)
    if ctx < 2:
        raise UsageError(f"ctx: {ctx} must be at least 2: one token, and one to predict")
    stride = ctx // 2 if stride is None else stride
    if not 1 <= stride < ctx:
        raise UsageError(f"stride: {stride} must be from 1 to ctx - 1, which is {ctx - 1}")
    windows = _Windows(tokens, bos, ctx, stride)
    if hp.context_length is not None and windows.length > hp.context_length:
        warnings.warn(
            f"windows of {windows.length} tokens are longer than the {hp.context_length} that the model was "
            "trained on; expect poor figures",
            stacklevel=3,
        )
    return windows


def _check_continuous(hp: Hparams) -> None:
    """UsageError where a layer attends to all that came before."""
    everywhere = [i for i in hp.attention_layer_indices if not hp.is_windowed_layer(i)]
    if everywhere:
        raise UsageError(
            f"continuous: layer {everywhere[0]} of this model attends to everything before it, which only "
            "windows bound; leave it out (--continuous), and give ctx (--ctx) instead"
        )


# -------------------------------------------------------------------------------- computing it


def _nll(
    params: Params,
    windows: _Windows,
    rows: int,
    n_ubatch: int,
    progress: Callable[[int, int], None] | None,
) -> float:
    """-log of the probability of all that is scored, in nats."""
    width = min(n_ubatch, windows.length)
    cache = create_cache(params.hparams, windows.length, rows, dtype=params.dtype, n_ubatch=width)
    total, waiting = windows.count * windows.length, iter(windows)
    nll, bad, done = 0.0, False, 0
    while group := list(islice(waiting, rows)):
        cache = clear(cache)
        for start in range(0, windows.length, width):
            tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
            for row, (ids, _) in enumerate(group):
                part = ids[start : start + width]
                tokens[row, : len(part)], lengths[row] = part, len(part)
            ubatch = make_ubatch(tokens, lengths, outputs=np.arange(rows * width), aligned=True)
            hidden, status, cache = advance(params, cache, ubatch)
            bad |= check_status(status)
            places, targets = _predicted(group, start, width)
            if targets:  # the states of a window's beginning stay on the device
                states = np.asarray(hidden, np.float32)[places]
                nll -= float(token_scores(params, states, targets)[0].sum(dtype=np.float64))
            done += int(lengths.sum())
            if progress is not None:
                progress(done, total)
    if bad:
        warnings.warn(NOT_FINITE, stacklevel=3)
    return nll


def _predicted(group: Sequence[tuple[list[int], int]], start: int, width: int) -> tuple[list[int], list[int]]:
    """(flat places in a step [rows, width], the tokens that follow them), those that are scored."""
    places: list[int] = []
    targets: list[int] = []
    for row, (ids, first_scored) in enumerate(group):
        first, last = max(first_scored - 1, start), min(start + width, len(ids) - 1)
        places += range(row * width + first - start, row * width + last - start)
        targets += ids[first + 1 : last + 1]
    return places, targets
