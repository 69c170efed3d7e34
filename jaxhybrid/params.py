"""The parameter tree: one `TensorSpec` a tensor drives shapes, dtypes, initialisation and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from jaxhybrid.hparams import Hparams

Tree = dict[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, logical axis names and initialiser of one tensor.

    `axes` has one name per dimension, for a device mesh to map ("embed", "heads", "ffn", ...; None is
    never split). `float32` marks what stays float32 whatever the weights' dtype (norms, decays).
    `quantizable` marks weights that only `linear` and the experts' products read.
    `init` is one of normal, zeros, ones, a_log, dt_bias; `fan_in` scales normal by 1/sqrt(fan_in).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    fan_in: int | None = None
    float32: bool = False
    quantizable: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"axes {self.axes} do not name the dimensions of {self.shape}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def matrix(n_out: int, n_in: int, out_axis: str | None, in_axis: str | None) -> TensorSpec:
    """A weight of `linear`, stored [out, in] as Hugging Face stores it."""
    return TensorSpec((n_out, n_in), (out_axis, in_axis), fan_in=n_in, quantizable=True)


def vector(n: int, axis: str | None, init: str = "zeros") -> TensorSpec:
    """A bias, norm weight or decay: always float32."""
    return TensorSpec((n,), (axis,), init=init, float32=True)


class Params(struct.PyTreeNode):
    """The tensors of a model (nested dicts, layer numbers as string keys) and its static hparams."""

    tensors: Tree
    hparams: Hparams = struct.field(pytree_node=False)

    def __getitem__(self, key: str) -> Any:
        return self.tensors[key]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weights, which is that of the activations."""
        return self.tensors["embed"]["weight"].dtype


def flatten(tree: Tree) -> dict[str, Any]:
    """Nested dicts to {"layers.0.mlp.down": leaf}."""
    return flatten_dict(tree, sep=".")


def unflatten(flat: dict[str, Any]) -> Tree:
    """The inverse of `flatten`."""
    return unflatten_dict(flat, sep=".")


def initialise(spec: Tree, key: Array, dtype: jnp.dtype) -> Tree:
    """Random tensors for a tree of specs; each tensor's key depends only on its place in the tree."""
    flat = flatten(spec)
    return unflatten(
        {
            path: _initial(leaf, jax.random.fold_in(key, i), dtype)
            for i, (path, leaf) in enumerate(sorted(flat.items()))
        }
    )


def _initial(spec: TensorSpec, key: Array, dtype: jnp.dtype) -> Array:
    dtype = jnp.dtype(jnp.float32) if spec.float32 else dtype
    match spec.init:
        case "zeros":
            return jnp.zeros(spec.shape, dtype)
        case "ones":
            return jnp.ones(spec.shape, dtype)
        case "normal":
            scale = 1 / math.sqrt(spec.fan_in or spec.shape[-1])
            return (scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)
        case "a_log":  # decay rates spread over 1 to 16, as in the Mamba-2 reference
            return jnp.log(jax.random.uniform(key, spec.shape, jnp.float32, 1.0, 16.0)).astype(dtype)
        case "dt_bias":  # softplus(bias) log-uniform over 1e-3 to 1e-1, as in the Mamba-2 reference
            log_dt = jax.random.uniform(key, spec.shape, jnp.float32, math.log(1e-3), math.log(1e-1))
            dt = jnp.exp(log_dt)
            return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)
        case _:
            raise ValueError(f"unknown initialiser {spec.init!r}")
