"""Feed-forward blocks, with a gate and without."""

from __future__ import annotations

import jax
from jax import Array

from jaxhybrid.hparams import MlpHparams
from jaxhybrid.ops.activations import activation
from jaxhybrid.ops.adapter import adapter_spec, with_adapter
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.scale import times
from jaxhybrid.params import TensorSpec, Tree, matrix, vector


def mlp_spec(hp: MlpHparams, d_model: int) -> Tree:
    """`gate_up` stacks both input matrices, so that a mesh can split the ffn axis of each."""
    spec: Tree = {"down": matrix(d_model, hp.d_ff, "embed", "ffn")}
    if hp.gated:
        spec["gate_up"] = TensorSpec(
            (2, hp.d_ff, d_model), (None, "ffn", "embed"), fan_in=d_model, quantizable=True
        )
    else:
        spec["up"] = matrix(hp.d_ff, d_model, "ffn", "embed")
    if hp.bias:
        spec["down_bias"] = vector(d_model, "embed")
        if hp.gated:
            spec["gate_up_bias"] = TensorSpec((2, hp.d_ff), (None, "ffn"), init="zeros", float32=True)
        else:
            spec["up_bias"] = vector(hp.d_ff, "ffn")
    if hp.sigmoid_gate:
        spec["sigmoid_gate"] = matrix(1, d_model, None, "embed")
    return spec


def mlp_adapters_spec(hp: MlpHparams, d_model: int) -> Tree:
    """What `mlp` finds beside its own parameters when there are adapters."""
    if hp.adapter_rank is None:
        return {}
    return {"gate_up_adapter": adapter_spec(2 * hp.d_ff, d_model, hp.adapter_rank)}


def mlp(p: Tree, x: Array, hp: MlpHparams) -> Array:
    """down(act(gate x) * up x): x [..., D] to [..., D] (GLU variants, arXiv:2002.05202); see MlpHparams."""
    act = activation(hp.activation)
    if hp.gated:
        bias = p["gate_up_bias"].reshape(-1) if hp.bias else None
        both = linear(x, p["gate_up"].reshape(2 * hp.d_ff, -1), bias)
        both = with_adapter(p, "gate_up", x, both)
        gate, up = both[..., : hp.d_ff], both[..., hp.d_ff :]
        hidden = act(times(gate, hp.gate_multiplier)) * up
    else:
        hidden = act(linear(x, p["up"], p.get("up_bias")))
    y = times(linear(hidden, p["down"], p.get("down_bias")), hp.out_multiplier)
    if hp.sigmoid_gate:
        y = y * jax.nn.sigmoid(linear(x, p["sigmoid_gate"]))
    return y
