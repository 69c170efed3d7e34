"""The tensors of GGUF files, by the names that a Hugging Face folder of the model has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as Type

from jaxhybrid.errors import CheckpointError, HparamsError
from jaxhybrid.families import hparams_from_config, tensors_of
from jaxhybrid.files.config import show
from jaxhybrid.files.gguf.container import StoredTensor, open_container, read_rows
from jaxhybrid.files.gguf.layout import ROTATED, Part, Place, places
from jaxhybrid.files.gguf.metadata import config_of
from jaxhybrid.files.header import DTYPES
from jaxhybrid.files.quantized import SCALES, VALUES, entry
from jaxhybrid.files.tensors import aligned_empty
from jaxhybrid.model import spec
from jaxhybrid.params import flatten

_FLOATS = {Type.F32: "F32", Type.F16: "F16", Type.BF16: "BF16", Type.F64: "F64"}
_BLOCKS = {"int8_block": Type.Q8_0, "int4": Type.Q4_0}
"""Formats that blocks of a GGUF file can be kept in, bit for bit."""
_INTEGERS = (Type.I8, Type.I16, Type.I32, Type.I64)


class GgufFiles:
    """One model's files, with the interface of `TensorFiles`.

    quantize: tensors of the same layout (Q8_0 for "int8_block", Q4_0 for "int4") are given as NAME.values and
    NAME.scales instead of NAME, as in a folder of quantized weights; all others as numbers. Tensors are read
    piece by piece, so that beside the result 4 MiB of the file are in memory.
    """

    def __init__(self, path: Path, quantize: str | None = None) -> None:
        self.path = path
        self.container = open_container(path)
        self.arch, self.config = config_of(self.container)
        try:
            self.hparams = hparams_from_config(self.config)
        except HparamsError as error:
            raise CheckpointError(f"{path}: its metadata is of no use ({error}); convert it again") from error
        self._quantize = quantize
        self._places: dict[str, Place] = {}
        self._kept: set[str] = set()
        self._others: list[str] = []

    def checked(self) -> GgufFiles:
        """This, with every tensor found; CheckpointError listing the first that is missing or misshaped."""
        hp = self.hparams
        whole_heads = self.container.metadata.get(ROTATED) != "rotated"
        self._places = places(self.arch, hp, self.container.tensors, whole_heads)
        faults: dict[str, str] = {}
        for place in self._places.values():
            for part in place.parts:
                if (fault := self._fault(part)) is not None:
                    faults[part.name] = fault
        if faults:
            first, *others = faults.values()
            more = f" (and {len(others)} more)" if others else ""
            raise CheckpointError(f"{self.path}: {first}{more}; download it again, or convert it again")
        used = {part.name for place in self._places.values() for part in place.parts}
        self._others = [n for n in self.container.tensors if n not in used and not _is_known(n, hp.n_layers)]
        self._keep_blocks(hp)
        return self

    def _keep_blocks(self, hp: Any) -> None:
        kind = _BLOCKS.get(self._quantize or "")
        specs = flatten(spec(hp))
        for path, source in tensors_of(hp).items():
            found = [self._places[name] for name in source.names]
            types = {self._stored(part).type for place in found for part in place.parts}
            if specs[path].quantizable and types == {kind} and all(p.is_whole_rows for p in found):
                self._kept.update(source.names)
        if self._kept:
            dtype = np.dtype(np.float32)
            self.config |= entry(str(self._quantize), dtype)  # type: ignore[arg-type]

    def _fault(self, part: Part) -> str | None:
        stored = self.container.tensors.get(part.name)
        if stored is None:
            return f"tensor {part.name} of shape {part.shape} is missing"
        if _squeezed(stored.shape) != _squeezed(part.shape):
            return f"tensor {part.name} has shape {stored.shape}, its metadata asks for {part.shape}"
        if stored.type in _INTEGERS or stored.type not in _FLOATS and stored.type not in quants._type_traits:
            return f"tensor {part.name} is of type {stored.type.name}, which cannot be read as numbers"
        return None

    def _stored(self, part: Part) -> StoredTensor:
        return self.container.tensors[part.name]

    def __contains__(self, name: object) -> bool:
        own, half = self._split(str(name))
        return name in self._others if own is None else (half is None) == (own not in self._kept)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together, without headers."""
        return sum(tensor.n_bytes for tensor in self.container.tensors.values())

    def names(self) -> list[str]:
        """Our names, then those of tensors in the files that nothing uses."""
        found: list[str] = []
        for name in self._places:
            found += [name + VALUES, name + SCALES] if name in self._kept else [name]
        return found + self._others

    def shape(self, name: str) -> tuple[int, ...]:
        own, half = self._split(name)
        if own is None:
            return self.container.tensors[name].shape
        *leading, last = self._places[own].shape
        widths = {None: last, SCALES: last // 32, VALUES: last // 2 if self._quantize == "int4" else last}
        return (*leading, widths[half])

    def dtype(self, name: str) -> str:
        """The name in safetensors files of the dtype that `read` gives."""
        own, half = self._split(name)
        if half is not None:
            return "F32" if half == SCALES else "U8" if self._quantize == "int4" else "I8"
        if own is None:
            return _FLOATS.get(self.container.tensors[name].type, "F32")
        place = self._places[own]
        types = {self._stored(part).type for part in place.parts}
        return "F32" if place.change or len(types) > 1 else _FLOATS.get(types.pop(), "F32")

    def file_of(self, name: str) -> Path:
        own, _ = self._split(name)
        stored = self.container.tensors[name] if own is None else self._stored(self._places[own].parts[0])
        return stored.file

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """The tensor as our families want it, in new memory or in `out`, contiguous and of its size."""
        own, half = self._split(name)
        if own is None:
            raise CheckpointError(f"{self.path}: tensor {show(name)} is not part of the model")
        dtype, shape = DTYPES[self.dtype(name)], self.shape(name)
        out = aligned_empty(shape, dtype) if out is None else out.reshape(shape)
        place = self._places[own]
        columns = 1 if len(shape) == 1 else shape[-1]
        rows = out.reshape(-1, columns)
        done = 0
        for part in place.parts:
            width = place.n_columns if part.swapped else self._stored(part).shape[-1]
            n = part.count * width // place.n_columns
            self._read_part(part, half, rows, _targets(place, done, n, len(rows)), place)
            done += n
        if place.change is not None:
            rows[...] = place.change.undo(rows)
        return out

    def _read_part(
        self, part: Part, half: str | None, out: np.ndarray, where: slice | np.ndarray, place: Place
    ) -> None:
        """The rows of a part to the rows `where` of `out`."""
        stored = self._stored(part)
        width = out.shape[-1] if half is None else stored.shape[-1]
        if part.swapped:
            heads, inner, n = part.shape[-3:]
            whole = np.empty((heads * inner, n), np.float32)

            def take_all(row: int, data: np.ndarray) -> None:
                whole[row : row + len(data)] = _numbers(data, stored.type)

            read_rows(stored, 0, len(whole), take_all)
            out[where] = whole.reshape(heads, inner, n).swapaxes(1, 2).reshape(-1, inner)
            return
        # a column [n, 1] in the file is our vector [n], and a row of it too: rows are counted in our width
        per = max(1, stored.shape[-1] // width)

        def take(row: int, data: np.ndarray) -> None:
            values = (
                _half(data, stored.type, half) if half else _numbers(data, stored.type).reshape(-1, width)
            )
            if place.columns is not None:
                values = values[:, place.columns]
            first = (row - part.first) * per
            at = (
                slice(where.start + first, where.start + first + len(values))
                if isinstance(where, slice)
                else where[first : first + len(values)]
            )
            out[at] = values

        read_rows(stored, part.first, part.count, take)

    def _split(self, name: str) -> tuple[str | None, str | None]:
        """Our name of a tensor and the half of its quantized form that is meant; None for what is unused."""
        for half in (VALUES, SCALES):
            if name.endswith(half) and name.removesuffix(half) in self._kept:
                return name.removesuffix(half), half
        return (name, None) if name in self._places else (None, None)


def _is_known(name: str, n_layers: int) -> bool:
    """Tensors that hold no parameters, and layers that predict further tokens, which come last."""
    block = re.match(r"blk\.(\d{1,9})\.", name)
    return name.startswith("rope_") or block is not None and int(block[1]) >= n_layers


def _targets(place: Place, first: int, count: int, n_rows: int) -> slice | np.ndarray:
    """Our rows for the stored rows [first, first + count)."""
    if place.rows is None:
        return slice(first, first + count)
    inverse = np.empty(n_rows, np.int64)
    inverse[place.rows] = np.arange(n_rows)
    return inverse[first : first + count]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Writers differ in axes of length 1."""
    return tuple(n for n in shape if n != 1)


def _numbers(data: np.ndarray, kind: Type) -> np.ndarray:
    """Rows of bytes as rows of numbers."""
    if kind in _FLOATS:
        return data.view(DTYPES[_FLOATS[kind]])
    return quants.dequantize(data, kind)


def _half(data: np.ndarray, kind: Type, half: str) -> np.ndarray:
    """Integers or scales of rows of blocks: a float16 scale, then 32 bytes (Q8_0) or 16 of halves (Q4_0)."""
    blocks = data.reshape(len(data), -1, 34 if kind == Type.Q8_0 else 18)
    if half == SCALES:
        return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    values = blocks[..., 2:].reshape(len(data), -1)
    return values.view(np.int8) if kind == Type.Q8_0 else values
