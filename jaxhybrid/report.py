"""What the commands say on standard error: loading progress and figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from jaxhybrid.engine import load
from jaxhybrid.settings import Model, Result
from jaxhybrid.units import readable_size
from jaxhybrid.weights import auto_dtype, format_name

SHOW_AFTER = 1.0  # seconds of loading before a progress bar is worth its place


def load_model(
    path: str | None,
    dtype: str = "auto",
    n_ctx: int | None = None,
    quantize: str | None = None,
    adapter: str | None = None,
) -> Model:
    """Load with a progress bar on a terminal when it takes long. dtype: "auto" is that of `auto_dtype`."""
    chosen = auto_dtype() if dtype == "auto" else jnp.dtype(dtype)
    with progress_bar("loading") as progress:
        return load(path, dtype=chosen, quantize=quantize, n_ctx=n_ctx, adapter=adapter, progress=progress)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields what to call with (parameters done, all of them); a bar on a terminal when it takes long."""
    began = time.perf_counter()
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what)
    live = False

    def progress(done: int, total: int) -> None:
        nonlocal live
        if not live and sys.stderr.isatty() and time.perf_counter() - began > SHOW_AFTER:
            bar.start()
            live = True
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        if live:
            bar.stop()


def report(model: Model, results: Sequence[Result], computed: int | None = None) -> str:
    """One line: tokens and tokens/s of prompts and decoding, seconds of compiling, bytes held.

    computed: prompt tokens that were run through the model, where a cache held the others.
    """
    timings = list({id(r.timings): r.timings for r in results}.values())
    prompt, decode = sum(t.prompt for t in timings), sum(t.decode for t in timings)
    read = sum(r.prompt_tokens for r in results) if computed is None else computed
    written = sum(len(r.tokens) for r in results)
    parts = [
        f"prompt {read} tokens, {_rate(read, prompt)}",
        f"decode {written} tokens, {_rate(written, decode)}",
        f"compile {sum(t.compile for t in timings):.1f} s",
        f"load {model.load_seconds:.1f} s",
        f"{format_name(model.params) or ''} weights {readable_size(model.weight_bytes)}".lstrip(),
    ]
    steps = sum(t.steps for t in timings)
    if steps:  # rows of a batch share the steps
        parts.insert(2, f"{written / len(results) / steps * len(timings):.1f} tokens a step")
    largest: dict[str, int] = {}
    for result in results:
        for child, size in result.cache_bytes.items():
            largest[child] = max(size, largest.get(child, 0))
    parts += [f"{child} cache {readable_size(size)}" for child, size in largest.items()]
    return " | ".join(parts)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f}/s" if seconds > 0 else "-/s"
