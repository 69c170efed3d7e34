"""Folders of safetensors files: reading tensors, and writing one file."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import atomic_path, holds, parse_json, read_bytes, show, unreadable
from jaxhybrid.files.header import AGAIN, DTYPES, TensorPlace, read_header, unique_keys


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that a CPU device of jax takes over without a copy: it begins at a multiple of 64 bytes."""
    n = math.prod(shape) * dtype.itemsize
    raw = np.empty(n + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + n].view(dtype).reshape(shape)


class TensorFiles:
    """The tensors of a folder of safetensors files, whatever its layout.

    Layouts: model.safetensors; shards with an index; shards without one; a single file of any
    name; or the one that is named by `only`. The constructor reads and checks every header and raises
    CheckpointError, so that nothing is read from a folder with a damaged file.
    """

    def __init__(self, folder: Path, only: str | None = None) -> None:
        self.folder = Path(folder)
        self._tensors: dict[str, TensorPlace] = {}
        files, weight_map = find_files(self.folder) if only is None else ([self.folder / only], {})
        for file in files:
            for name, tensor in read_header(file).items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"{file}: tensor {show(name)} is also in {self._tensors[name].file.name}; "
                        "remove the file that does not belong to the model"
                    )
                self._tensors[name] = tensor
        for name, file in weight_map.items():
            if name not in self or self.file_of(name) != file:
                raise CheckpointError(
                    f"{file}: tensor {show(name)} is missing although the index places it there; "
                    "download the file and the index again"
                )

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together, without headers."""
        return sum(tensor.end - tensor.begin for tensor in self._tensors.values())

    def names(self) -> list[str]:
        """All tensor names, in the order in which they lie on the disk."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """The format's name of the dtype: "F32", "BF16", ..."""
        return self._find(name).dtype

    def file_of(self, name: str) -> Path:
        return self._find(name).file

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """The tensor, in memory of its own (`aligned_empty`) or in `out`, contiguous and of its size.

        Raises CheckpointError for a name that is not there, a dtype that numpy with ml_dtypes
        cannot hold, and a file that changed since it was checked.
        """
        tensor = self._find(name)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{tensor.file}: tensor {show(name)} has dtype {tensor.dtype}, which cannot be "
                "read; use a copy of the model in BF16, F16 or F32"
            )
        if out is None:
            out = aligned_empty(tensor.shape, dtype)
        rest = out.reshape(-1).view(np.uint8).data
        try:
            with open(tensor.file, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != tensor.file_bytes:
                    raise CheckpointError(
                        f"{tensor.file}: changed from {tensor.file_bytes} to {size} bytes "
                        "since it was checked; load the model when nothing writes to its folder"
                    )
                file.seek(tensor.begin)
                while rest:
                    n = file.readinto(rest)
                    if not n:
                        raise CheckpointError(f"{tensor.file}: ends inside tensor {show(name)}; {AGAIN}")
                    rest = rest[n:]
        except OSError as error:
            raise unreadable(tensor.file, error) from error
        return out.reshape(tensor.shape)

    def _find(self, name: str) -> TensorPlace:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.folder}: tensor {show(name)} is not in the model's files; "
                "check that config.json and the weights belong together"
            )
        return self._tensors[name]


def write_safetensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one safetensors file: all of it or, on any error, nothing.

    `metadata` defaults to {"format": "pt"}, which transformers asks for. Raises CheckpointError
    for a reserved name, a dtype outside the format, and a path that cannot be written.
    """
    writable = {dtype.name for dtype in DTYPES.values()}
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError(f"{path}: tensor '__metadata__' has a reserved name; rename it")
        # The library writes the memory as it lies, so a transposed view must be laid out first.
        arrays[name] = np.asarray(tensor, order="C")
        if arrays[name].dtype.name not in writable:
            raise CheckpointError(
                f"{path}: tensor {show(name)} has dtype {arrays[name].dtype}, which safetensors "
                "cannot hold; convert it to float32 or bfloat16"
            )
    with atomic_path(path) as temporary:
        try:
            save_file(arrays, temporary, dict({"format": "pt"} if metadata is None else metadata))
        except SafetensorError as error:
            raise OSError(str(error).splitlines()[0]) from error


def find_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The safetensors files to read, and the index's map from tensor name to file if there is one.

    As in transformers, model.safetensors goes before an index.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    weights = [name for name in names if name.endswith(".safetensors")]
    own = [name for name in weights if not re.match(r"adapter_model\.|consolidated", name)]
    weights = own or weights
    if "model.safetensors" in weights:
        return [folder / "model.safetensors"], {}
    if "model.safetensors.index.json" in names:
        weight_map = _read_index(folder / "model.safetensors.index.json", set(names))
        return [folder / name for name in sorted(set(weight_map.values()))], {
            tensor: folder / name for tensor, name in weight_map.items()
        }
    if not weights:
        pickled = any(name.startswith("pytorch_model") and ".bin" in name for name in names)
        remedy = (
            "convert pytorch_model.bin to safetensors (load it with transformers, then save_pretrained)"
            if pickled
            else "give a folder with the model's .safetensors files"
        )
        raise CheckpointError(f"{folder}: no .safetensors files (the folder holds {holds(folder)}); {remedy}")
    parts = [re.fullmatch(r"(.+)-(\d+)-of-(\d+)\.safetensors", name) for name in weights]
    stems = {part and (part[1], part[3]) for part in parts}
    if len(weights) > 1 and (len(stems) > 1 or None in stems):
        raise CheckpointError(
            f"{folder}: cannot tell which of {len(weights)} .safetensors files are the model "
            f"({show(weights[0])}, {show(weights[1])}, ...); keep one, or add "
            "model.safetensors.index.json"
        )
    if parts[0]:
        stem, count = parts[0][1], parts[0][3]
        last = min(max(int(count), 1), len(weights) + 1)  # the count is a stranger's: never trusted
        for number in range(1, last + 1):
            shard = f"{stem}-{number:0{len(count)}}-of-{count}.safetensors"
            if shard not in weights:
                raise CheckpointError(f"{folder}: shard {shard} is missing; download it")
    return [folder / name for name in weights], {}


def _read_index(path: Path, present: set[str]) -> dict[str, str]:
    """The index's map from tensor name to shard name, each shard a plain name of a present file."""
    index = parse_json(read_bytes(path), str(path), AGAIN, object_pairs_hook=unique_keys)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing, empty or not an object; {AGAIN}")
    for name, shard in weight_map.items():
        shard = shard if isinstance(shard, str) else ""
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", shard):
            raise CheckpointError(
                f"{path}: tensor {show(name)} is placed in {show(shard)}, which is not a plain "
                f".safetensors file name; {AGAIN}"
            )
        if shard not in present:
            raise CheckpointError(
                f"{path}: shard {show(shard)} (of tensor {show(name)}) is not in the folder; download it"
            )
    return weight_map
