"""Hugging Face folders to parameters and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import Source, hparams_from_config, tensors_of
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
    with TensorFiles(folder) as files:
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
        done = 0
        for name, tensor in specs.items():
            stored = read_parameter(files, mapping.sources[name], tensor.shape)
            found[name] = jnp.asarray(stored, dtype=jnp.float32 if tensor.float32 else weights_dtype)
            done += tensor.size
            if progress is not None:
                progress(done, total)
        _warn_if_not_finite(found, mapping.sources)
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
