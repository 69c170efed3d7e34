"""Which model a saved cache belongs to: its fields, and a fingerprint of its weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxhybrid.errors import CheckpointError
from jaxhybrid.ops.adapted import AdaptedMatrix
from jaxhybrid.ops.quantized import QuantizedMatrix
from jaxhybrid.params import Params, flatten


def describe(params: Params) -> dict[str, Any]:
    """JSON that `check` compares: architecture, every field of the hparams, the weights' fingerprint."""
    fields = {f.name: repr(getattr(params.hparams, f.name)) for f in dataclasses.fields(params.hparams)}
    return {
        "architecture": params.hparams.family,
        "hparams": fields,
        "weights": weights_fingerprint(params),
    }


def check(saved: dict[str, Any], params: Params, path: object) -> None:
    """CheckpointError naming the first field in which a saved description differs from `params`."""
    mine, saved = describe(params), saved if isinstance(saved, dict) else {}
    pairs = [("architecture", saved.get("architecture"), mine["architecture"])]
    fields = dict(saved.get("hparams") or {})
    for name in sorted(mine["hparams"].keys() | fields.keys()):
        pairs.append((f"hparams.{name}", fields.get(name), mine["hparams"].get(name)))
    pairs.append(("weights", saved.get("weights"), mine["weights"]))
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise CheckpointError(
                f"{path}: {name} differs, saved {_short(theirs)}, this model has {_short(ours)}; "
                "load it with the model and dtype it was saved with"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def weights_fingerprint(params: Params) -> str:
    """64 bits of every tensor with its name, shape and dtype, hashed; computed where the tensors are."""
    digest = hashlib.sha256()
    for name, tensor in _arrays(params):
        lanes = np.asarray(_lanes(tensor))
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {lanes.tolist()}\n".encode())
    return digest.hexdigest()


def _arrays(params: Params) -> Iterator[tuple[str, Array]]:
    for name, tensor in sorted(flatten(params.tensors).items()):
        while isinstance(tensor, AdaptedMatrix):
            yield f"{name}.down", tensor.down
            yield f"{name}.up", tensor.up
            tensor = tensor.base
        if isinstance(tensor, QuantizedMatrix):
            yield f"{name}.values", tensor.values
            yield f"{name}.scales", tensor.scales
        else:
            yield name, tensor


@jax.jit
def _lanes(tensor: Array) -> Array:
    """uint32 [2]: sums over the elements' bits, each stirred with its place."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[tensor.dtype.itemsize]
    bits = lax.bitcast_convert_type(tensor, width).reshape(-1).astype(jnp.uint32)
    place = lax.iota(jnp.uint32, bits.size)
    sums = []
    for factor in (0x9E3779B1, 0x85EBCA77):
        h = (bits ^ (place * jnp.uint32(factor))) * jnp.uint32(0x7FEB352D)
        h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
        sums.append(jnp.sum(h ^ (h >> 16), dtype=jnp.uint32))
    return jnp.stack(sums)
