"""Named arrays in a folder that is replaced as a whole: a killed process leaves the old or the new.

    PATH/00000003/arrays/     orbax checkpoint (PyTree of flat names)
    PATH/00000003/about.json  what it is, and size and SHA-256 of every file beside it

A version is written under a temporary name, synced to disk, renamed, and only then are older ones
removed. Readers take the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import parse_json, read_bytes

FORMAT = 1
_ABOUT, _ARRAYS = "about.json", "arrays"
_VERSION, _UNFINISHED = re.compile(r"\d{8}"), re.compile(r"\.unfinished-(\d+)-[0-9a-f]+")


def write(path: str | Path, kind: str, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Replace what is stored at `path` (a folder; made if absent) by these arrays.

    kind: what they are, checked by `read`. about: JSON. Raises CheckpointError when the folder holds
    other things or cannot be written; what was stored is then still there.
    """
    path = Path(path)
    with _as_checkpoint_error(path, "written"):
        path.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(path)
        _remove_unfinished(path)
        temporary = path / f".unfinished-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            temporary.mkdir()
            _save_arrays(temporary / _ARRAYS, {name: a for name, a in arrays.items() if a.size})
            described = {name: [str(a.dtype), list(a.shape)] for name, a in arrays.items()}
            content = {"format": FORMAT, "kind": kind, "arrays": described, "about": about}
            content["files"] = {name: list(_fingerprint(temporary / name)) for name in _files(temporary)}
            text = json.dumps(content, sort_keys=True)
            sealed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}
            (temporary / _ABOUT).write_text(json.dumps(sealed, sort_keys=True))
            _sync(temporary)
            _publish(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    for old in _versions(path)[:-1]:
        shutil.rmtree(old, ignore_errors=True)


def read(path: str | Path, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, about) of the newest version stored at `path`.

    Raises CheckpointError when there is none, it is of another kind, or any byte of it is not as written.
    """
    path = Path(path)
    with _as_checkpoint_error(path, "read"):
        newest = _newest(path, kind)
        while True:
            try:
                return _read_version(newest, path, kind)
            except Exception:
                # another process may have saved a newer version and removed this one meanwhile
                read, newest = newest, _newest(path, kind)
                if newest == read:
                    raise


def _newest(path: Path, kind: str) -> Path:
    versions = _versions(path) if path.is_dir() else []
    if not versions:
        raise CheckpointError(f"{path}: no saved {kind} here; give the folder it was saved to")
    return versions[-1]


def _read_version(folder: Path, path: Path, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    content = _opened(folder)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r} is not {FORMAT}; it was saved by another version"
        )
    if content.get("kind") != kind:
        raise CheckpointError(f"{path}: kind is {content.get('kind')!r}, not {kind!r}")
    for name, (size, digest) in content["files"].items():
        if not (folder / name).is_file() or _fingerprint(folder / name) != (size, digest):
            raise CheckpointError(f"{path}: file {name} is damaged or missing; it cannot be used")
    found = _load_arrays(folder / _ARRAYS) if any(content["files"]) else {}
    arrays = {}
    for name, (dtype, shape) in content["arrays"].items():
        a = found.get(name)
        arrays[name] = np.zeros(shape, jnp.dtype(dtype)) if a is None else np.asarray(a)
    return arrays, content["about"]


def _opened(folder: Path) -> dict[str, Any]:
    name = f"{folder.parent}: {_ABOUT}"
    sealed = parse_json(read_bytes(folder / _ABOUT), name, "it is damaged and cannot be used")
    content = sealed.get("content") if isinstance(sealed, dict) else None
    text = json.dumps(content, sort_keys=True)
    if not isinstance(content, dict) or hashlib.sha256(text.encode()).hexdigest() != sealed.get("sha256"):
        raise CheckpointError(f"{name} is damaged; it cannot be used")
    for field in ("files", "arrays", "about"):
        if content.get("format") == FORMAT and not isinstance(content.get(field), dict):
            raise CheckpointError(f"{name}: {field} is missing or no object")
    return content


def _save_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    if not arrays:
        return
    import orbax.checkpoint as ocp  # slow to import

    with _quiet(), ocp.PyTreeCheckpointer() as writer:
        writer.save(folder.absolute(), arrays)


def _load_arrays(folder: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with _quiet(), ocp.PyTreeCheckpointer() as reader:
        return reader.restore(folder.absolute())


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax reports every file through absl's log."""
    import logging

    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# ------------------------------------------------------------------------------------------- folders


def _versions(path: Path) -> list[Path]:
    """Finished versions, oldest first."""
    return sorted(p for p in path.iterdir() if _VERSION.fullmatch(p.name))


def _refuse_strangers(path: Path) -> None:
    for entry in path.iterdir():
        if not (_VERSION.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name)):
            raise CheckpointError(
                f"{path}: holds other files ({entry.name}), which are left alone; give a folder of its own"
            )


def _remove_unfinished(path: Path) -> None:
    """What killed processes left; those that still run are left to their work."""
    for entry in path.iterdir():
        match = _UNFINISHED.fullmatch(entry.name)
        if match and not _runs(int(match[1])):
            shutil.rmtree(entry, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _publish(temporary: Path, path: Path) -> None:
    while True:
        versions = _versions(path)
        number = int(versions[-1].name) + 1 if versions else 1
        target = path / f"{number:08d}"
        try:
            os.rename(temporary, target)
            break
        except OSError:
            if not target.exists():
                raise
            # another process was faster: the next number
    _sync_folder(path)


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _fingerprint(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest


def _sync(folder: Path) -> None:
    for name in _files(folder):
        with open(folder / name, "r+b") as file:
            os.fsync(file.fileno())
    for inner in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        _sync_folder(inner)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # not every system lets a folder be opened
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _as_checkpoint_error(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be {done} ({error.strerror or error}); check the folder and its permissions"
        ) from error
    except (KeyError, TypeError, ValueError) as error:  # from orbax, and of contents that nobody writes
        raise CheckpointError(f"{path}: cannot be {done} ({str(error).splitlines()[0][:200]})") from error
