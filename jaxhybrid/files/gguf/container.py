"""The header of one GGUF file, checked before anything is read by it, and the files of a split model.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (magic, version, counts; typed metadata;
names, shapes, types and offsets of tensors; their bytes). Lengths and counts come from strangers: each is
compared with what is left of the file before anything of that size is made.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import show, unreadable
from jaxhybrid.files.header import AGAIN
from jaxhybrid.files.reading import fill, unchanged
from jaxhybrid.files.source import GGUF_MAGIC

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LONGEST_NAME, _MOST_DIMS = 1 << 16, 4


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, that file's size, and its bytes from `begin` on.

    shape: outermost first, as numpy has it (a file lists the innermost first).
    """

    name: str
    file: Path
    file_bytes: int
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int

    @property
    def row_bytes(self) -> int:
        """Of one innermost row, which blocks of quantized weights never cross."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Container:
    """A model's metadata (arrays of numbers are numpy's, of strings lists) and tensors, of all its files."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def open_container(path: Path) -> Container:
    """All files of a model, given one of them; CheckpointError unless every header is sound."""
    first = _read(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return first
    named = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if named is None or int(named[3]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} files but not named so; name it as it was published"
        )
    files = []
    for number in range(1, count + 1):  # the name holds five digits
        file = path.with_name(f"{named[1]}-{number:05d}-of-{count:05d}.gguf")
        if not file.is_file():
            raise CheckpointError(f"{file}: part {number} of {count} is missing; download it")
        files.append(first if file == path else _read(file))
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(files):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise CheckpointError(f"{part.path}: its split.no and split.count are of another file; {AGAIN}")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: tensor {show(name)} is in another part too; {AGAIN}")
            tensors[name] = tensor
    expected = files[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{path}: its parts hold {len(tensors)} tensors, expected {expected}; {AGAIN}")
    return Container(path, files[0].metadata, tensors)


def _read(path: Path) -> Container:
    try:
        with open(path, "rb") as file:
            return _Header(path, file, os.fstat(file.fileno()).st_size).read()
    except OSError as error:
        raise unreadable(path, error) from error


class _Header:
    """One pass over a header; `left` is what the file still has."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.left = path, file, size, size

    def read(self) -> Container:
        magic = self.take(4, "magic")
        if magic == b"vers":
            raise CheckpointError(
                f"{self.path}: is a git-lfs pointer, not the weights; fetch them with `git lfs pull`"
            )
        if magic != GGUF_MAGIC:
            raise CheckpointError(f"{self.path}: is not a GGUF file (it begins with {magic!r}); {AGAIN}")
        version = self.number("<u4", "version")
        if version not in (2, 3):
            big = version & 0xFFFF == 0 and version
            what = "is big-endian" if big else f"has version {version}"
            raise CheckpointError(
                f"{self.path}: {what}, known are little-endian versions 2 and 3; convert it again"
            )
        n_tensors, n_entries = self.number("<u8", "tensor count"), self.number("<u8", "metadata count")
        self.fits(n_tensors, 24, "tensors")
        self.fits(n_entries, 13, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(n_entries):
            key = self.name("metadata key")
            if key in metadata:
                raise self.fail(f"metadata {show(key)} appears twice")
            metadata[key] = self.value(key)
        places = [self.place() for _ in range(n_tensors)]
        return Container(self.path, metadata, self.checked(places, metadata))

    def take(self, n: int, what: str) -> bytes:
        if n > self.left:
            raise self.fail(f"{what} needs {n} bytes, the file has {self.left} left")
        data = self.file.read(n)
        if len(data) != n:
            raise self.fail(f"it became shorter than {self.size} bytes while it was read")
        self.left -= n
        return data

    def number(self, kind: str, what: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def length(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def fits(self, n: int, least_bytes: int, what: str) -> None:
        if n * least_bytes > self.left:
            raise self.fail(f"{n} {what} do not fit into the {self.left} bytes left of the file")

    def name(self, what: str) -> str:
        n = self.length(what)
        if not 0 < n <= _LONGEST_NAME:
            raise self.fail(f"a {what} of {n} bytes")
        try:
            return self.take(n, what).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"a {what} that is not UTF-8") from error

    def string(self, what: str) -> str:
        return self.take(self.length(what), what).decode(errors="replace")

    def value(self, key: str) -> Any:
        what = f"metadata {show(key)}"
        kind = self.number("<u4", what)
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind != _ARRAY:
            raise self.fail(f"{what} has unknown type {kind}")
        kind, n = self.number("<u4", what), self.length(what)
        if kind == _STRING:
            self.fits(n, 8, f"strings of {what}")
            return [self.string(what) for _ in range(n)]
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of type {kind}, known are numbers and strings")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(n * dtype.itemsize, what), dtype)

    def place(self) -> StoredTensor:
        name = self.name("tensor name")
        what = f"tensor {show(name)}"
        n_dims = self.number("<u4", what)
        if not 1 <= n_dims <= _MOST_DIMS:
            raise self.fail(f"{what} has {n_dims} dimensions, 1 to {_MOST_DIMS} are possible")
        shape = tuple(self.length(what) for _ in range(n_dims))[::-1]
        kind, offset = self.number("<u4", what), self.length(what)
        try:
            kind = GGMLQuantizationType(kind)
            block, _ = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            remedy = "update the gguf package, or use a copy of the model in another quantization"
            raise CheckpointError(f"{self.path}: {what} has unknown type {kind}; {remedy}") from error
        if min(shape) < 1 or shape[-1] % block:
            raise self.fail(f"{what} of type {kind.name} has impossible shape {show(str(shape))}")
        return StoredTensor(name, self.path, self.size, kind, shape, offset)

    def checked(self, places: list[StoredTensor], metadata: dict[str, Any]) -> dict[str, StoredTensor]:
        """By name, with their true beginnings; no two share bytes."""
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise self.fail(f"general.alignment is {show(str(step))}, expected is a power of two")
        start = self.size - self.left
        start += -start % step
        end, found = start, {}
        for place in sorted(places, key=lambda p: p.begin):
            begin = start + place.begin
            what = f"tensor {show(place.name)}"
            if place.name in found:
                raise self.fail(f"{what} appears twice")
            if begin < end:
                raise self.fail(f"{what} overlaps another")
            if begin + place.n_bytes > self.size:
                raise self.fail(
                    f"cut short, or its header is damaged: {what} ends at byte {begin + place.n_bytes}, "
                    f"the file has {self.size}"
                )
            end = begin + place.n_bytes
            moved = StoredTensor(place.name, self.path, self.size, place.type, place.shape, begin)
            found[place.name] = moved
        return found

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}; {AGAIN}")


def read_rows(
    tensor: StoredTensor,
    first: int,
    count: int,
    take: Callable[[int, np.ndarray], None],
    at_once: int = 1 << 22,
) -> None:
    """Calls take(row, bytes uint8 [rows, row bytes]) for `count` innermost rows, `at_once` bytes each time.

    A buffer of that size is all the memory it needs, whatever the tensor; it is used again, so `take` keeps
    nothing of it. CheckpointError when the file changed since its header was read.
    """
    per_row = tensor.row_bytes
    n = max(1, min(count, at_once // per_row))
    buffer = np.empty((n, per_row), np.uint8)
    with unchanged(tensor.file, tensor.file_bytes, tensor.begin + first * per_row, "it") as file:
        for done in range(0, count, n):
            rows = buffer[: min(n, count - done)]
            fill(file, rows.reshape(-1).data, tensor.file, tensor.name)
            take(first + done, rows)
