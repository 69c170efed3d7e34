"""config.json: reading it in both spellings of infinity, and writing JSON atomically."""

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxhybrid.errors import CheckpointError

_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_config(folder: Path) -> dict[str, Any]:
    """Reads `folder`/config.json.

    Non-finite numbers may be bare (`Infinity`) or wrapped (`{"__float__": "Infinity"}`, the
    spelling of transformers 5); both become floats, at any depth.

    Raises CheckpointError when the folder or the file is missing, when the file is not UTF-8 JSON
    or not an object, and when `model_type` is absent or not a string.
    """
    path = Path(folder) / "config.json"
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: folder not found; give the folder that holds config.json")
    if not path.is_file():
        raise CheckpointError(
            f"{path}: file not found (the folder holds {holds(folder)}); give a .gguf file, or a "
            "Hugging Face model folder, with config.json and .safetensors files"
        )
    remedy = "download the file again"
    config = parse_json(read_bytes(path), str(path), remedy, object_hook=_unwrap_float)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: the top level is {_kind(config)}, expected an object; {remedy}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        found = "is missing" if "model_type" not in config else f"is {_kind(model_type)}"
        raise CheckpointError(
            f"{path}: model_type {found}, expected a string; "
            'add the name of the model family, such as "model_type": "llama"'
        )
    return config


def write_json(path: Path, obj: Any) -> None:
    """Writes `obj` as strict JSON: all of it or, on any error, nothing.

    Non-finite floats are wrapped as `{"__float__": "Infinity"}`, which `read_config` undoes.
    Raises CheckpointError when the file cannot be written.
    """
    text = json.dumps(_wrap_floats(obj), indent=2, allow_nan=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a name in the folder of `path`; what is written there becomes `path` on success.

    Raises CheckpointError for an OSError inside; an existing `path` is then left as it was.
    """
    path = Path(path)
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        os.chmod(temporary, mode)  # a library may have made it private
        # Opened for writing, since some systems refuse fsync on a read-only descriptor.
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "choose an existing folder with write permission and free space"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_bytes(path: Path) -> bytes:
    """The whole file; CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that the system refuses to read."""
    remedy = "check the path" if isinstance(error, FileNotFoundError) else "check its permissions"
    return CheckpointError(f"{path}: cannot be read ({error.strerror or error}); {remedy}")


def parse_json(data: bytes, where: str, remedy: str, **hooks: Any) -> Any:
    """`json.loads` of UTF-8 bytes, with every failure as a one-line CheckpointError."""
    try:
        return json.loads(data.decode("utf-8-sig"), **hooks)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        problem = f"not valid JSON (line {error.lineno}, column {error.colno}: {error.msg})"
    except RecursionError:
        problem = "not usable JSON (nested too deeply)"
    except ValueError as error:  # numbers of thousands of digits, and what the hooks refuse
        problem = f"not usable JSON ({error})"
    raise CheckpointError(f"{where}: {problem}; {remedy}")


def holds(folder: Path) -> str:
    """What a folder holds, for error messages: up to four names and the number of the others."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        return f"nothing readable: {error.strerror or error}"
    if not names:
        return "nothing"
    others = f" and {len(names) - 4} others" if len(names) > 4 else ""
    return ", ".join(show(name) for name in names[:4]) + others


def show(text: str) -> str:
    """A name from a file as one short line: control characters escaped, length bounded."""
    quoted = repr(text)
    return quoted if len(quoted) <= 120 else f"{quoted[:90]}...{quoted[-20:]}"


def _unwrap_float(pairs: dict[str, Any]) -> Any:
    if len(pairs) == 1 and isinstance(pairs.get("__float__"), str):
        return _FLOATS.get(pairs["__float__"], pairs)
    return pairs


def _wrap_floats(obj: Any) -> Any:
    if isinstance(obj, float) and not math.isfinite(obj):
        name = "NaN" if math.isnan(obj) else "Infinity" if obj > 0 else "-Infinity"
        return {"__float__": name}
    if isinstance(obj, dict):
        return {key: _wrap_floats(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_wrap_floats(value) for value in obj]
    return obj


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
