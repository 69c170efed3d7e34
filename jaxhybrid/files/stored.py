"""A model on disk, in whichever form: its configuration, and its parameters one by one as they are stored."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import Source, hparams_from_config
from jaxhybrid.files import quantized, store
from jaxhybrid.files.config import show
from jaxhybrid.files.header import DTYPES
from jaxhybrid.files.mapping import map_tensors, read_parameter
from jaxhybrid.files.source import GGUF_MAGIC, ModelFiles, is_gguf
from jaxhybrid.files.tensors import find_files
from jaxhybrid.hparams import Hparams
from jaxhybrid.model import spec
from jaxhybrid.params import flatten

WEIGHTS = "weights"
"""Where an orbax folder keeps its arrays, beside config.json and the tokenizer."""
KIND = "weights"

Stored = np.ndarray | tuple[np.ndarray, np.ndarray]
"""A parameter as it is stored: an array, or the values and scales of a quantized matrix."""


class StoredModel(Protocol):
    """What loading and converting need of a model.

    sources: for each parameter the tensors that make it in a Hugging Face folder, by the names they have or
    had there; of quantized ones too. dtypes: of these tensors, by the safetensors format's names ("BF16",
    ...), where they are not quantized. unused: names of tensors that no parameter needs; unexpected: those
    among them that are not known to be of no use.
    """

    config: dict[str, Any]
    hparams: Hparams
    kept: quantized.Stored | None
    sources: dict[str, Source]
    dtypes: dict[str, str]
    unused: tuple[str, ...]
    unexpected: tuple[str, ...]

    def read(self, path: str) -> Stored:
        """The parameter at this dotted path, in its shape, in memory of its own."""
        ...

    def read_unused(self, name: str) -> np.ndarray:
        """A tensor that no parameter needs."""
        ...


def open_model(path: Path, quantize: str | None = None) -> StoredModel:
    """The model in a folder or .gguf file, all checked but the values; CheckpointError or HparamsError.

    quantize: the format its weights will have; blocks of a GGUF file that have its layout are given as they
    are, and `kept` says so.
    """
    files = ModelFiles(path, quantize)
    model = OrbaxModel(path, files.config) if is_orbax(path) else TensorModel(files)
    if model.kept is not None and quantize not in (None, model.kept.format):
        raise CheckpointError(f"{path}: its weights are {model.kept.format} already; leave quantize out")
    return model


def warn_of_unexpected(model: StoredModel, path: Path, but: str = "") -> None:
    """Warns the caller's caller of tensors that nothing uses."""
    if model.unexpected:
        first, *others = model.unexpected
        more = f" and {len(others)} more" if others else ""
        warnings.warn(f"{path}: tensor {first}{more} not used by this model{but}", stacklevel=3)


def is_orbax(folder: Path) -> bool:
    """Whether a folder's weights are in an orbax checkpoint."""
    return folder.is_dir() and store.is_store(folder / WEIGHTS) and not any(folder.glob("*.safetensors"))


class TensorModel:
    """A model whose tensors are known by their Hugging Face names."""

    def __init__(self, model: ModelFiles) -> None:
        self.hparams = hparams_from_config(model.config)
        self.files = files = model.tensors()
        self.config = model.config
        self.kept = quantized.Stored.of(model.config, model.where)
        mapping = map_tensors(self.hparams, files)
        mapping.raise_for_errors()
        if (self.kept is None) != (not mapping.quantized):
            kind = "quantized" if mapping.quantized else "not quantized"
            raise CheckpointError(
                f"{model.path}: the weights are {kind}, config.json says otherwise; {quantized.REMEDY}"
            )
        self.sources, self.unexpected, self._halves = mapping.sources, mapping.unexpected, mapping.quantized
        used = {name for source in self.sources.values() for name in source.names}
        self.dtypes = {name: files.dtype(name) for name in used if name in files}
        used |= {name for pair in self._halves.values() for half in pair for name in half.names}
        # a tied head may be stored a second time, and would be wrong as soon as the embeddings change
        if self.hparams.tie_embeddings:
            used.add("lm_head.weight")
        # other tensors of a GGUF file have names and layouts that mean nothing elsewhere
        self.unused = () if model.is_gguf else tuple(name for name in files.names() if name not in used)
        self._shapes = {path: tensor.shape for path, tensor in flatten(spec(self.hparams)).items()}

    def read(self, path: str) -> Stored:
        shape = self._shapes[path]
        if path not in self._halves:
            return read_parameter(self.files, self.sources[path], shape)
        values, scales = (
            read_parameter(self.files, half, (*shape[:-1], half.shapes[0][-1])) for half in self._halves[path]
        )
        return values, scales

    def read_unused(self, name: str) -> np.ndarray:
        return self.files.read(name)


_AHEAD = 256 << 20
"""Bytes that are restored at once: opening an orbax checkpoint takes longer than reading a small array."""


class OrbaxModel:
    """A model whose parameters lie in an orbax checkpoint, by their dotted paths (see `files/store.py`)."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.config = config
        self.hparams = hparams_from_config(config)
        self.kept = quantized.Stored.of(config, folder / "config.json")
        self.saved = store.open_saved(folder / WEIGHTS, KIND)
        self.sources, self.dtypes = _described(self.saved.about, folder)
        arrays = self.saved.arrays
        self._found: dict[str, np.ndarray] = {}
        self.unused = tuple(name.removeprefix(_UNUSED) for name in arrays if name.startswith(_UNUSED))
        self.unexpected: tuple[str, ...] = ()
        self._order: list[str] = []  # in which parameters are asked for
        for path, tensor in flatten(spec(self.hparams)).items():
            names = [path] if path in arrays else [path + end for end in _HALVES]
            dtype, shape = arrays.get(names[0], ("", (0,)))
            whole = (*shape[:-1], 2 * shape[-1]) if dtype == "uint8" else shape
            if whole != tensor.shape or path not in self.sources or names[-1] not in arrays:
                raise CheckpointError(
                    f"{folder}: parameter {path} is not stored in shape {tensor.shape}; config.json is of "
                    "another model"
                )
            self._order += names
        self._order += [_UNUSED + name for name in self.unused]

    def read(self, path: str) -> Stored:
        if path in self.saved.arrays:
            return self._take(path)
        return self._take(path + _HALVES[0]), self._take(path + _HALVES[1])

    def read_unused(self, name: str) -> np.ndarray:
        return self._take(_UNUSED + name)

    def _take(self, name: str) -> np.ndarray:
        if name not in self._found:
            names, size = [], 0
            for other in self._order[self._order.index(name) :]:
                size += self.saved.nbytes(other)
                if names and size > _AHEAD:
                    break
                names.append(other)
            self._found = self.saved.read(names)
        return self._found.pop(name)


_HALVES = (quantized.VALUES, quantized.SCALES)
_UNUSED = "unused:"


def arrays_of(path: str, stored: Stored) -> dict[str, np.ndarray]:
    """A parameter by the names under which an orbax folder keeps it."""
    if not isinstance(stored, tuple):
        return {path: stored}
    return {path + end: half for end, half in zip(_HALVES, stored, strict=True)}


def unused_name(name: str) -> str:
    """What an orbax folder calls a tensor that no parameter needs."""
    return _UNUSED + name


def describe(sources: Mapping[str, Source], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """JSON from which the tensors of a Hugging Face folder can be made again."""
    return {
        path: {
            "names": list(source.names),
            "shapes": [list(shape) for shape in source.shapes],
            "order": None if source.order is None else list(source.order),
            "dtypes": [dtypes.get(name) for name in source.names],
        }
        for path, source in sources.items()
    }


def _described(about: dict[str, Any], folder: Path) -> tuple[dict[str, Source], dict[str, str]]:
    """The inverse of `describe`; what is stored is sealed by a hash, so only other writers can fail here."""
    sources: dict[str, Source] = {}
    dtypes: dict[str, str] = {}
    try:
        for path, entry in about.items():
            order = entry["order"]
            sources[path] = Source(
                tuple(entry["names"]),
                tuple(tuple(shape) for shape in entry["shapes"]),
                None if order is None else tuple(order),
            )
            named = zip(entry["names"], entry["dtypes"], strict=True)
            dtypes |= {name: dtype for name, dtype in named if dtype in DTYPES}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: its description of the tensors cannot be used ({show(str(error))}); convert it again"
        ) from error
    return sources, dtypes


def is_model(folder: Path) -> bool:
    """Whether a folder or file looks like a model that may be replaced by another."""
    if folder.is_file() and is_gguf(folder):
        with open(folder, "rb") as file:
            return file.read(4) == GGUF_MAGIC
    if not (folder / "config.json").is_file():
        return False
    if store.is_store(folder / WEIGHTS):
        return True
    try:
        find_files(folder)
    except CheckpointError:
        return False
    return True
