"""What the commands share: exit codes, errors in one line, the compilation cache, an orderly end."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jaxhybrid.errors import JaxHybridError, UsageError
from jaxhybrid.user_cache import user_cache

T = TypeVar("T")
INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C


def run_command(body: Callable[[], int], debug: bool) -> int:
    """The exit code of `body`: its own, 1 for an error, 2 for wrong usage; errors are told in one line."""
    warnings.showwarning = _show_warning
    for name in ("stdout", "stderr"):  # None where the caller has closed it
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
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


def until_interrupted(items: Iterator[T]) -> Iterator[T]:
    """The items; KeyboardInterrupt at Ctrl-C, at the latest after the next one.

    Where Python runs a callback of a library, it drops the exception that its own handler raises.
    """
    if threading.current_thread() is not threading.main_thread():  # signals go elsewhere
        yield from items
        return
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for item in items:
            yield item
            if received:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


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


def read_text(name: str) -> str:
    """The text of a UTF-8 file, or of standard input for "-"; else UsageError in one line."""
    where = "standard input" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}; check the path") from error
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError):  # a path with a null byte
            raise UsageError(f"{where!r}: no file has such a name ({error})") from error
        raise UsageError(
            f"{where}: byte {error.start} (0x{error.object[error.start]:02x}) is not UTF-8; convert it first"
        ) from error


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


def make_callable(module: str, where: str) -> None:
    """Importing a command's module rebinds the package's function of that name; calling it must go on
    working. where: the module that has the function, imported when it is called."""
    name = module.rpartition(".")[2]

    class CallableModule(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(where), name)(*args, **kwargs)

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
