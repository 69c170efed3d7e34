"""Wall time of a phase, with the time that XLA compiled in it told apart."""

from __future__ import annotations

import time

import jax.monitoring

_spans: list[tuple[float, float]] = []
_registered = False


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    if event.startswith("/jax/core/compile/"):
        end = time.perf_counter()
        _spans.append((end - duration_secs, end))


class Clock:
    """Use as a context manager: `run` and `compile` are seconds, together the wall time."""

    def __init__(self) -> None:
        self.run = 0.0
        self.compile = 0.0

    def __enter__(self) -> Clock:
        global _registered
        if not _registered:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            _registered = True
        self._start = time.perf_counter()
        self._first_span = len(_spans)
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._start
        spent, reached = 0.0, self._start
        for begin, end in sorted(_spans[self._first_span :]):  # they nest: count each moment once
            if end > reached:
                spent += end - max(begin, reached)
                reached = end
        del _spans[self._first_span :]
        self.compile += min(spent, wall)
        self.run += wall - min(spent, wall)
