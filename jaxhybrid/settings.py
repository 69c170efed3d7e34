"""What goes into a generation and comes out: the model, settings, pieces and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax

from jaxhybrid.errors import UsageError
from jaxhybrid.params import Params
from jaxhybrid.text import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Model:
    """Parameters with their tokenizer, which lies in `folder`. load_seconds: how long reading them took."""

    params: Params
    folder: Path
    load_seconds: float

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when first needed: token ids work without one."""
        return Tokenizer.load(self.folder)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))


@dataclass(frozen=True)
class Settings:
    """How to generate; sizes in tokens.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and penalties of 1, 0 and 0 change nothing. seed:
    prompt i draws with seed + i. stop: strings that end the text and are not part of it. stop_tokens: ids
    that do so too. ignore_eos: go on beyond the model's own ends. n_ctx: cells a sequence, None for what is
    needed. n_ubatch: tokens of a step of the prompt. batch_size: sequences side by side. dispatch: tokens
    between two looks at the text.
    ngram, draft: guess the next `draft_tokens` tokens, by what followed the same up to `ngram` tokens
    before (0: not), or by a smaller model of the same vocabulary; the text stays the same. context_shift:
    when a context is full, forget its older half but for the first `keep` tokens: off, exact (only where no
    recurrent state stands in the way), or lossy.
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
    ngram: int = 0
    draft: Model | None = None
    draft_tokens: int = 4
    context_shift: str = "off"
    keep: int = 4

    def __post_init__(self) -> None:
        for name in ("max_tokens", "n_ubatch", "batch_size", "dispatch", "draft_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("ngram", "keep"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}: {getattr(self, name)} must be at least 0")
        if self.ngram and self.draft is not None:
            raise UsageError("ngram: cannot be used together with a draft model; choose one")
        if self.context_shift not in ("off", "exact", "lossy"):
            raise UsageError(f"context_shift: {self.context_shift!r} is not one of off, exact, lossy")
        if self.n_ctx is not None and self.n_ctx < 1:
            raise UsageError(f"n_ctx: {self.n_ctx} must be at least 1")

    @property
    def n_rollback(self) -> int:
        """How far a cache must be able to go back."""
        return self.draft_tokens if self.ngram or self.draft is not None else 0

    def check_model(self, model: Model) -> None:
        """UsageError where the model cannot do what is asked for."""
        hp = model.params.hparams
        if self.context_shift == "exact" and hp.is_hybrid:
            raise UsageError(
                "context_shift: this model has recurrent layers, whose state would remember what attention "
                "forgets; ask for 'lossy' (--context-shift lossy) to accept that, or raise n_ctx (--ctx)"
            )
        if self.draft is not None and self.draft.params.hparams.vocab_size != hp.vocab_size:
            raise UsageError(
                f"draft: its vocabulary has {self.draft.params.hparams.vocab_size} tokens, the model's "
                f"{hp.vocab_size}; a draft model needs the same tokenizer"
            )


@dataclass
class Timings:
    """Seconds, without compiling but for `compile`; the rows of a batch share them.

    steps: of the model after the prompt, with a drafter fewer than tokens; 0 without one.
    """

    prompt: float = 0.0
    decode: float = 0.0
    compile: float = 0.0
    steps: int = 0


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
