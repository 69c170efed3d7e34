"""Which tensors of a checkpoint make which parameters, and everything that does not fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import Source, family, tensors_of
from jaxhybrid.files import quantized
from jaxhybrid.files.header import DTYPES
from jaxhybrid.files.source import Tensors
from jaxhybrid.files.tensors import aligned_empty
from jaxhybrid.hparams import Hparams
from jaxhybrid.model import spec
from jaxhybrid.params import flatten

FLOATS = {"F16": jnp.float16, "BF16": jnp.bfloat16, "F32": jnp.float32, "F64": jnp.float32}
"""What each readable dtype becomes."""


@dataclass(frozen=True)
class Mapping:
    """sources: of each parameter, by dotted path, with the names that the files have. quantized: the values
    and scales of those that the files hold quantized.

    missing, misshaped, unreadable: sentences, each about one tensor; with any of them the model cannot be
    loaded. unexpected: names of tensors that nothing uses.
    """

    sources: dict[str, Source]
    quantized: dict[str, tuple[Source, Source]]
    missing: tuple[str, ...]
    misshaped: tuple[str, ...]
    unreadable: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def errors(self) -> tuple[str, ...]:
        return self.missing + self.misshaped + self.unreadable

    def raise_for_errors(self) -> None:
        """CheckpointError with the first error, and how many more there are."""
        if self.errors:
            more = len(self.errors) - 1
            rest = f" (and {more} more; python -m jaxhybrid.inspect lists all)" if more else ""
            raise CheckpointError(self.errors[0] + rest)


def map_tensors(hparams: Hparams, files: Tensors) -> Mapping:
    """Find every parameter of a model in its files, without reading any."""
    kind = family(hparams.family)
    by_name = {canonical(name, kind.renamed): name for name in files.names()}
    sources = tensors_of(hparams)
    missing, misshaped, unreadable = [], [], []
    found: dict[str, Source] = {}
    halves: dict[str, tuple[Source, Source]] = {}
    specs = flatten(spec(hparams))
    for path, source in sources.items():
        pair = quantized.find(source, files) if specs[path].quantizable else None
        if pair is not None:
            found[path], halves[path] = source, pair
            misshaped += quantized.faults(pair, files)
            continue
        names = []
        for name, expected in zip(source.names, source.shapes, strict=True):
            stored = by_name.get(canonical(name, kind.renamed))
            names.append(stored or name)
            if stored is None:
                missing.append(_missing(name, expected, by_name))
                continue
            where = f"{files.file_of(stored)}: tensor {stored}"
            if files.shape(stored) != expected:
                misshaped.append(
                    f"{where} has shape {files.shape(stored)}, config.json asks for {expected}; the files do "
                    "not belong together"
                )
            elif files.dtype(stored) not in FLOATS:
                unreadable.append(
                    f"{where} has dtype {files.dtype(stored)}; only F32, BF16, F16 and F64 can be read"
                )
        found[path] = Source(tuple(names), source.shapes, source.order)
    used = {name for source in found.values() for name in source.names}
    used |= {name for pair in halves.values() for half in pair for name in half.names}
    ignored = [*kind.ignored, *([r"lm_head\.weight"] if hparams.tie_embeddings else [])]
    unexpected = [
        stored
        for name, stored in sorted(by_name.items())
        if stored not in used and not any(re.fullmatch(p, name) for p in ignored)
    ]
    return Mapping(found, halves, tuple(missing), tuple(misshaped), tuple(unreadable), tuple(unexpected))


def read_parameter(files: Tensors, source: Source, shape: tuple[int, ...]) -> np.ndarray:
    """One parameter of `shape` from its tensors."""
    if sum(map(math.prod, source.shapes)) != math.prod(shape):
        raise CheckpointError(f"tensor {source.names[0]}: {source.shapes} do not make {shape}")
    kinds = {files.dtype(name) for name in source.names}
    if len(kinds) == 1:
        stored, done = aligned_empty((math.prod(shape),), DTYPES[kinds.pop()]), 0
        for name, part in zip(source.names, source.shapes, strict=True):
            files.read(name, stored[done : done + math.prod(part)])
            done += math.prod(part)
    else:
        stored = np.concatenate([files.read(name).reshape(-1) for name in source.names])
    if source.order is not None:
        stored = stored.reshape(len(source.order), -1)[np.asarray(source.order)]
    return stored.reshape(shape)


def split_parameter(parameter: np.ndarray, source: Source) -> dict[str, np.ndarray]:
    """The inverse of `read_parameter`."""
    n_rows = [shape[0] if shape else 1 for shape in source.shapes]
    stored = parameter.reshape(sum(n_rows), -1)
    if source.order is not None:
        restored = np.empty_like(stored)
        restored[np.asarray(source.order)] = stored
        stored = restored
    parts = np.split(stored, np.cumsum(n_rows)[:-1])
    return {
        name: part.reshape(shape)
        for name, shape, part in zip(source.names, source.shapes, parts, strict=True)
    }


def canonical(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """One of the names that a tensor has in files of different writers."""
    for pattern, replacement in renamed:
        name = re.sub(pattern, replacement, name)
    return name


def _missing(name: str, shape: tuple[int, ...], by_name: dict[str, str]) -> str:
    near = [n for n in by_name if n.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]]
    hint = f" (it has {near[0]})" if near else ""
    return (
        f"tensor {name} of shape {shape} is missing from the files{hint}; "
        "the download is incomplete or config.json is of another model"
    )
