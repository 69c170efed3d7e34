"""Hugging Face folders to parameters and back."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import Source, family, hparams_from_config, tensors_of
from jaxhybrid.files.config import read_config, write_json
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.tensors import TensorFiles, write_safetensors
from jaxhybrid.model import spec
from jaxhybrid.params import Params, TensorSpec, flatten, unflatten

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each parameter."""

_FLOATS = {"F16": jnp.float16, "BF16": jnp.bfloat16, "F32": jnp.float32, "F64": jnp.float32}


def load_params(path: str | Path, dtype: Any = None, *, progress: Progress | None = None) -> Params:
    """Parameters of a Hugging Face folder or hub id, every tensor checked against `spec(hparams)`.

    dtype: of the weights; None keeps what the files have (float16 becomes bfloat16, whose range the
    activations need). Norms, decays and biases are float32 always. Raises CheckpointError or
    HparamsError; warns of tensors that nothing uses and of weights that are not finite.
    """
    folder = resolve_model(str(path))
    hparams = hparams_from_config(read_config(folder))
    kind = family(hparams.family)
    with TensorFiles(folder) as files:
        by_name = _canonical_names(files, kind.renamed)
        sources = _resolved(tensors_of(hparams), by_name, files)
        unused = sorted(set(by_name) - {n for s in sources.values() for n in s.names})
        unused = [n for n in unused if not any(re.fullmatch(p, n) for p in kind.ignored)]
        if hparams.tie_embeddings:
            unused = [n for n in unused if n != "lm_head.weight"]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            warnings.warn(f"{folder}: tensor {unused[0]}{more} not used by this model", stacklevel=2)
        weights_dtype = _weights_dtype(files, by_name[sources["embed.weight"].names[0]], dtype)
        specs = flatten(spec(hparams))
        total = sum(s.size for s in specs.values())
        found: dict[str, Array] = {}
        done = 0
        for path_, tensor_spec in specs.items():
            source = Source(tuple(by_name[n] for n in sources[path_].names), sources[path_].shape)
            found[path_] = _read(files, source, tensor_spec, weights_dtype)
            done += tensor_spec.size
            if progress is not None:
                progress(done, total)
        _warn_if_not_finite(found, sources)
    return Params(unflatten(found), hparams)


def save_params(params: Params, folder: str | Path, config: dict[str, Any], dtype: Any = None) -> None:
    """Write config.json and model.safetensors (each whole or not at all); `dtype` of every tensor.

    `config` must describe the parameters: it is read back and compared with their hparams.
    """
    if hparams_from_config(config) != params.hparams:
        raise CheckpointError("config does not describe these parameters; nothing was written")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flat = flatten(params.tensors)
    out: dict[str, np.ndarray] = {}
    for path, source in tensors_of(params.hparams).items():
        array = np.asarray(flat[path])
        array = array.astype(jnp.dtype(dtype or params.dtype))
        parts = array.reshape(len(source.names), *source.shape)
        out |= dict(zip(source.names, parts, strict=True))
    write_safetensors(folder / "model.safetensors", out)
    write_json(folder / "config.json", config)


def _canonical_names(files: TensorFiles, renamed: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Name as the family writes it: name in the file."""
    found = {}
    for name in files.names():
        canonical = name
        for pattern, replacement in renamed:
            canonical = re.sub(pattern, replacement, canonical)
        found[canonical] = name
    return found


def _resolved(sources: dict[str, Source], by_name: dict[str, str], files: TensorFiles) -> dict[str, Source]:
    for source in sources.values():
        for name in source.names:
            if name not in by_name:
                near = [n for n in by_name if n.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]]
                hint = f" (it has {near[0]})" if near else ""
                raise CheckpointError(
                    f"tensor {name} of shape {source.shape} is missing from the files{hint}; "
                    "the download is incomplete or config.json is of another model"
                )
            shape = files.shape(by_name[name])
            if shape != source.shape:
                raise CheckpointError(
                    f"{files.file_of(by_name[name])}: tensor {name} has shape {shape}, config.json "
                    f"asks for {source.shape}; the files do not belong together"
                )
            kind = files.dtype(by_name[name])
            if kind not in _FLOATS:
                raise CheckpointError(
                    f"{files.file_of(by_name[name])}: tensor {name} has dtype {kind}; "
                    "only F32, BF16, F16 and F64 weights can be read"
                )
    return sources


def _weights_dtype(files: TensorFiles, embedding: str, dtype: Any) -> jnp.dtype:
    if dtype is not None:
        return jnp.dtype(dtype)
    stored = _FLOATS[files.dtype(embedding)]
    return jnp.dtype(jnp.bfloat16 if stored == jnp.float16 else stored)


def _read(files: TensorFiles, source: Source, tensor: TensorSpec, dtype: jnp.dtype) -> Array:
    dtype = jnp.dtype(jnp.float32) if tensor.float32 else dtype
    if math.prod(source.shape) * len(source.names) != tensor.size:
        raise CheckpointError(f"tensor {source.names[0]}: {source.shape} does not make {tensor.shape}")
    if len(source.names) == 1:
        stored = files.read(source.names[0])
    else:
        stored = np.stack([files.read(name) for name in source.names])
    return jnp.asarray(stored.reshape(tensor.shape), dtype=dtype)


@jax.jit
def _finite(leaves: list[Array]) -> list[Array]:
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]


def _warn_if_not_finite(found: dict[str, Array], sources: dict[str, Source]) -> None:
    finite = _finite(list(found.values()))
    bad = [path for path, fine in zip(found, finite, strict=True) if not fine]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        warnings.warn(
            f"tensor {sources[bad[0]].names[0]}{more} holds NaN or infinity; outputs will be meaningless",
            stacklevel=3,
        )
