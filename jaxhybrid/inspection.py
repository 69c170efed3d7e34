"""What a model is, read from its configuration, and whether its files hold it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxhybrid.engine import embedded_folder
from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.mapping import Mapping, map_tensors
from jaxhybrid.files.quantized import Stored
from jaxhybrid.files.source import ModelFiles
from jaxhybrid.files.stored import OrbaxModel, is_orbax
from jaxhybrid.hparams import (
    AttentionHparams,
    GatedDeltaHparams,
    Hparams,
    Layer,
    LightningHparams,
    Mamba1Hparams,
    Mamba2Hparams,
    MlaHparams,
    MlpHparams,
    RgLruHparams,
    RopeHparams,
    ShortConvHparams,
)
from jaxhybrid.model import spec
from jaxhybrid.params import flatten
from jaxhybrid.units import readable_count, readable_size


@dataclass(frozen=True)
class CacheBytes:
    """state: of one sequence's recurrent states. windowed: of its cells in layers with a sliding window, once
    the window is full. per_token: of every token in the other attention layers. All without rounding."""

    state: int
    windowed: int
    per_token: int


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    parameters: number of them in each part of the model. active: how many one token meets (embeddings count
    as one row). mapping: how the files' tensors fit, or None when the files could not be read, for the
    reason `unreadable`. stored_bytes: of all tensors in the files. quantization: the format of
    their quantized weights.
    """

    folder: Path
    hparams: Hparams
    parameters: dict[str, int]
    active: int
    cache: CacheBytes
    mapping: Mapping | None
    stored_bytes: int | None
    quantization: str | None
    unreadable: str | None

    @property
    def errors(self) -> tuple[str, ...]:
        """Why the model cannot be loaded; empty when it can."""
        found = () if self.unreadable is None else (self.unreadable,)
        return found + (() if self.mapping is None else self.mapping.errors)

    def raise_for_errors(self) -> None:
        """CheckpointError with the whole list, one a line, where there is anything."""
        if self.errors:
            found = f"{len(self.errors)} error{'s' if len(self.errors) > 1 else ''}"
            raise CheckpointError("\n".join([f"{self.folder}: {found}", *self.errors]))

    def as_json(self) -> dict[str, Any]:
        hp, mapping = self.hparams, self.mapping
        return {
            "model": str(self.folder),
            "family": hp.family,
            "layers": [describe_layer(layer) for layer in hp.layers],
            "attention_layer_indices": list(hp.attention_layer_indices),
            "recurrent_layer_indices": list(hp.recurrent_layer_indices or ()),
            "context_length": hp.context_length,
            "parameters": self.parameters,
            "active_parameters": self.active,
            "cache_bytes": vars(self.cache),
            "stored_bytes": self.stored_bytes,
            "quantization": self.quantization,
            "errors": list(self.errors),
            "unexpected": [] if mapping is None else list(mapping.unexpected),
        }

    def lines(self) -> Iterator[str]:
        """The same for people."""
        hp, total = self.hparams, sum(self.parameters.values())
        stored = "" if self.stored_bytes is None else f", {readable_size(self.stored_bytes)} in the files"
        stored += "" if self.quantization is None else f" ({self.quantization})"
        yield f"model       {self.folder}"
        yield f"family      {hp.family}"
        yield f"parameters  {readable_count(total)}, {readable_count(self.active)} active a token{stored}"
        for part, n in self.parameters.items():
            yield f"            {part} {readable_count(n)}"
        context = "" if hp.context_length is None else f", trained for {hp.context_length} tokens"
        yield f"sizes       width {hp.d_model}, vocabulary {hp.vocab_size}{context}"
        kinds = [
            f"{len(hp.recurrent_layer_indices or ())} recurrent",
            f"{len(hp.attention_layer_indices)} attention",
        ]
        yield f"layers      {hp.n_layers}: {', '.join(kinds)}"
        first = 0
        for described, same in itertools.groupby(map(describe_layer, hp.layers)):
            n = len(list(same))
            numbers = f"{first}" if n == 1 else f"{first}-{first + n - 1}"
            yield f"  {numbers:>8}  {described}"
            first += n
        yield f"cache       {readable_size(self.cache.state)} of state a sequence"
        if self.cache.windowed:
            windowed = readable_size(self.cache.windowed)
            yield f"            {windowed} of K/V a sequence in windows of {hp.window} tokens"
        yield f"            {readable_size(self.cache.per_token)} of K/V a token"
        if self.mapping is not None and self.mapping.unexpected:
            yield f"unexpected  {len(self.mapping.unexpected)} tensors that nothing uses"
            yield from (f"            {name}" for name in self.mapping.unexpected)


def inspect(path: str | Path | None = None, *, dtype: Any = jnp.float32) -> Inspection:
    """Describe the model in a folder or .gguf file, or of a hub id (None: the one inside this package).

    dtype: of K, V and convolution histories, for the bytes of a cache; the other states are float32. Raises
    CheckpointError or HparamsError when there is no model or its configuration is not understood; errors in
    the weights are in the result.
    """
    folder = embedded_folder() if path is None else resolve_model(str(path))
    found = ModelFiles(folder)
    hparams = hparams_from_config(found.config)
    quantization = None
    mapping = stored_bytes = unreadable = None
    try:
        quantization = Stored.of(found.config, found.where)
        if is_orbax(folder):
            stored_bytes = OrbaxModel(folder, found.config).saved.total_bytes
        else:
            files = found.tensors()
            mapping, stored_bytes = map_tensors(hparams, files), files.total_bytes
    except CheckpointError as error:
        unreadable = str(error)
    parameters, active = count_parameters(hparams)
    return Inspection(
        folder=folder,
        hparams=hparams,
        parameters=parameters,
        active=active,
        cache=cache_bytes(hparams, dtype),
        mapping=mapping,
        stored_bytes=stored_bytes,
        quantization=None if quantization is None else quantization.format,
        unreadable=unreadable,
    )


_PARTS = {"shared": "adapters"}


def count_parameters(hparams: Hparams) -> tuple[dict[str, int], int]:
    """Numbers of parameters by part, and how many of all one token meets."""
    parts: dict[str, int] = {}
    active = 0
    for path, tensor in flatten(spec(hparams)).items():
        where = path.split(".")
        part = where[0]
        share = 1.0
        if part == "layers":
            layer = hparams.layers[int(where[1])]
            part = "norms" if where[2].endswith("norm") else _PARTS.get(where[2], where[2])
            if part == "moe" and layer.moe is not None:
                part = "experts" if where[3] in ("gate_up", "up", "down") else "routers"
                share = layer.moe.top_k / layer.moe.n_experts if part == "experts" else 1.0
        elif part == "embed" and not hparams.tie_embeddings:
            share = 1 / hparams.vocab_size
        elif part in ("norm", "shared"):
            part = {"norm": "norms", "shared": "shared blocks"}[part]
        parts[part] = parts.get(part, 0) + tensor.size
        active += round(tensor.size * share)
    return parts, active


def cache_bytes(hparams: Hparams, dtype: Any = jnp.float32) -> CacheBytes:
    """What a cache holds of one sequence, from hparams alone."""
    size = jnp.dtype(dtype).itemsize
    state = sum(
        math.prod(shape) * (size if name == "conv" else 4)
        for i in hparams.recurrent_layer_indices or ()
        for name, shape in hparams.state_shapes(i).items()
    )
    cells = {i: size * sum(map(math.prod, hparams.cell_shapes(i))) for i in hparams.attention_layer_indices}
    return CacheBytes(
        state=state,
        windowed=sum((hparams.window or 0) * n for i, n in cells.items() if hparams.is_windowed_layer(i)),
        per_token=sum(n for i, n in cells.items() if not hparams.is_windowed_layer(i)),
    )


def describe_layer(layer: Layer) -> str:
    """What a layer holds, in one line."""
    parts = [_describe(hp) for hp in (layer.attention, layer.recurrent) if hp is not None]
    if layer.shared_mlp is not None:
        parts[0] = f"shared block ({parts[0]}, {_describe(layer.shared_mlp)})"
    if layer.moe is not None:
        moe = layer.moe
        parts.append(f"{moe.top_k} of {moe.n_experts} experts of {moe.d_ff}")
    if layer.mlp is not None:
        parts.append(_describe(layer.mlp))
    return ", ".join(parts)


def _describe(hp: Any) -> str:
    match hp:
        case AttentionHparams():
            window = "" if hp.window is None else f", window {hp.window}"
            heads = f"{hp.n_heads}/{hp.n_kv_heads} heads of {hp.head_dim}"
            return f"attention ({heads}, {_describe_rope(hp.rope)}{window})"
        case MlaHparams():
            sizes = f"{hp.n_heads} heads, latent {hp.kv_rank} + {hp.rope_dim}"
            return f"latent attention ({sizes}, {_describe_rope(hp.rope)})"
        case Mamba1Hparams():
            return f"mamba ({hp.d_inner} channels, state {hp.state_size})"
        case Mamba2Hparams():
            return f"mamba-2 ({hp.n_heads} heads of {hp.head_dim}, state {hp.state_size})"
        case GatedDeltaHparams():
            name = "gated delta net" if hp.decay == "head" else "kimi delta attention"
            return f"{name} ({hp.n_heads} heads of {hp.key_dim} x {hp.value_dim})"
        case ShortConvHparams():
            return f"short convolution ({hp.width} channels, {hp.conv_kernel} taps)"
        case RgLruHparams():
            return f"gated linear recurrence ({hp.width} channels)"
        case LightningHparams():
            return f"lightning attention ({hp.n_heads} heads of {hp.head_dim})"
        case MlpHparams():
            return f"mlp of {hp.d_ff}"
        case _:
            raise TypeError(f"{type(hp).__name__} has no description")


def _describe_rope(rope: RopeHparams | None) -> str:
    if rope is None:
        return "no positions"
    kind = "" if rope.scaling == "default" else f" {rope.scaling}"
    return f"rope {rope.theta:g}{kind} on {rope.dim}"
