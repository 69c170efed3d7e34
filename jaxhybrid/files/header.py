"""The header of one safetensors file, checked before anything is read by it.

Format: https://github.com/huggingface/safetensors (8 bytes of little-endian header length, a JSON
header, then the bytes of the tensors, without holes). Names and numbers in a header come from
strangers, so each is checked with Python integers before numpy sees it.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import parse_json, show, unreadable

DTYPES = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu, "C64": np.complex64, "BOOL": np.bool_,
        "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
        "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    }.items()
}  # fmt: skip
_BITS = {name: 8 * kind.itemsize for name, kind in DTYPES.items()}
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # in the format, but numpy cannot hold them
NAMES = {kind: name for name, kind in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # bytes, from the format
# Parsed JSON takes up to 30 times its bytes, so a large header must belong to a larger file.
_HEADER_FREE = 4_000_000
_HEADER_SHARE = 32
_RANK_LIMIT = 32
AGAIN = "download it again"


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: its file, that file's size, and its bytes [begin, end) in it."""

    file: Path
    file_bytes: int
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """The tensors of one file, by position; CheckpointError unless all of the header is sound."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise CheckpointError(
                    f"{path}: is a git-lfs pointer, not the weights; fetch them with `git lfs pull`"
                )
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path}: cut short or not a safetensors file: expected at least "
                    f"{8 + length if size >= 8 else 8} bytes, found {size}; {AGAIN}"
                )
            if length > min(_HEADER_LIMIT, max(_HEADER_FREE, size // _HEADER_SHARE)):
                raise CheckpointError(
                    f"{path}: a header of {length} bytes is out of proportion to a file of {size} "
                    f"bytes; {AGAIN}, or split the model into shards"
                )
            data = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) != length or not data.startswith(b"{"):
        raise CheckpointError(f"{path}: not a safetensors file (no JSON header); {AGAIN}")
    header = parse_json(data, f"{path}: header", AGAIN, object_pairs_hook=unique_keys)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(text) is not str for text in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings; {AGAIN}")
    try:
        "".join([*header, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as an escape
        raise CheckpointError(f"{path}: broken Unicode in the header; {AGAIN}") from error
    tensors = {name: _check_entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    end = 8 + length
    expected = max([end, *(tensor.end for tensor in tensors.values())])
    if expected > size:
        raise CheckpointError(
            f"{path}: cut short, or its header is damaged: expected {expected} bytes, found {size} "
            f"(tensor {show(ordered[-1][0])} lies beyond the end); {AGAIN}"
        )
    for name, tensor in ordered:
        if tensor.begin != end:
            fault = "overlaps another" if tensor.begin < end else "leaves unused bytes before it"
            raise CheckpointError(f"{path}: tensor {show(name)} {fault}; {AGAIN}")
        end = tensor.end
    if end != size:
        raise CheckpointError(f"{path}: expected {end} bytes from its header, found {size}; {AGAIN}")
    return dict(ordered)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `parse_json` that refuses a repeated key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{show(repeated)} appears twice")
    return result


def _naturals(values: Any) -> TypeGuard[list[int]]:
    """Whether this is a list of integers that fit numpy's index type (true is not an integer)."""
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _check_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorPlace:
    def fail(problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {show(name)}: {problem}; {AGAIN}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fail("its entry is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise fail(f"unknown dtype {show(dtype) if isinstance(dtype, str) else ''}".rstrip())
    if not _naturals(shape) or len(shape) > _RANK_LIMIT:
        raise fail(f"its shape is not a list of at most {_RANK_LIMIT} natural numbers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail("its data_offsets are not [begin, end]")
    # numpy refuses such shapes even when a 0 among the sizes makes the tensor empty.
    if math.prod(max(n, 1) for n in shape) * _BITS[dtype] >= 2**63:
        raise fail(f"shape {show(str(shape))} is too large")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise fail(
            f"{dtype} of shape {show(str(shape))} needs {bits / 8 if bits % 8 else bits // 8} "
            f"bytes, found {offsets[1] - offsets[0]}"
        )
    begin, end = (data_start + offset for offset in offsets)
    return TensorPlace(path, size, dtype, tuple(shape), begin, end)
