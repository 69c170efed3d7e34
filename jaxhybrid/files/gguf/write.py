"""Writing a model as one GGUF file, by the tables that reading uses."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.families import tensors_of
from jaxhybrid.files.gguf.faithful import check_heard, check_written
from jaxhybrid.files.gguf.layout import ROTATED, Change, Part, Place, places
from jaxhybrid.files.gguf.metadata import metadata_of
from jaxhybrid.files.gguf.rope import rope_tensors
from jaxhybrid.files.gguf.vocabulary import tokenizer_metadata
from jaxhybrid.files.mapping import split_parameter
from jaxhybrid.files.stored import Stored
from jaxhybrid.files.writing import Progress, new_file
from jaxhybrid.hparams import Hparams
from jaxhybrid.ops.quantized import QuantizedMatrix, dense
from jaxhybrid.text import Tokenizer

DTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
_ARCH_OF = {
    "bamba": "granitehybrid", "falcon_h1": "falcon-h1", "falcon_mamba": "mamba", "gemma3_text": "gemma3",
    "granite": "granite", "granitemoehybrid": "granitehybrid", "jamba": "jamba", "kimi_linear": "kimi-linear",
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "llama": "llama", "mamba": "mamba", "mamba2": "mamba2",
    "mistral": "llama", "nemotron_h": "nemotron_h", "qwen3": "qwen3", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35", "qwen3_next": "qwen3next",
}  # fmt: skip
_ALWAYS_F32 = re.compile(
    r".*_norm\.weight|.*(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d\w*|shortconv\.conv)\.weight|.*(?<!\.weight)"
)
"""Tensors that llama.cpp keeps in float32 in every file."""


def write(
    path: Path,
    hp: Hparams,
    read: Callable[[str], Stored],
    tokenizer: Tokenizer | None,
    dtype: str,
    progress: Progress | None = None,
) -> None:
    """What `files.load.write_gguf` documents, of parameters that `read` gives by their dotted paths."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    arch = architecture_of(hp)
    check_heard(path, arch, hp)
    metadata = (
        metadata_of(arch, hp) | {ROTATED: "rotated"} | tokenizer_metadata(tokenizer, hp.vocab_size, path)
    )
    with new_file(path) as temporary:
        _write(temporary, arch, metadata, _Ours(hp, read), dtype, progress)
        check_written(temporary, path, arch, hp)


def dtype_of(form: str | None, dtype: jnp.dtype) -> str:
    """What matrices of a format, None for plain ones of `dtype`, are in a file."""
    if form is not None:
        return "Q4_0" if form == "int4" else "Q8_0"
    return {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}.get(dtype, "F32")


def architecture_of(hp: Hparams) -> str:
    """llama.cpp's name for models of these hparams; CheckpointError where it has none."""
    arch = _ARCH_OF.get(hp.family)
    if arch is None:
        known = ", ".join(sorted(_ARCH_OF))
        raise CheckpointError(f"{hp.family} models have no GGUF form here; {known} have")
    has_experts = any(layer.moe is not None for layer in hp.layers)
    if arch == "granitehybrid" and not hp.recurrent_layer_indices and not has_experts:
        return "granite"
    return "nemotron_h_moe" if arch == "nemotron_h" and has_experts else arch


def _write(
    file: Path, arch: str, metadata: dict[str, Any], ours: _Ours, dtype: str, progress: Progress | None
) -> None:
    writer = GGUFWriter(file, arch)
    writer.add_file_type({
        "F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16,
        "BF16": LlamaFileType.MOSTLY_BF16, "Q8_0": LlamaFileType.MOSTLY_Q8_0,
        "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    }[dtype])  # fmt: skip
    writer.add_quantization_version(2)
    for key, value in metadata.items():
        _add(writer, key, value)
    stored = list(_plan(arch, ours.hparams).items())
    extra = rope_tensors(ours.hparams)
    kinds = {name: _kind(name, wanted[0][1].shape, dtype) for name, wanted in stored}
    for name, vector in extra.items():
        writer.add_tensor_info(name, vector.shape, vector.dtype, vector.nbytes)
    for name, wanted in stored:
        shape, kind = wanted[0][1].shape, kinds[name]
        block, size = GGML_QUANT_SIZES[kind]
        n_bytes = math.prod(shape) // block * size
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            writer.add_tensor_info(name, shape, np.dtype(f"f{size}"), n_bytes)
        else:
            rows = (*shape[:-1], shape[-1] // block * size)
            writer.add_tensor_info(name, rows, np.dtype(np.uint8), n_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for vector in extra.values():
        writer.write_tensor_data(np.ascontiguousarray(vector, np.float32))
    total, done = sum(math.prod(wanted[0][1].shape) for _, wanted in stored), 0
    for name, wanted in stored:
        writer.write_tensor_data(_assemble(name, wanted, ours, kinds[name]))
        done += math.prod(wanted[0][1].shape)
        if progress is not None:
            progress(done, total)
    writer.close()


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int() if 0 <= value < 1 << 32:
            writer.add_uint32(key, value)
        case int():
            raise CheckpointError(f"{key} = {value} does not fit into 32 bits; nothing was written")
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _kind(name: str, shape: tuple[int, ...], dtype: str) -> GGMLQuantizationType:
    if len(shape) < 2 or _ALWAYS_F32.fullmatch(name):
        return GGMLQuantizationType.F32
    return GGMLQuantizationType["F16" if dtype in _BLOCKS and shape[-1] % 32 else dtype]


_BLOCKS = {"Q8_0": 34, "Q4_0": 18}
"""Bytes of 32 weights: a float16 scale, then integers as `QuantizedMatrix` has them."""

Wanted = list[tuple[str, Part, int, Place]]
"""What fills a stored tensor: our names, the parts, and where these begin among their places' stored rows."""


def _plan(arch: str, hp: Hparams) -> dict[str, Wanted]:
    found: dict[str, Wanted] = {}
    for name, place in places(arch, hp).items():
        done = 0
        for part in place.parts:
            width = place.n_columns if part.swapped else part.shape[-1]
            found.setdefault(part.name, []).append((name, part, done, place))
            done += part.count * width // place.n_columns
    if arch == "falcon-h1" and hp.tie_embeddings:
        # both ends have a multiplier of their own, so that they cannot share what is stored
        [(name, part, _, place)] = found["token_embd.weight"]
        head = dataclasses.replace(place, change=Change("times", hp.logits_multiplier))
        found["output.weight"] = [(name, part, 0, head)]
    return found


class _Ours:
    """Tensors by the names of the family's folder, the last few parameters kept."""

    def __init__(self, hparams: Hparams, read: Callable[[str], Stored]) -> None:
        self.hparams, self._sources = hparams, tensors_of(hparams)
        self._read = lru_cache(maxsize=1)(read)
        self._paths = {name: path for path, source in self._sources.items() for name in source.names}
        self._numbers = lru_cache(maxsize=2)(self._split_numbers)
        self._blocks = lru_cache(maxsize=2)(self._split_blocks)

    def numbers(self, name: str) -> np.ndarray:
        """float32, of our shape."""
        return self._numbers(self._paths[name])[name]

    def blocks(self, name: str, kind: GGMLQuantizationType) -> np.ndarray | None:
        """uint8, with the bytes of blocks along the last axis, where these hold the very numbers."""
        found = self._blocks(self._paths[name], kind.name) if kind.name in _BLOCKS else None
        return None if found is None else found[name]

    def _split_numbers(self, path: str) -> dict[str, np.ndarray]:
        stored = self._read(path)
        if isinstance(stored, tuple):
            values, scales = map(jnp.asarray, stored)
            stored = np.asarray(dense(QuantizedMatrix(values, scales, jnp.dtype(jnp.float32))))
        array = stored.astype(np.float32, copy=False)
        return split_parameter(array, self._sources[path])

    def _split_blocks(self, path: str, kind: str) -> dict[str, np.ndarray] | None:
        stored = self._read(path)
        if not isinstance(stored, tuple):
            return None
        values, scales = stored
        packed = values.dtype == np.uint8
        if packed != (kind == "Q4_0") or not packed and scales.shape[-1] * 32 != values.shape[-1]:
            return None
        short = scales.astype(np.float16)
        if not np.array_equal(short.astype(np.float32), scales):
            return None
        integers = values.view(np.uint8).reshape(*scales.shape, -1)
        array = np.concatenate([short[..., None].view(np.uint8), integers], axis=-1)
        source, size = self._sources[path], _BLOCKS[kind]
        shapes = tuple((*shape[:-1], shape[-1] // 32 * size) for shape in source.shapes)
        return split_parameter(array, dataclasses.replace(source, shapes=shapes))


def _assemble(stored: str, wanted: Wanted, ours: _Ours, kind: GGMLQuantizationType) -> np.ndarray:
    """One stored tensor as it is written."""
    shape = wanted[0][1].shape
    blocks = [ours.blocks(name, kind) if place.is_whole_rows else None for name, _, _, place in wanted]
    whole = all(block is not None for block in blocks)
    per_row = shape[-1] // 32 * _BLOCKS[kind.name] if whole else shape[-1]
    out = np.empty((*shape[:-1], per_row), np.uint8 if whole else np.float32)
    rows = out.reshape(-1, per_row)
    for block, (name, part, begin, place) in zip(blocks, wanted, strict=True):
        array = block if whole and block is not None else ours.numbers(name)
        if place.change is not None:
            array = place.change.apply(array).astype(np.float32)
        columns = per_row if whole else place.n_columns
        array = array.reshape(-1, columns)
        if place.columns is not None:
            array = _inverse(array.T, place.columns).T
        if place.rows is not None:
            array = _inverse_rows(array, place)
        if part.swapped:
            heads, inner, n = part.shape
            piece = array[begin : begin + heads * n].reshape(heads, n, inner).swapaxes(1, 2)
            rows[...] = piece.reshape(-1, n)
            continue
        piece = array[begin : begin + part.count * per_row // columns]
        rows[part.first : part.first + part.count] = piece.reshape(-1, per_row)
    if whole:
        return out
    with np.errstate(over="ignore"):
        short = np.ascontiguousarray(quants.quantize(out, kind))
    if kind == GGMLQuantizationType.F16 and np.isinf(short).any() and np.isfinite(out).all():
        raise CheckpointError(f"tensor {stored} holds values beyond F16; write it as BF16 or F32")
    return short


def _inverse_rows(array: np.ndarray, place: Place) -> np.ndarray:
    assert place.rows is not None
    return _inverse(array.reshape(len(place.rows), -1), place.rows).reshape(array.shape)


def _inverse(array: np.ndarray, order: np.ndarray) -> np.ndarray:
    out = np.empty_like(array)
    out[order] = array
    return out
