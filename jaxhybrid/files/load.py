"""Hugging Face folders and GGUF files to parameters and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import Source, hparams_from_config, tensors_of
from jaxhybrid.files import quantized
from jaxhybrid.files.config import write_json
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.mapping import FLOATS, Mapping, map_tensors, read_parameter, split_parameter
from jaxhybrid.files.source import ModelFiles, Tensors, gguf_part
from jaxhybrid.files.tensors import write_safetensors
from jaxhybrid.model import spec
from jaxhybrid.ops.quantized import QuantizedMatrix, Weight, quantize_array
from jaxhybrid.params import Params, TensorSpec, flatten, unflatten
from jaxhybrid.text import Tokenizer
from jaxhybrid.weights import check_format, format_name, format_of

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each parameter."""


def load_params(
    path: str | Path, dtype: Any = None, *, quantize: str | None = None, progress: Progress | None = None
) -> Params:
    """Parameters of a Hugging Face folder, .gguf file or hub id, all tensors checked against `spec(hparams)`.

    dtype: of the weights; None keeps what the files have (float16 becomes bfloat16, whose range the
    activations need; blocks of a GGUF file become float32). Norms, decays and biases are float32 always.
    quantize: "int8", "int8_block" or "int4", done tensor by tensor, so that the model is never whole and
    unquantized in memory; files that hold quantized weights are read as they are, and so are the blocks of a
    GGUF file that have the layout asked for (Q8_0 for "int8_block", Q4_0 for "int4"). Raises CheckpointError
    or HparamsError; warns of tensors that nothing uses and of weights that are not finite.
    """
    folder = resolve_model(str(path))
    check_format(quantize)
    found_files = ModelFiles(folder, quantize)
    hparams = hparams_from_config(found_files.config)
    files = found_files.tensors()
    kept = quantized.Stored.of(found_files.config, found_files.where)
    if kept is not None and quantize not in (None, kept.format):
        raise CheckpointError(f"{folder}: its weights are {kept.format} already; load it without quantize")
    mapping = map_tensors(hparams, files)
    mapping.raise_for_errors()
    if mapping.unexpected:
        first, *others = mapping.unexpected
        more = f" and {len(others)} more" if others else ""
        warnings.warn(f"{folder}: tensor {first}{more} not used by this model", stacklevel=2)
    if (kept is None) != (not mapping.quantized):
        found_kind = "quantized" if mapping.quantized else "not quantized"
        raise CheckpointError(
            f"{folder}: the weights are {found_kind}, config.json says otherwise; {quantized.REMEDY}"
        )
    weights_dtype = _weights_dtype(files, mapping, kept, dtype)
    specs = flatten(spec(hparams))
    total = sum(s.size for s in specs.values())
    found: dict[str, Weight] = {}
    bad: list[str] = []
    done = 0
    for name, tensor in specs.items():
        if name in mapping.quantized:
            found[name], finite = _read_quantized(files, mapping.quantized[name], tensor, weights_dtype)
        else:
            stored = read_parameter(files, mapping.sources[name], tensor.shape)
            finite = _all_finite(stored)
            # the device may take over what was read: nothing else holds it
            array = jax.device_put(stored, may_alias=True)
            form = format_of(tensor, quantize)
            if form is None:
                found[name] = array.astype(jnp.float32 if tensor.float32 else weights_dtype)
            else:
                found[name] = quantize_array(array, form, weights_dtype)
                jax.block_until_ready(found[name])  # before the next tensor is read
        if not finite:
            bad.append(mapping.sources[name].names[0])
        done += tensor.size
        if progress is not None:
            progress(done, total)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        warnings.warn(
            f"tensor {bad[0]}{more} holds NaN or infinity; outputs will be meaningless", stacklevel=2
        )
    params = Params(unflatten(found), hparams)
    if kept is not None and kept.format != format_name(params):
        raise CheckpointError(
            f"{folder}: config.json says {kept.format}, the weights are {format_name(params)}; "
            f"{quantized.REMEDY}"
        )
    return params


def save_params(params: Params, folder: str | Path, config: dict[str, Any], dtype: Any = None) -> None:
    """Write config.json and model.safetensors (each whole or not at all); `dtype` of every tensor.

    Quantized weights are written as they are (see files/quantized.py) and the other tensors of such a model
    in their own dtype unless `dtype` is given, so that `load_params` gives the same bits back.
    `config` must describe the parameters: it is read back and compared with their hparams.
    """
    if hparams_from_config(config) != params.hparams:
        raise CheckpointError("config does not describe these parameters; nothing was written")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flat = flatten(params.tensors)
    out: dict[str, np.ndarray] = {}
    form = format_name(params)
    for path, source in tensors_of(params.hparams).items():
        leaf = flat[path]
        if isinstance(leaf, QuantizedMatrix):
            block = None if leaf.by_channel else leaf.shape[-1] // leaf.scales.shape[-1]
            values, scales = quantized.halves(source, leaf.packed, block)
            out |= split_parameter(np.asarray(leaf.values), values)
            out |= split_parameter(np.asarray(leaf.scales), scales)
        else:
            own = params.dtype if form is None else leaf.dtype
            out |= split_parameter(np.asarray(leaf).astype(jnp.dtype(dtype or own)), source)
    config = {name: value for name, value in config.items() if name != quantized.ENTRY}
    if form is not None:
        config |= quantized.entry(form, params.dtype)
    write_safetensors(folder / "model.safetensors", out)
    write_json(folder / "config.json", config)


def write_gguf(
    params: Params, path: str | Path, *, tokenizer: Tokenizer | None = None, dtype: str | None = None
) -> None:
    """Write a model as one GGUF file, which llama.cpp runs: all of it or, on any error, nothing.

    dtype: "F32", "F16", "BF16", "Q8_0" or "Q4_0", of matrices; norms, decays, convolutions and routers are
    F32, and rows that are no blocks of 32 are F16 in a quantized file. None: that of the parameters
    (int8_block and int4 become Q8_0 and Q4_0, bit for bit where the scales fit). Without a tokenizer the file
    runs on token ids only. One tensor at a time is in memory beside the parameters. Raises CheckpointError
    where the format has no place for something the model has, naming it, or the file cannot be written;
    UsageError for another dtype.
    """
    gguf_part("write").write(params, Path(path), tokenizer, dtype)


def _read_quantized(
    files: Tensors, pair: tuple[Source, Source], tensor: TensorSpec, dtype: jnp.dtype
) -> tuple[QuantizedMatrix, bool]:
    """The weight, and whether its scales are finite."""
    values, scales = (read_parameter(files, half, (*tensor.shape[:-1], half.shapes[0][-1])) for half in pair)
    matrix = QuantizedMatrix(
        jax.device_put(values, may_alias=True), jax.device_put(scales, may_alias=True), dtype
    )
    return matrix, _all_finite(scales)


def _weights_dtype(files: Tensors, mapping: Mapping, kept: quantized.Stored | None, dtype: Any) -> jnp.dtype:
    if dtype is not None:
        return jnp.dtype(dtype)
    if kept is not None:
        return jnp.dtype(kept.dtype)
    found = jnp.dtype(FLOATS[files.dtype(mapping.sources["embed.weight"].names[0])])
    return jnp.dtype(jnp.bfloat16) if found == jnp.float16 else found


def _all_finite(array: np.ndarray) -> bool:
    """Piece by piece, while it is in the cache."""
    flat = array.reshape(-1)
    if array.dtype == jnp.bfloat16:  # all ones in the exponent; numpy is slow at this dtype itself
        flat, exponent = flat.view(np.uint16), np.uint16(0x7F80)
        return all((p & exponent != exponent).all() for p in _pieces(flat))
    return all(np.isfinite(p).all() for p in _pieces(flat))


def _pieces(flat: np.ndarray) -> Iterator[np.ndarray]:
    size = 1 << 17
    return (flat[i : i + size] for i in range(0, len(flat), size))
