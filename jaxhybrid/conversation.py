"""A conversation: the cache keeps what was said, only new tokens are computed, turns can be taken back."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp

from jaxhybrid.cache import (
    Cache,
    Snapshot,
    checkpoint,
    create_cache,
    restorable_positions,
    rewind,
    seq_pos_max,
    seq_rm,
)
from jaxhybrid.clock import Clock
from jaxhybrid.command import until_interrupted
from jaxhybrid.errors import JaxHybridError, UsageError
from jaxhybrid.generation import Generation, common_length, make_room, prefill
from jaxhybrid.settings import Model, Result, Settings, Timings

DEFAULT_CONTEXT = 4096
MAX_SNAPSHOTS = 32


class Conversation:
    """Turns, and a cache that holds the first `len(held)` tokens of them.

    With `chat`, turns are messages that the model's template renders; without, each text is appended to
    the tokens so far. When a new rendering does not continue what is held, the cache is taken back to the
    last place before the difference whose state is known, and only the rest is computed. snapshots: by
    number of tokens, taken before each turn and after its message, which is where the renderings of templates
    that leave out old reasoning part. forgotten: tokens that context shifts dropped.
    """

    def __init__(
        self, model: Model, settings: dict[str, Any], system: str | None = None, chat: bool = True
    ) -> None:
        self.model, self.chat = model, chat
        context = model.params.hparams.context_length or DEFAULT_CONTEXT
        if settings["n_ctx"] is None:
            settings = settings | {"n_ctx": min(context, DEFAULT_CONTEXT)}
        self.settings = Settings(**settings)
        self.settings.check_model(model)
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        if chat:  # a template that is missing or refuses is named before anything is said
            self._prompt([*self.messages, {"role": "user", "content": "Hello"}], "")
        self.tokens: list[int] = []  # of the whole text, without a template
        self.turns: list[int] = []  # how many messages or tokens there were before each turn
        self.computed = 0  # tokens run through the model by the last prompt
        self.forget()

    @property
    def n_ctx(self) -> int:
        return self.settings.n_ctx or DEFAULT_CONTEXT

    def forget(self) -> None:
        """Start from an empty cache; what was said stays."""
        params = self.model.params
        self.cache: Cache | None = create_cache(
            params.hparams, self.n_ctx, dtype=params.dtype, n_rollback=self.settings.n_rollback
        )
        self.held: list[int] = []
        self.snapshots: dict[int, Snapshot] = {}
        self.forgotten = 0

    # ------------------------------------------------------------------------------------- turns

    def say(self, text: str, show: Any) -> Result:
        """One turn: `show(text)` is called with each new piece; the reply is remembered."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._prompt(messages, text)
        self._meet(prompt)
        assert self.cache is not None
        new = prompt[len(self.held) :]
        self._check_room(prompt, new)
        self.computed = len(new)
        timings, text_so_far, tokens = Timings(), "", []
        finish_reason, cache_bytes = "interrupted", {}
        self._remember(self.cache, len(self.held))
        boundary = self._boundary(messages, prompt)
        rows = None
        cache, self.cache = self.cache, None  # it is consumed; what fails midway has none left
        try:
            if self.settings.context_shift != "off" and self.model.params.hparams.attention_layer_indices:
                cache, forgotten = make_room(cache, 0, len(new), self.n_ctx, self.settings)
                self._shifted(forgotten)
            with Clock() as clock:
                if len(self.held) < boundary < len(prompt):
                    _, cache = prefill(self.model, cache, [prompt[len(self.held) : boundary]], self.settings)
                    self._remember(cache, boundary)
                    new = prompt[boundary:]
                logits, cache = prefill(self.model, cache, [new], self.settings)
            timings.prompt, timings.compile = clock.run, clock.compile
            if boundary == len(prompt):
                self._remember(cache, len(prompt))
            filled = int(seq_pos_max(cache, 0)) + 1
            rows = Generation(self.model, cache, [prompt], [filled], 0, self.settings, timings)
            for piece in until_interrupted(rows.run(logits)):
                text_so_far += piece.text
                tokens.extend(piece.tokens)
                if piece.result is not None:
                    finish_reason = piece.result.finish_reason
                    cache_bytes = piece.result.cache_bytes
                    self._shifted(rows.forgotten[0])
                    self._keep(rows.cache, prompt + tokens)
                show(piece.text)
        except KeyboardInterrupt:
            if self.cache is None and rows is not None and not rows.forgotten[0]:
                self._keep(rows.cache, prompt + tokens)
            if not tokens:
                raise
        finally:
            if self.cache is None:
                self.forget()
        self.turns.append(len(self.messages) if self.chat else len(self.tokens))
        self.messages = [*messages, {"role": "assistant", "content": text_so_far}]
        self.tokens = prompt + tokens
        return Result(0, text_so_far, tokens, len(prompt), finish_reason, timings, cache_bytes)

    def undo(self) -> None:
        """Take the last turn back. UsageError when there is none."""
        if not self.turns:
            raise UsageError("there is no turn to take back")
        n = self.turns.pop()
        if self.chat:
            self.messages = self.messages[:n]
        else:
            self.tokens = self.tokens[:n]

    def edit(self, text: str, show: Any) -> Result:
        """Say `text` instead of the last turn; what came before it is not computed again."""
        before = (list(self.turns), self.messages, self.tokens)
        self.undo()
        try:
            return self.say(text, show)
        except BaseException:  # refused, or Ctrl-C before the first token
            self.turns, self.messages, self.tokens = before
            raise

    def last_text(self) -> str:
        """What was said in the last turn. UsageError when there is none, or no messages are kept."""
        if not self.turns or not self.chat:
            raise UsageError("there is no message to edit")
        return self.messages[self.turns[-1]]["content"]

    def fork(self) -> Conversation:
        """A copy that goes its own way. The cache is copied, since turns consume it; snapshots are shared."""
        other = copy.copy(self)
        for name in ("messages", "tokens", "turns", "held"):
            setattr(other, name, list(getattr(self, name)))
        other.snapshots = dict(self.snapshots)
        other.cache = jax.tree.map(jnp.copy, self.cache)
        return other

    # --------------------------------------------------------------------------------- the cache

    def _prompt(self, messages: list[dict[str, str]], text: str) -> list[int]:
        if self.chat:
            return self.model.tokenizer.encode_chat(messages)
        prompt = self.tokens + self.model.tokenizer.encode(text)
        if not prompt:
            raise UsageError("the prompt is empty: it has no tokens to continue from")
        return prompt

    def _boundary(self, messages: list[dict[str, str]], prompt: list[int]) -> int:
        """How many tokens of the prompt are the messages alone, before what makes the model reply."""
        if self.chat:
            with suppress(JaxHybridError):  # some templates refuse to end with a message
                said = self.model.tokenizer.encode_chat(messages, add_generation_prompt=False)
                return common_length(said, prompt)
        return len(prompt)

    def _meet(self, prompt: list[int]) -> None:
        """Take the cache back until it holds less than the prompt and nothing else."""
        common = common_length(self.held, prompt[:-1])
        if self.cache is None or (common < len(self.held) and not self._take_back(common)):
            self.forget()

    def _take_back(self, n: int) -> bool:
        """Take the cache back to at most `n` tokens; False when there is no such place."""
        cache = self.cache
        if cache is None or self.forgotten:
            return False
        there = {p + 1 for p in restorable_positions(cache, 0)}
        for length in sorted((there | self.snapshots.keys()), reverse=True):
            if not 0 < length <= n:
                continue
            if length in there:
                cache, ok = seq_rm(cache, 0, length, -1)
                if not bool(ok):
                    continue
            else:
                try:
                    cache = rewind(cache, 0, self.snapshots[length])
                except JaxHybridError:
                    continue
            self.cache = cache
            self.held = self.held[:length]
            self.snapshots = {k: s for k, s in self.snapshots.items() if k <= length}
            return True
        return False

    def _remember(self, cache: Cache, length: int) -> None:
        """A snapshot where only a state leads back."""
        if cache.recurrent is None or self.forgotten or length == 0:
            return
        self.snapshots[length] = checkpoint(cache, 0)
        while len(self.snapshots) > MAX_SNAPSHOTS:
            del self.snapshots[min(self.snapshots)]

    def _shifted(self, forgotten: int) -> None:
        if forgotten:
            self.forgotten += forgotten
            self.snapshots = {}

    def _keep(self, cache: Cache, tokens: list[int]) -> None:
        """Remember a cache as far as it holds a prefix of `tokens`: a stop string or Ctrl-C may come after it
        has run past them."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):  # interrupted while it was consumed
            return
        filled = int(seq_pos_max(cache, 0)) + 1 + self.forgotten
        unknown = [-1] * (filled - len(tokens))
        self.cache, self.held = cache, tokens[:filled] + unknown
        if unknown and not self._take_back(len(tokens)):
            self.cache = None

    def _check_room(self, prompt: list[int], new: list[int]) -> None:
        if self.model.params.hparams.is_recurrent:
            return
        shifts = self.settings.context_shift != "off"
        needed = len(new) + self.settings.keep if shifts else len(prompt)
        if needed > self.n_ctx:
            raise UsageError(
                f"the conversation has {len(prompt)} tokens, the context holds {self.n_ctx}; "
                "take a turn back, start again, or raise --ctx"
            )
