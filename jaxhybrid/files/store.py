"""Named arrays in a folder that is replaced as a whole: a killed process leaves the old or the new.

    PATH/00000003/arrays/     orbax checkpoint (PyTree of flat names)
    PATH/00000003/about.json  what it is, and size and SHA-256 of every file beside it

A version is written under a temporary name, synced to disk, renamed, and only then are older ones
removed. Readers take the newest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import parse_json, read_bytes

FORMAT = 1
_ABOUT, _ARRAYS = "about.json", "arrays"
_VERSION, _UNFINISHED = re.compile(r"\d{8}"), re.compile(r"\.unfinished-(\d+)-[0-9a-f]+")


def write(
    path: str | Path, kind: str, arrays: dict[str, np.ndarray], about: dict[str, Any], compress: bool = True
) -> None:
    """Replace what is stored at `path` (a folder; made if absent) by these arrays.

    kind: what they are, checked by `read`. about: JSON. compress: smaller files where arrays repeat
    themselves, for twice the memory of the arrays beside them instead of once. Raises CheckpointError when
    the folder holds other things or cannot be written; what was stored is then still there.
    """
    path = Path(path)
    with _as_checkpoint_error(path, "written"):
        path.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(path)
        remove_unfinished(path)
        temporary = path / f".unfinished-{os.getpid()}-{secrets.token_hex(4)}"
        # asked before, because orbax's threads tell of a full disk in many tracebacks
        if shutil.disk_usage(path).free < sum(a.nbytes for a in arrays.values()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            temporary.mkdir()
            _save_arrays(temporary / _ARRAYS, {name: a for name, a in arrays.items() if a.size}, compress)
            described = {name: [str(a.dtype), list(a.shape)] for name, a in arrays.items()}
            content = {"format": FORMAT, "kind": kind, "arrays": described, "about": about}
            content["files"] = {name: list(_fingerprint(temporary / name)) for name in _files(temporary)}
            text = json.dumps(content, sort_keys=True)
            sealed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}
            (temporary / _ABOUT).write_text(json.dumps(sealed, sort_keys=True))
            sync(temporary)
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
                saved = _open_version(newest, path, kind)
                return saved.read(), saved.about
            except Exception:
                # another process may have saved a newer version and removed this one meanwhile
                read, newest = newest, _newest(path, kind)
                if newest == read:
                    raise


@dataclass(frozen=True)
class Saved:
    """A version whose files were found as they were written. arrays: dtype and shape of each."""

    folder: Path
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    about: dict[str, Any]

    @property
    def total_bytes(self) -> int:
        return sum(map(self.nbytes, self.arrays))

    def nbytes(self, name: str) -> int:
        dtype, shape = self.arrays[name]
        return math.prod(shape) * jnp.dtype(dtype).itemsize

    def read(self, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Arrays in memory of their own; all of them for None."""
        wanted = self._with_elements(names)
        found = _load_arrays(self.folder / _ARRAYS, dict.fromkeys(wanted))
        return {
            name: np.asarray(found[name]) if name in found else np.zeros(shape, jnp.dtype(dtype))
            for name, (dtype, shape) in self.arrays.items()
            if names is None or name in names
        }

    def place(self, shardings: Mapping[str, Sharding], dtypes: Mapping[str, Any]) -> dict[str, Array]:
        """Arrays on devices, each with its sharding and dtype; a process reads its own part only."""
        return _load_arrays(
            self.folder / _ARRAYS,
            {
                name: jax.ShapeDtypeStruct(self.arrays[name][1], jnp.dtype(dtypes[name]), sharding=sharding)
                for name, sharding in shardings.items()
            },
        )

    def _with_elements(self, names: Sequence[str] | None) -> list[str]:
        wanted = self.arrays if names is None else names
        return [name for name in wanted if self.nbytes(name)]


def is_store(path: Path) -> bool:
    """Whether something was stored at `path`."""
    return path.is_dir() and bool(_versions(path))


def open_saved(path: str | Path, kind: str) -> Saved:
    """The newest version, every byte of its files checked as in `read`, of which arrays are read later."""
    path = Path(path)
    with _as_checkpoint_error(path, "read"):
        return _open_version(_newest(path, kind), path, kind)


def _newest(path: Path, kind: str) -> Path:
    versions = _versions(path) if path.is_dir() else []
    if not versions:
        raise CheckpointError(f"{path}: no saved {kind} here; give the folder it was saved to")
    return versions[-1]


def _open_version(folder: Path, path: Path, kind: str) -> Saved:
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
    arrays = {name: (dtype, tuple(shape)) for name, (dtype, shape) in content["arrays"].items()}
    return Saved(folder, arrays, content["about"])


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


def _save_arrays(folder: Path, arrays: dict[str, np.ndarray], compress: bool) -> None:
    if not arrays:
        return
    import orbax.checkpoint as ocp  # slow to import

    with _quiet(), ocp.PyTreeCheckpointer(use_compression=compress) as writer:
        writer.save(folder.absolute(), arrays)


def _load_arrays(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct | None]) -> dict[str, Any]:
    """The wanted arrays of a checkpoint: numpy's where there is no struct, else placed as it says."""
    if not wanted:
        return {}
    import orbax.checkpoint as ocp

    def how(like: jax.ShapeDtypeStruct | None) -> ocp.RestoreArgs:
        if like is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(dtype=like.dtype, sharding=like.sharding, global_shape=like.shape)

    args = ocp.args.PyTreeRestore(
        item={name: 0 if like is None else like for name, like in wanted.items()},
        restore_args={name: how(like) for name, like in wanted.items()},
        partial_restore=True,
    )
    with _quiet(), ocp.PyTreeCheckpointer() as reader:
        return reader.restore(folder.absolute(), args=args)


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax reports every file, and errors that it raises too, through absl's log."""
    import logging

    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
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


def remove_unfinished(path: Path, prefix: str = "") -> None:
    """What killed processes left; those that still run are left to their work."""
    for entry in path.iterdir():
        match = entry.name.startswith(prefix) and _UNFINISHED.fullmatch(entry.name.removeprefix(prefix))
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
    sync_folder(path)


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _fingerprint(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest


def sync(folder: Path) -> None:
    for name in _files(folder):
        with open(folder / name, "r+b") as file:
            os.fsync(file.fileno())
    for inner in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        sync_folder(inner)


def sync_folder(folder: Path) -> None:
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
