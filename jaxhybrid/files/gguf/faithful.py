"""Whether a file says all of a model: what has no place in the format is refused, not lost."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.files.gguf.container import open_container
from jaxhybrid.files.gguf.fields import first, of
from jaxhybrid.files.gguf.metadata import config_of
from jaxhybrid.hparams import AttentionHparams, GatedDeltaHparams, Hparams, Mamba1Hparams, Mamba2Hparams
from jaxhybrid.ops.rope import inverse_frequencies


def check_heard(path: Path, arch: str, hp: Hparams) -> None:
    """CheckpointError for what a file could say and llama.cpp would pass over, a warning of sizes that it
    does not run."""
    if (field := _ignored(arch, hp)) is not None:
        raise _no_place(path, arch, field)
    if (sizes := _not_run(arch, hp)) is not None:
        warnings.warn(f"{path}: llama.cpp runs {arch} models with {sizes} only", stacklevel=4)


def _not_run(arch: str, hp: Hparams) -> str | None:
    """What sizes llama.cpp 0.3.36 (its Python package) asserts; released models have them."""
    mixer = first(hp.recurrent)
    if arch in ("granitehybrid", "jamba") and mixer is not None and mixer.d_inner != 2 * hp.d_model:
        return f"a state space twice as wide as the model, {2 * hp.d_model} not {mixer.d_inner},"
    if isinstance(mixer, GatedDeltaHparams) and arch != "kimi-linear" and mixer.key_dim != mixer.value_dim:
        return f"keys as wide as values, {mixer.value_dim} not {mixer.key_dim},"
    return None


def _ignored(arch: str, hp: Hparams) -> str | None:
    for i, layer in enumerate(hp.layers):
        mixer = layer.recurrent
        if isinstance(mixer, Mamba1Hparams | Mamba2Hparams):
            if mixer.bias:
                return f"recurrent.bias = True in layer {i}"
            if not mixer.conv_bias and arch in ("mamba", "mamba2", "jamba"):
                return f"recurrent.conv_bias = False in layer {i}"
        if layer.moe is not None and arch == "lfm2moe" and layer.moe.multiplier != 1.0:
            return f"moe.multiplier = {layer.moe.multiplier} in layer {i}"
    if arch != "kimi-linear":
        return None
    heads = {of(part, "n_heads")(hp) for part in ("attention", "recurrent")}
    return f"{sorted(heads)} heads of its two mixers" if len(heads) > 1 else None


def _no_place(path: Path, arch: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: llama.cpp's {arch} has no place for {what} of this model; nothing was written"
    )


def check_written(file: Path, path: Path, arch: str, hp: Hparams) -> None:
    """Whether a file says all that the hparams do; CheckpointError naming what it does not."""
    _, config = config_of(open_container(file))
    again = hparams_from_config(config)
    if (field := _difference(_plain(hp), _plain(again))) is not None:
        raise _no_place(path, arch, field)


def _plain(hp: Hparams) -> Hparams:
    """The same model with what a file says in other words: folded multipliers, frequencies as factors."""

    def attention(a: Any) -> Any:
        if not isinstance(a, AttentionHparams):
            return a
        rope = a.rope
        if rope is not None and rope.scaling == "llama3":
            slower = inverse_frequencies(dataclasses.replace(rope, scaling="default")) / inverse_frequencies(
                rope
            )
            factors = tuple(slower.tolist())
            rope = type(rope)(
                rope.dim,
                rope.theta,
                "longrope",
                short_factors=factors,
                long_factors=factors,
                original_context=0,
            )
        elif rope is not None and rope.scaling == "longrope":
            same = rope.short_factors == rope.long_factors
            original = 0 if same else rope.original_context
            rope = dataclasses.replace(rope, long=False, factor=1.0, original_context=original)
        a = dataclasses.replace(a, rope=rope)
        if hp.family != "falcon_h1":
            return a
        return dataclasses.replace(a, in_multiplier=1.0, key_multiplier=1.0, out_multiplier=1.0)

    plain = dataclasses.replace(
        hp,
        attention=_map(hp.attention, attention),
        family="",
        residual_in_float32=False,
        context_length=None,
    )
    if hp.family != "falcon_h1":
        return plain
    one = {"in_multiplier": 1.0, "out_multiplier": 1.0, "multipliers": None}
    return dataclasses.replace(
        plain,
        recurrent=_map(
            hp.recurrent, lambda r: dataclasses.replace(r, **one) if isinstance(r, Mamba2Hparams) else r
        ),
        mlp=_map(hp.mlp, lambda m: dataclasses.replace(m, gate_multiplier=1.0, out_multiplier=1.0)),
        embedding_multiplier=1.0,
        logits_multiplier=1.0,
        tie_embeddings=False,
    )


def _map(value: Any, f: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(None if v is None else f(v) for v in value)
    return None if value is None else f(value)


def _difference(a: Hparams, b: Hparams) -> str | None:
    """The first field of a layer, or of the model, that differs by more than float32 rounds."""
    for i, (mine, theirs) in enumerate(zip(a.layers, b.layers, strict=False)):
        for field, ours, other in _fields(mine, theirs, ""):
            if not _same(ours, other):
                return f"{field} = {ours!r} in layer {i}"
    per_layer = {f.name for f in dataclasses.fields(a.layers[0])} | {"shared_blocks"}
    for field in dataclasses.fields(a):
        ours, other = getattr(a, field.name), getattr(b, field.name)
        if field.name not in per_layer and not _same(ours, other):
            return f"{field.name} = {ours!r}"
    return None


def _fields(a: Any, b: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """The leaves of two dataclasses of one type."""
    if type(a) is not type(b) or not dataclasses.is_dataclass(a):
        yield prefix, a, b
        return
    for field in dataclasses.fields(a):
        inner = f"{prefix}.{field.name}" if prefix else field.name
        yield from _fields(getattr(a, field.name), getattr(b, field.name), inner)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6) or a == b
    return a == b
