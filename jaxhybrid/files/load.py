"""Models on disk to parameters and back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.families import hparams_from_config, tensors_of
from jaxhybrid.files import quantized
from jaxhybrid.files.header import NAMES
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.source import gguf_part
from jaxhybrid.files.stored import OrbaxModel, Stored, StoredModel, open_model, warn_of_unexpected
from jaxhybrid.files.writing import (
    SHARD_BYTES,
    Changes,
    Progress,
    copy_companions,
    new_folder,
    scratch_folder,
    weights_dtype,
    write_folder,
)
from jaxhybrid.model import spec
from jaxhybrid.ops.quantized import QuantizedMatrix, Weight, quantize_array
from jaxhybrid.params import Params, TensorSpec, Tree, flatten, unflatten
from jaxhybrid.text import Tokenizer
from jaxhybrid.weights import check_format, format_name, format_of, refuse_adapted


def load_params(
    path: str | Path,
    dtype: Any = None,
    *,
    quantize: str | None = None,
    shardings: Sharding | Tree | None = None,
    progress: Progress | None = None,
) -> Params:
    """Parameters of a model folder (Hugging Face's, or orbax as `python -m jaxhybrid.convert` writes it), a
    .gguf file or a hub id, every tensor checked against `spec(hparams)`.

    dtype: of the weights; None keeps what the files have (float16 becomes bfloat16, whose range the
    activations need; blocks of a GGUF file become float32). Norms, decays and biases are float32 always.
    quantize: "int8", "int8_block" or "int4", done tensor by tensor, so that the model is never whole and
    unquantized in memory; files that hold quantized weights are read as they are, and so are the blocks of a
    GGUF file that have the layout asked for (Q8_0 for "int8_block", Q4_0 for "int4"). shardings: one jax
    Sharding for all parameters, or a tree of them like `spec(hparams)`; an orbax folder is then read by each
    process only where its devices need it. Raises CheckpointError or HparamsError; warns of tensors that
    nothing uses and of weights that are not finite.
    """
    folder = resolve_model(str(path))
    check_format(quantize)
    model = open_model(folder, quantize)
    warn_of_unexpected(model, folder)
    specs = flatten(spec(model.hparams))
    places = _places(shardings, specs)
    wanted = _weights_dtype(model, dtype)
    if places and isinstance(model, OrbaxModel) and model.kept is None and quantize is None:
        dtypes = {name: jnp.float32 if tensor.float32 else wanted for name, tensor in specs.items()}
        return Params(unflatten(model.saved.place(places, dtypes)), model.hparams)
    total = sum(s.size for s in specs.values())
    found: dict[str, Weight] = {}
    bad: list[str] = []
    done = 0
    for name, tensor in specs.items():
        stored = model.read(name)
        finite = _all_finite(stored[1] if isinstance(stored, tuple) else stored)
        # the device may take over what was read: nothing else holds it
        device = partial(jax.device_put, may_alias=True, device=places.get(name))
        if isinstance(stored, tuple):
            found[name] = QuantizedMatrix(device(stored[0]), device(stored[1]), wanted)
        elif (form := format_of(tensor, quantize)) is None:
            found[name] = device(stored).astype(jnp.float32 if tensor.float32 else wanted)
        else:
            found[name] = quantize_array(device(stored), form, wanted)
            jax.block_until_ready(found[name])  # before the next tensor is read
        if not finite:
            bad.append(model.sources[name].names[0])
        done += tensor.size
        if progress is not None:
            progress(done, total)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        warnings.warn(
            f"tensor {bad[0]}{more} holds NaN or infinity; outputs will be meaningless", stacklevel=2
        )
    params = Params(unflatten(found), model.hparams)
    if model.kept is not None and model.kept.format != format_name(params):
        raise CheckpointError(
            f"{folder}: config.json says {model.kept.format}, the weights are {format_name(params)}; "
            f"{quantized.REMEDY}"
        )
    return params


def save_params(
    params: Params,
    folder: str | Path,
    config: dict[str, Any],
    dtype: Any = None,
    *,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder: config.json and model.safetensors, or above `shard_bytes` several files
    with an index.

    dtype: of every tensor. like: the folder that the parameters came from; its tokenizer, templates and
    licence are copied, and each tensor gets the dtype (unless `dtype` is given) and the name that it has
    there. Without both all tensors have the dtype of the weights, but beside quantized weights, which are
    written as they are (see files/quantized.py), their own, so that `load_params` gives the same bits back.
    `config` must describe the parameters: it is read back and compared with their hparams. A folder that is
    there gets the files one by one, each whole; one that is not appears whole or not at all.
    """
    model = _ParamsModel(
        params, config, dtype, None if like is None else open_model(resolve_model(str(like)))
    )
    target = Path(folder)
    if not target.exists():
        with new_folder(target) as made:
            _save_into(made, model, like, shard_bytes)
        return
    with scratch_folder(target, "save") as made:
        _save_into(made, model, like, shard_bytes)
        # an older single file would go before shards, and an older index would ask for other shards
        for old in [*target.glob("model*.safetensors"), *target.glob("model.safetensors.index.json")]:
            if not (made / old.name).exists():
                old.unlink()
        for file in sorted(made.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, target / file.name)


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
    refuse_adapted(params)
    flat, gguf = flatten(params.tensors), gguf_part("write")
    kind = gguf.dtype_of(format_name(params), params.dtype) if dtype is None else dtype
    gguf.write(Path(path), params.hparams, lambda name: _stored(flat[name]), tokenizer, kind)


def _stored(leaf: Weight) -> Stored:
    if isinstance(leaf, QuantizedMatrix):
        return np.asarray(leaf.values), np.asarray(leaf.scales)
    return np.asarray(leaf)


def _save_into(folder: Path, model: _ParamsModel, like: str | Path | None, shard_bytes: int) -> None:
    write_folder(folder, model, Changes(), shard_bytes=shard_bytes)
    if like is not None:
        copy_companions(resolve_model(str(like)), folder)


class _ParamsModel:
    """Parameters in memory, as if they were on a disk."""

    def __init__(self, params: Params, config: dict[str, Any], dtype: Any, like: StoredModel | None) -> None:
        refuse_adapted(params)
        if hparams_from_config(config) != params.hparams:
            raise CheckpointError("config does not describe these parameters; nothing was written")
        if like is not None and like.hparams != params.hparams:
            raise CheckpointError(
                "like: its configuration does not describe these parameters; nothing was written"
            )
        self.hparams, self.config, self._like = params.hparams, config, like
        self._flat = flatten(params.tensors)
        form = format_name(params)
        self.kept = None if form is None else quantized.Stored(form, params.dtype.name)
        self.sources = tensors_of(params.hparams) if like is None else like.sources
        self.unused = () if like is None else like.unused
        self.unexpected = ()
        self.dtypes: dict[str, str] = {}
        for path, source in self.sources.items():
            own = jnp.dtype(dtype or (params.dtype if form is None else self._flat[path].dtype))
            kinds = {} if like is None or dtype is not None else like.dtypes
            self.dtypes |= {name: kinds.get(name, NAMES[own]) for name in source.names}

    def read(self, path: str) -> Stored:
        return _stored(self._flat[path])

    def read_unused(self, name: str) -> np.ndarray:
        assert self._like is not None
        return self._like.read_unused(name)


def _places(shardings: Sharding | Tree | None, specs: dict[str, TensorSpec]) -> dict[str, Sharding]:
    """The sharding of each parameter; none where none is given."""
    if shardings is None:
        return {}
    if isinstance(shardings, Sharding):
        return dict.fromkeys(specs, shardings)
    places = flatten(shardings)
    if places.keys() != specs.keys():
        odd = min(places.keys() ^ specs.keys())
        raise UsageError(f"shardings: {odd} is missing or no parameter; give a tree like spec(hparams)")
    return places


def _weights_dtype(model: StoredModel, dtype: Any) -> jnp.dtype:
    if dtype is not None:
        return jnp.dtype(dtype)
    found = weights_dtype(model)
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
