"""Quantized parameters in safetensors files: NAME.values and NAME.scales instead of each tensor NAME.

config.json says so under "jaxhybrid_quantization": {"format": ..., "dtype": ...}, dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import Source
from jaxhybrid.files.config import show
from jaxhybrid.files.source import Tensors
from jaxhybrid.ops.quantized import BLOCK, FORMATS

ENTRY = "jaxhybrid_quantization"
VALUES, SCALES = ".values", ".scales"
_DTYPES = ("float32", "bfloat16")
REMEDY = "the files do not belong together; save or download them again"


@dataclass(frozen=True)
class Stored:
    """What config.json says of quantized weights. dtype: of the activations."""

    format: str
    dtype: str

    @staticmethod
    def of(config: Mapping[str, Any], where: object) -> Stored | None:
        """The entry of a configuration, None where it has none; CheckpointError where it is no use."""
        entry = config.get(ENTRY)
        if entry is None:
            return None
        for field, known in (("format", FORMATS), ("dtype", _DTYPES)):
            if not isinstance(entry, dict) or entry.get(field) not in known:
                raise CheckpointError(
                    f"{where}: {ENTRY} is {show(str(entry))}, its {field} none of "
                    f"{', '.join(known)}; {REMEDY}"
                )
        return Stored(entry["format"], entry["dtype"])


def halves(source: Source, packed: bool, block: int | None) -> tuple[Source, Source]:
    """The sources of the values and of the scales of a quantized parameter."""

    def with_width(suffix: str, divisor: int | None) -> Source:
        return Source(
            tuple(name + suffix for name in source.names),
            tuple((*s[:-1], 1 if divisor is None else s[-1] // divisor) for s in source.shapes),
            source.order,
        )

    return with_width(VALUES, 2 if packed else 1), with_width(SCALES, block)


def find(source: Source, files: Tensors) -> tuple[Source, Source] | None:
    """The halves of a parameter that the files hold quantized, None where they do not.

    They tell its format: bytes (U8) are int4, and one scale a row is one scale a channel.
    """
    first, shape = source.names[0], source.shapes[0]
    if not any(name + end in files for name in source.names for end in (VALUES, SCALES)):
        return None
    packed = first + VALUES in files and files.dtype(first + VALUES) == "U8"
    by_channel = first + SCALES in files and files.shape(first + SCALES)[-1:] == (1,) and not packed
    return halves(source, packed, None if by_channel or shape[-1] < BLOCK else BLOCK)


def faults(pair: tuple[Source, Source], files: Tensors) -> Iterator[str]:
    """Sentences about tensors of a quantized parameter that are missing or not as they must be."""
    values, scales = pair
    kinds = ("I8", "U8"), ("F32",)
    for part, dtypes in zip(pair, kinds, strict=True):
        for name, shape in zip(part.names, part.shapes, strict=True):
            if name not in files:
                yield f"tensor {name} of shape {shape} is missing from the files; {REMEDY}"
            elif files.shape(name) != shape:
                where = f"{files.file_of(name)}: tensor {name}"
                yield f"{where} has shape {files.shape(name)}, expected is {shape}; {REMEDY}"
            elif files.dtype(name) not in dtypes:
                where = f"{files.file_of(name)}: tensor {name}"
                yield f"{where} has dtype {files.dtype(name)}, expected is {' or '.join(dtypes)}; {REMEDY}"
    if len({files.dtype(name) for name in values.names if name in files}) > 1:
        yield f"tensors {values.names[0]} and others are of different dtypes; {REMEDY}"


def entry(form: str, dtype: jnp.dtype) -> dict[str, Any]:
    """What to add to config.json."""
    return {ENTRY: {"format": form, "dtype": dtype.name}}
