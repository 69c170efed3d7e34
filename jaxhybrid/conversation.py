"""A conversation on a terminal: the cache keeps what was said, only new tokens are computed."""

from __future__ import annotations

import sys
from typing import Any

from jaxhybrid.cache import Cache, create_cache, seq_pos_max
from jaxhybrid.clock import Clock
from jaxhybrid.engine import Model, Result, Session, Settings, Timings, prefill
from jaxhybrid.errors import JaxHybridError, UsageError
from jaxhybrid.report import report

DEFAULT_CONTEXT = 4096


class Conversation:
    """Messages, and a cache that holds `held` tokens of them.

    The cache is a value: a turn that goes wrong, or whose rendering does not continue what is held,
    starts again from an empty one.
    """

    def __init__(self, model: Model, settings: dict[str, Any], system: str | None) -> None:
        self.model = model
        context = model.params.hparams.context_length or DEFAULT_CONTEXT
        if settings["n_ctx"] is None:
            settings = settings | {"n_ctx": min(context, DEFAULT_CONTEXT)}
        self.settings = Settings(**settings)
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self.computed = 0  # tokens run through the model by the last prompt
        self._forget()

    def _forget(self) -> None:
        n_ctx = self.settings.n_ctx or DEFAULT_CONTEXT
        params = self.model.params
        self.cache: Cache | None = create_cache(params.hparams, n_ctx, dtype=params.dtype)
        self.held: list[int] = []

    def say(self, text: str, show: Any) -> Result:
        """One turn: `show(text)` is called with each new piece; the reply is remembered."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.model.tokenizer.encode_chat(messages)
        n_ctx, hp = self.settings.n_ctx, self.model.params.hparams
        if n_ctx is not None and not hp.is_recurrent and len(prompt) > n_ctx:
            raise UsageError(
                f"the conversation has {len(prompt)} tokens, the context holds {n_ctx}; "
                "start again or raise --ctx"
            )
        if self.cache is None or self.held != prompt[: len(self.held)] or self.held == prompt:
            self._forget()
        assert self.cache is not None
        new = prompt[len(self.held) :]
        self.computed = len(new)
        timings, text_so_far, tokens = Timings(), "", []
        finish_reason, cache_bytes = "interrupted", {}
        cache, self.cache = self.cache, None  # it is consumed; what fails midway has none left
        try:
            with Clock() as clock:
                logits, cache = prefill(self.model, cache, [new], self.settings)
            timings.prompt, timings.compile = clock.run, clock.compile
            session = Session(self.model, cache, [prompt], [len(prompt)], 0, self.settings, timings)
            for piece in session.run(logits):
                text_so_far += piece.text
                tokens.extend(piece.tokens)
                if piece.result is not None:
                    finish_reason = piece.result.finish_reason
                    cache_bytes = piece.result.cache_bytes
                    self._keep(session.cache, prompt + tokens)
                show(piece.text)
        except KeyboardInterrupt:
            if not tokens:
                raise
        finally:
            if self.cache is None:
                self._forget()
        self.messages = [*messages, {"role": "assistant", "content": text_so_far}]
        return Result(0, text_so_far, tokens, len(prompt), finish_reason, timings, cache_bytes)

    def _keep(self, cache: Cache, tokens: list[int]) -> None:
        """Remember a cache if it holds a prefix of `tokens`: a stop string may have run past them."""
        filled = int(seq_pos_max(cache, 0)) + 1
        if filled <= len(tokens):
            self.cache, self.held = cache, tokens[:filled]


def converse(model: Model, settings: dict[str, Any], system: str | None, quiet: bool) -> int:
    """Talk until end of input. Ctrl-C ends a reply, and at the prompt the conversation."""
    try:
        import readline  # noqa: F401  line editing and history, where the platform has it
    except ImportError:
        pass
    conversation = Conversation(model, settings, system)
    if not quiet:
        print("Type a message. Ctrl-C ends a reply, Ctrl-D the conversation.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not text.strip():
            continue
        try:
            result = conversation.say(text, _show)
        except KeyboardInterrupt:
            print()
            continue
        except JaxHybridError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        print()
        if not quiet:
            print(report(model, [result], computed=conversation.computed), file=sys.stderr)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
