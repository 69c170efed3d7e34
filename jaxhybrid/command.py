"""What the commands share: exit codes, errors in one line, the compilation cache, an orderly end."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from jaxhybrid.errors import JaxHybridError, UsageError
from jaxhybrid.user_cache import user_cache

INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C


def run_command(body: Callable[[], int], debug: bool) -> int:
    """The exit code of `body`: its own, 1 for an error, 2 for wrong usage; errors are told in one line."""
    warnings.showwarning = _show_warning
    try:
        return body()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader has gone; keep the interpreter from complaining while it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        return _report_error(error)


def leave(code: int) -> NoReturn:
    """End the process with this code."""
    if code == INTERRUPTED:
        # XLA may be compiling in other threads, which do not survive an orderly end of the interpreter
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def use_utf8(stream: Any) -> None:
    """Text of any language goes out, whatever the locale says."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="replace")


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, where the user's cache folder can be written."""
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = user_cache("xla")
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """Importing a command's module rebinds the package's function of that name; calling it must go on
    working."""

    class CallableModule(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    sys.modules[module].__class__ = CallableModule


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _report_error(error: Exception) -> int:
    """One line on standard error; the exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UsageError):
        print(f"error: {text}", file=sys.stderr)
        return 2
    if isinstance(error, JaxHybridError):
        print(f"error: {text}", file=sys.stderr)
    elif isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        print(
            "error: not enough memory; try --dtype bfloat16, a smaller --max-tokens, --ctx or --batch-size",
            file=sys.stderr,
        )
    else:
        print(f"error: {type(error).__name__}: {text[:300]} (--debug shows more)", file=sys.stderr)
    return 1
