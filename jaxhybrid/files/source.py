"""What a model is read from: a Hugging Face folder or a GGUF file, as a configuration and tensors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import read_config
from jaxhybrid.files.tensors import TensorFiles

GGUF = ".gguf"
GGUF_MAGIC = b"GGUF"


class Tensors(Protocol):
    """Tensors by the names of a Hugging Face folder; see `TensorFiles`."""

    def __contains__(self, name: object) -> bool: ...
    @property
    def total_bytes(self) -> int: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def file_of(self, name: str) -> Path: ...
    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray: ...


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == GGUF and not path.is_dir()


class ModelFiles:
    """A model's configuration, in the fields of config.json, and its tensors, opened when asked for.

    quantize: the format that weights will be kept in; GGUF blocks of the same layout are given as they are.
    Raises CheckpointError when there is no model.
    """

    def __init__(self, path: Path, quantize: str | None = None) -> None:
        self.path = path
        self.config: dict[str, Any]
        if is_gguf(path):
            self._gguf = gguf_part("tensors").GgufFiles(path, quantize)
            self.config = self._gguf.config
        else:
            self._gguf = None
            self.config = read_config(path)

    @property
    def is_gguf(self) -> bool:
        return self._gguf is not None

    @property
    def where(self) -> Path:
        """The file that holds the configuration, for messages."""
        return self.path if self._gguf else self.path / "config.json"

    def tensors(self) -> Tensors:
        return self._gguf.checked() if self._gguf else TensorFiles(self.path)


def gguf_part(name: str) -> Any:
    """A module of files/gguf/, which need an optional dependency."""
    try:
        return importlib.import_module(f"jaxhybrid.files.gguf.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "gguf":
            raise
        raise CheckpointError(
            'GGUF files need the gguf package; install it with pip install "jaxhybrid[gguf]"'
        ) from error
