"""Hugging Face folders to parameters and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import hparams_from_config, tensors_of
from jaxhybrid.files.config import read_config, write_json
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.mapping import FLOATS, map_tensors, read_parameter, split_parameter
from jaxhybrid.files.tensors import TensorFiles, write_safetensors
from jaxhybrid.model import spec
from jaxhybrid.params import Params, flatten, unflatten

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each parameter."""


def load_params(path: str | Path, dtype: Any = None, *, progress: Progress | None = None) -> Params:
    """Parameters of a Hugging Face folder or hub id, every tensor checked against `spec(hparams)`.

    dtype: of the weights; None keeps what the files have (float16 becomes bfloat16, whose range the
    activations need). Norms, decays and biases are float32 always. Raises CheckpointError or
    HparamsError; warns of tensors that nothing uses and of weights that are not finite.
    """
    folder = resolve_model(str(path))
    hparams = hparams_from_config(read_config(folder))
    files = TensorFiles(folder)
    mapping = map_tensors(hparams, files)
    mapping.raise_for_errors()
    if mapping.unexpected:
        first, *others = mapping.unexpected
        more = f" and {len(others)} more" if others else ""
        warnings.warn(f"{folder}: tensor {first}{more} not used by this model", stacklevel=2)
    weights_dtype = _weights_dtype(files.dtype(mapping.sources["embed.weight"].names[0]), dtype)
    specs = flatten(spec(hparams))
    total = sum(s.size for s in specs.values())
    found: dict[str, Array] = {}
    bad: list[str] = []
    done = 0
    for name, tensor in specs.items():
        stored = read_parameter(files, mapping.sources[name], tensor.shape)
        if not _all_finite(stored):
            bad.append(mapping.sources[name].names[0])
        # the device may take over what was read: nothing else holds it
        array = jax.device_put(stored, may_alias=True)
        found[name] = array.astype(jnp.float32 if tensor.float32 else weights_dtype)
        done += tensor.size
        if progress is not None:
            progress(done, total)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        warnings.warn(
            f"tensor {bad[0]}{more} holds NaN or infinity; outputs will be meaningless", stacklevel=2
        )
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
        array = np.asarray(flat[path]).astype(jnp.dtype(dtype or params.dtype))
        out |= split_parameter(array, source)
    write_safetensors(folder / "model.safetensors", out)
    write_json(folder / "config.json", config)


def _weights_dtype(stored: str, dtype: Any) -> jnp.dtype:
    if dtype is not None:
        return jnp.dtype(dtype)
    found = jnp.dtype(FLOATS[stored])
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
