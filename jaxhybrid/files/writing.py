"""Writing models: Hugging Face folders and orbax folders, each whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import Source
from jaxhybrid.files import quantized, store
from jaxhybrid.files.config import atomic_path, write_json
from jaxhybrid.files.header import DTYPES, NAMES
from jaxhybrid.files.mapping import split_parameter
from jaxhybrid.files.stored import KIND, WEIGHTS, Stored, StoredModel, arrays_of, describe, unused_name
from jaxhybrid.files.tensors import write_safetensors
from jaxhybrid.model import spec
from jaxhybrid.ops.quantized import BLOCK, FORMATS, quantize_array
from jaxhybrid.params import TensorSpec, flatten
from jaxhybrid.weights import format_of

Progress = Callable[[int, int], None]
"""Called with (elements done, elements in all) after each parameter."""

SHARD_BYTES = 2 << 30
"""A larger model is written as several files, of which one at a time is in memory."""

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
COMPANIONS = (
    "generation_config.json",
    "chat_template*",
    "*.jinja",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""What belongs to a model beside its configuration, weights and tokenizer."""


@dataclass
class Changes:
    """What becomes of the parameters on their way. dtype: of the weights; norms, decays and biases only ever
    become wider. quantize: a format of `FORMATS`. Parameters that are quantized already stay as they are."""

    dtype: jnp.dtype | None = None
    quantize: str | None = None
    forms: set[str] = field(default_factory=set)
    """Formats of what was quantized."""

    def of(self, stored: Stored, tensor: TensorSpec, name: str) -> Stored:
        if isinstance(stored, tuple):
            return stored
        form = format_of(tensor, self.quantize)
        if form is not None:
            self.forms.add(form)
            matrix = quantize_array(jnp.asarray(stored), form, jnp.dtype(jnp.float32))
            return np.asarray(matrix.values), np.asarray(matrix.scales)
        if self.dtype is None or stored.dtype == self.dtype or (tensor.float32 and self.dtype.itemsize < 4):
            return stored
        with np.errstate(over="ignore"):
            cast = stored.astype(self.dtype)
        if self.dtype == jnp.float16 and np.isfinite(stored).all() and not np.isfinite(cast).all():
            raise CheckpointError(f"tensor {name} holds values beyond float16; convert to bfloat16")
        return cast

    def cast(self, stored: np.ndarray) -> bool:
        """Whether a parameter that went by has the wanted dtype, not that of its tensors."""
        return self.dtype is not None and stored.dtype == self.dtype

    def config(self, model: StoredModel) -> dict[str, Any]:
        """config.json of the result, after all parameters have gone by."""
        config = dict(model.config)
        if self.dtype is not None:
            for part in (config, config.get("text_config")):
                if isinstance(part, dict):
                    part["torch_dtype" if "torch_dtype" in part else "dtype"] = self.dtype.name
        dtype = self.dtype if self.dtype is not None else weights_dtype(model)
        activations = jnp.dtype(jnp.bfloat16) if dtype == jnp.float16 else dtype
        form = model.kept.format if model.kept else next((f for f in FORMATS[::-1] if f in self.forms), None)
        config.pop(quantized.ENTRY, None)
        return config if form is None else config | quantized.entry(form, activations)


def weights_dtype(model: StoredModel) -> jnp.dtype:
    """That of the embeddings, which is that of the activations; of quantized ones what was noted."""
    if model.kept is not None:
        return jnp.dtype(model.kept.dtype)
    found = jnp.dtype(DTYPES[model.dtypes[model.sources["embed.weight"].names[0]]])
    return jnp.dtype(jnp.float32) if found == jnp.float64 else found


def write_folder(
    folder: Path,
    model: StoredModel,
    changes: Changes,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """config.json and safetensors files in `folder`. In memory: one shard, and one parameter three times."""
    writer = _ShardWriter(folder, shard_bytes)
    for _, stored, source in _changed(model, changes, progress):
        if isinstance(stored, tuple):
            values, scales = stored
            block = None if scales.shape[-1] == 1 and values.dtype != np.uint8 else BLOCK
            halves = quantized.halves(source, values.dtype == np.uint8, block)
            for half, where in zip(stored, halves, strict=True):
                writer.add(split_parameter(half, where))
        else:
            parts, cast = split_parameter(stored, source), changes.cast(stored)
            writer.add(
                {n: a if cast else a.astype(DTYPES[model.dtypes[n]], copy=False) for n, a in parts.items()}
            )
    for name in model.unused:
        writer.add({name: model.read_unused(name)})
    writer.close()
    write_json(folder / "config.json", changes.config(model))


def write_orbax(folder: Path, model: StoredModel, changes: Changes, progress: Progress | None = None) -> None:
    """config.json and, in a folder beside it, an orbax checkpoint. In memory: the whole model twice."""
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for path, stored, source in _changed(model, changes, progress):
        arrays |= arrays_of(path, stored)
        if not isinstance(stored, tuple):
            cast = NAMES[stored.dtype] if changes.cast(stored) else None
            dtypes |= {name: cast or model.dtypes[name] for name in source.names}
    arrays |= {unused_name(name): model.read_unused(name) for name in model.unused}
    store.write(folder / WEIGHTS, KIND, arrays, describe(model.sources, dtypes), compress=False)
    write_json(folder / "config.json", changes.config(model))


def copy_companions(source: Path, folder: Path, tokenizer: bool = True) -> None:
    """Tokenizer, chat template, generation settings and licence, where the source has them."""
    for pattern in (*COMPANIONS, *(TOKENIZER if tokenizer else ())):
        for file in source.glob(pattern):
            if file.is_file() and file.resolve() != (folder / file.name).resolve():
                with atomic_path(folder / file.name) as temporary:
                    shutil.copyfile(file, temporary)


@contextmanager
def scratch_folder(parent: Path, name: str, what: str = "unfinished") -> Iterator[Path]:
    """Yields an empty folder in `parent`, which is removed at the end if it is still there; what killed
    processes left unfinished goes too."""
    folder = parent / f".{name}.{what}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        store.remove_unfinished(parent, f".{name}")
        folder.mkdir()
        yield folder
    except OSError as error:
        # numpy tells of a full disk by two counts alone
        reason = error.strerror or f"short write, the disk may be full: {error}"
        raise CheckpointError(
            f"{parent / name}: cannot be written ({reason}); choose a folder with write permission and free "
            "space"
        ) from error
    except CheckpointError as error:
        if str(folder) not in str(error):
            raise
        raise CheckpointError(str(error).replace(str(folder), str(parent / name))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_free(path: Path, replace: bool) -> None:
    """CheckpointError when something is at `path` and is not to be replaced."""
    if os.path.lexists(path) and not replace:
        raise CheckpointError(f"{path}: exists already; choose another name or replace it with --force")


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a folder beside `path` that becomes `path` on success and vanishes on an error.

    replace: what is at `path` goes away in that moment, between two renames. Raises CheckpointError when
    something is there and is not to be replaced, or nothing can be written.
    """
    check_free(path, replace)
    with scratch_folder(path.parent, path.name) as made:
        yield made
        store.sync(made)
        # killed between the renames, this leaves both the old and the new beside `path`
        with scratch_folder(path.parent, path.name, "replaced") as old:
            if os.path.lexists(path):
                os.rename(path, old / path.name)
            try:
                os.rename(made, path)
            except OSError:
                if (old / path.name).exists():
                    os.rename(old / path.name, path)
                raise
            store.sync_folder(path.parent)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` whose file becomes `path` on success and vanishes on an error."""
    with scratch_folder(path.parent, path.name) as made:
        yield made / path.name
        store.sync(made)
        os.replace(made / path.name, path)
        store.sync_folder(path.parent)


def _changed(
    model: StoredModel, changes: Changes, progress: Progress | None
) -> Iterator[tuple[str, Stored, Source]]:
    """Each parameter by its path, as it is to be written, with the tensors that make it."""
    specs = flatten(spec(model.hparams))
    total, done = sum(tensor.size for tensor in specs.values()), 0
    for path, tensor in specs.items():
        source = model.sources[path]
        yield path, changes.of(model.read(path), tensor, source.names[0]), source
        done += tensor.size
        if progress is not None:
            progress(done, total)


class _ShardWriter:
    """Tensors as they come, in model.safetensors or, beyond `limit` bytes, in numbered files and an index."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._waiting: dict[str, np.ndarray] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._bytes = self._total = 0

    def add(self, tensors: Mapping[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            if self._waiting and self._bytes + tensor.nbytes > self._limit:
                self._flush()
            # a view would keep the whole parameter, of which another part may lie in another shard
            self._waiting[name] = tensor if tensor.base is None else np.array(tensor, order="C")
            self._bytes += tensor.nbytes
            self._total += tensor.nbytes

    def close(self) -> None:
        self._flush()
        if len(self._shards) == 1:
            os.replace(self._shards[0][0], self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (file, names) in enumerate(self._shards, 1):
            final = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            os.replace(file, self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self._folder / "model.safetensors.index.json", index)

    def _flush(self) -> None:
        file = self._folder / f".shard-{len(self._shards)}"
        write_safetensors(file, self._waiting)
        self._shards.append((file, list(self._waiting)))
        self._waiting, self._bytes = {}, 0
