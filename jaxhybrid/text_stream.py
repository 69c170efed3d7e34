"""Text that arrives token by token: never half a character, cut at stop strings."""

from __future__ import annotations

from collections.abc import Iterable

from jaxhybrid.errors import UsageError
from jaxhybrid.text import BROKEN, Tokenizer


class TextStream:
    """Detokenizes one token at a time; what it returns adds up to `Tokenizer.decode` of all.

    The text of a token depends on the tokens around it (a character in several tokens, a space that
    only a first token loses), so each piece is the difference of two decodings of a short window.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens of the last piece, then those still held back
        self._said = 0  # tokens of the window whose text is out

    def push(self, token: int) -> str:
        """The text that has become certain with this token; often "", for part of a character."""
        if not self._tokenizer.shows(token):
            return ""
        self._window.append(token)
        # one wrong byte makes the whole run of raw bytes wrong, so a run is held until it ends
        if self._tokenizer.is_byte(token):
            return ""
        new = self._new_text()
        if not new or new.endswith(BROKEN):
            return ""
        self._window, self._said = self._window[self._said :], len(self._window) - self._said
        return new

    def finish(self) -> str:
        """The rest: what is still held back will not become a character any more."""
        new = self._new_text()
        self._window, self._said = [], 0
        return new

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._said])
        return self._tokenizer.decode(self._window)[len(before) :]


class StopStrings:
    """Cuts text at the stop string that is complete first, however the text is cut into pieces."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        if "" in self._strings:
            raise UsageError("a stop string is empty: it would stop before the first token")
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that cannot be part of a stop string any more, whether a stop string was found)."""
        self._held += text
        found = [
            (start + len(stop), start) for stop in self._strings if (start := self._held.find(stop)) >= 0
        ]
        if found:
            text, self._held = self._held[: min(found)[1]], ""
            return text, True
        keep = max((_overlap(self._held, stop) for stop in self._strings), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
