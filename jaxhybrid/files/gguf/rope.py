"""Rotary embeddings in a file's metadata and tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import show
from jaxhybrid.files.gguf.fields import Config, Meta
from jaxhybrid.hparams import Hparams
from jaxhybrid.ops.rope import inverse_frequencies


def rope_config(meta: Meta) -> Config:
    """`rope_parameters`; factors of single frequencies (Llama 3, LongRoPE) are in tensors."""
    found: Config = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base", float, 10000.0)}
    size, dim = meta.head_dim(), meta.get("rope.dimension_count")
    if dim is not None and dim != size:
        found["partial_rotary_factor"] = dim / size
    kind = meta.get("rope.scaling.type", str, "none")
    factor = meta.get("rope.scaling.factor", float) or meta.get("rope.scale_linear", float)
    original = meta.get("rope.scaling.original_context_length") or meta.get("context_length")
    if kind == "linear" or kind == "none" and factor not in (None, 0.0, 1.0):
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for key, name in _YARN.items():
            if (value := meta.get(f"rope.scaling.{key}", float)) is not None:
                found[name] = value
    elif kind not in ("none", "longrope"):
        raise CheckpointError(f"{meta.path}: rope.scaling.type {show(kind)} is not supported")
    if meta.has("rope_freqs.weight"):
        factors = meta.vector("rope_freqs.weight")
        found |= _each_factor(factors, factors, 1.0, original)
    elif meta.has("rope_factors_long.weight") and meta.has("rope_factors_short.weight"):
        amplitude = meta.get("rope.scaling.attn_factor", float)
        short, long = (meta.vector(f"rope_factors_{kind}.weight") for kind in ("short", "long"))
        found |= _each_factor(short, long, amplitude, original)
    elif kind == "longrope":
        raise CheckpointError(f"{meta.path}: its LongRoPE factors are missing; convert it again")
    return found


_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}


def _each_factor(short: list[float], long: list[float], amplitude: float | None, original: Any) -> Config:
    found: Config = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    found["original_max_position_embeddings"] = original
    return found if amplitude is None else found | {"attention_factor": amplitude}


def rope_metadata(hp: Hparams) -> Config:
    rope = next((hp.rope_of(i) for i in hp.attention_layer_indices if not hp.is_windowed_layer(i)), None)
    rope = rope or next((r for i in hp.attention_layer_indices if (r := hp.rope_of(i)) is not None), None)
    if rope is None:
        return {}
    found: Config = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim}
    if rope.scaling == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    elif rope.scaling == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_context,
        }  # its betas and amplitude are not written: llama.cpp reads them for few architectures, none of ours
    elif rope.scaling == "longrope":
        found |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": rope.original_context,
            "rope.scaling.attn_factor": rope.amplitude,
        }
    return found


def rope_tensors(hp: Hparams) -> dict[str, np.ndarray]:
    """Factors of single frequencies, float32 vectors."""
    rope = next((r for i in hp.attention_layer_indices if (r := hp.rope_of(i)) is not None), None)
    if rope is not None and rope.scaling == "llama3":
        plain = inverse_frequencies(dataclasses.replace(rope, scaling="default"))
        return {"rope_freqs.weight": np.asarray(plain / inverse_frequencies(rope), np.float32)}
    if rope is not None and rope.scaling == "longrope":
        return {
            "rope_factors_short.weight": np.asarray(rope.short_factors, np.float32),
            "rope_factors_long.weight": np.asarray(rope.long_factors, np.float32),
        }
    return {}
