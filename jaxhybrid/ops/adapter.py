"""Low-rank corrections to a linear map (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from jax import Array

from jaxhybrid.ops.linear import linear
from jaxhybrid.params import Tree, matrix


def adapter_spec(n_out: int, n_in: int, rank: int) -> Tree:
    return {"down": matrix(rank, n_in, None, None), "up": matrix(n_out, rank, None, None)}


def with_adapter(p: Tree, name: str, x: Array, y: Array) -> Array:
    """y [..., out], what the map `name` made of x [..., in], plus what its adapter adds if it has one."""
    adapter = p.get(f"{name}_adapter")
    return y if adapter is None else y + linear(linear(x, adapter["down"]), adapter["up"])
