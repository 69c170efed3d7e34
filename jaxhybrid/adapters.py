"""LoRA adapters (arXiv:2106.09685) beside frozen parameters, and their folders, which are PEFT's.

An adapter names modules as Hugging Face does, so it knows nothing of which of them are one parameter here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.families import Source, family, tensors_of
from jaxhybrid.files.config import parse_json, read_bytes, show, write_json
from jaxhybrid.files.header import AGAIN
from jaxhybrid.files.mapping import FLOATS, canonical
from jaxhybrid.files.tensors import TensorFiles, write_safetensors
from jaxhybrid.files.writing import new_folder
from jaxhybrid.hparams import Hparams
from jaxhybrid.model import spec
from jaxhybrid.ops.adapted import AdaptedMatrix
from jaxhybrid.params import Params, TensorSpec, flatten, unflatten
from jaxhybrid.weights import base_of

ALL_LINEAR = "all-linear"
"""Every linear map but routers, single experts and the head."""

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NOT_PLAIN = re.compile(
    "use_(?!rslora$).*|fan_in_fan_out|bias|lora_bias|modules_to_save|layer_replication|target_parameters"
    "|trainable_token_indices|alora_invocation_tokens|(kasa|arrow|monteclora)_config"
)
"""Fields that must be off for a module's product to be W x + scale B A x."""


class Factors(NamedTuple):
    """a: float32 [rank, in]. b: float32 [out, rank]; zeros at the start, so that nothing changes."""

    a: Array
    b: Array


class Lora(struct.PyTreeNode):
    """An adapter: to the product of each module's weight, scale * b (a x) is added.

    factors: by the module's Hugging Face name, such as "model.layers.0.self_attn.q_proj"; these are all
    leaves, so a gradient or an optimizer sees nothing else. scales: (module, scale) for each.
    """

    factors: dict[str, Factors]
    scales: tuple[tuple[str, float], ...] = struct.field(pytree_node=False)


class Module(NamedTuple):
    """Where a Hugging Face module's weight lies: part number `part` of the parameter at `path`."""

    path: str
    part: int
    shape: tuple[int, int]


def modules(hparams: Hparams) -> dict[str, Module]:
    """Every module that an adapter can name: those with a matrix as weight, but for the embeddings, and for
    blocks whose weights several layers share, since each of these layers would have an adapter of its own."""
    in_memory = family(hparams.family).in_memory
    return {
        canonical(name.removesuffix(".weight"), in_memory): Module(path, part, (shape[0], shape[1]))
        for path, source in tensors_of(hparams).items()
        for part, (name, shape) in enumerate(zip(source.names, source.shapes, strict=True))
        if path != "embed.weight" and ".shared_trans" not in name
        if len(shape) == 2 and name.endswith(".weight")
    }


def init_lora(
    params: Params,
    key: Array,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = ALL_LINEAR,
) -> Lora:
    """A new adapter that changes nothing yet: a is random as PEFT's (uniform, 1/sqrt(in)), b zero.

    alpha: the scale is alpha / rank. targets: ends of module names ("q_proj", "mixer.in_proj"), or
    "all-linear", which is every linear map but routers, single experts, the head, and what PEFT does not
    adapt in this family. Raises UsageError for a target that no module has.
    """
    if rank < 1:
        raise UsageError(f"rank: {rank} must be at least 1")
    if not (math.isfinite(alpha) and alpha > 0):
        raise UsageError(f"alpha: {alpha} must be a positive number")
    known = modules(params.hparams)
    specs = flatten(spec(params.hparams))
    if targets == ALL_LINEAR:
        chosen = [name for name, module in known.items() if _usual(params.hparams, name, specs[module.path])]
    else:
        wanted = [targets] if isinstance(targets, str) else list(targets)
        for target in wanted or [""]:
            if not any(_ends(name, target) for name in known):
                ends = sorted({name.rsplit(".", 1)[-1] for name in known} - {"lm_head"})
                raise UsageError(f"targets: no module is called {show(target)}; there are {', '.join(ends)}")
        chosen = [name for name in known if any(_ends(name, target) for target in wanted)]
    factors: dict[str, Factors] = {}
    for i, name in enumerate(chosen):
        n_out, n_in = known[name].shape
        a = jax.random.uniform(jax.random.fold_in(key, i), (rank, n_in), jnp.float32, -1.0, 1.0)
        factors[name] = Factors(a / math.sqrt(n_in), jnp.zeros((n_out, rank), jnp.float32))
    return Lora(factors, tuple((name, alpha / rank) for name in sorted(chosen)))


def apply_lora(params: Params, lora: Lora) -> Params:
    """The model with the adapter beside its weights, which may be quantized. Pure and differentiable.

    Only what other products than `linear` read (routers, single experts, small maps inside some mixers) gets
    its correction added to the weight. Raises UsageError for a module that the model has not, or whose
    quantized weight cannot be corrected.
    """
    return _with(params, lora, merge=False)


def merge_lora(params: Params, lora: Lora) -> Params:
    """The model with the corrections added to its weights, in their dtype. Pure and differentiable.

    Raises UsageError for a module that the model has not, or whose weight is quantized.
    """
    return _with(params, lora, merge=True)


def add_lora(params: Params, lora: Lora) -> Params:
    """`merge_lora` where all adapted weights are float32, which costs no speed; else `apply_lora`, since
    bfloat16 would round small corrections away."""
    flat, known = flatten(params.tensors), modules(params.hparams)
    leaves = [flat[known[name].path] for name in lora.factors if name in known]
    exact = all(isinstance(leaf, Array) and leaf.dtype == jnp.float32 for leaf in leaves)
    return _with(params, lora, merge=exact)


def save_adapter(folder: str | Path, lora: Lora, *, base: str = "", force: bool = False) -> None:
    """Write an adapter as PEFT does: adapter_config.json and adapter_model.safetensors, both or neither.

    base: the name or folder of the model, for PEFT's AutoPeftModel classes. force: replace an adapter that
    is there. Raises CheckpointError.
    """
    path = Path(folder).absolute()
    if force and path.exists() and not (path / CONFIG).is_file():
        raise CheckpointError(f"{folder}: holds no adapter, so it is not replaced; choose another folder")
    if not lora.factors:
        raise CheckpointError(f"{folder}: an adapter without modules cannot be saved; give init_lora targets")
    ranks = {name: len(f.a) for name, f in lora.factors.items()}
    alphas = {name: _number(scale * ranks[name]) for name, scale in lora.scales}
    rank, alpha = (Counter(found.values()).most_common(1)[0][0] for found in (ranks, alphas))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "target_modules": sorted(lora.factors),
        "rank_pattern": {re.escape(name): r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(name): a for name, a in alphas.items() if a != alpha},
    }
    tensors = {
        f"{_PREFIX}{name}.lora_{letter.upper()}.weight": np.asarray(getattr(factors, letter))
        for name, factors in lora.factors.items()
        for letter in "ab"
    }
    with new_folder(path, force) as made:
        write_safetensors(made / TENSORS, tensors)
        write_json(made / CONFIG, config)


def load_adapter(folder: str | Path, params: Params) -> Lora:
    """The adapter in a folder that `save_adapter` or PEFT wrote, in float32, for this model.

    Raises CheckpointError when it is missing or damaged, belongs to another model, or is not plain LoRA.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{folder}: has no {CONFIG}; give the folder of a LoRA adapter")
    if not (path / TENSORS).is_file():
        raise CheckpointError(f"{folder}: has no {TENSORS}; save the adapter in safetensors format")
    config = _read_config(path / CONFIG)
    files = TensorFiles(path, TENSORS)
    kind, known = family(params.hparams.family), modules(params.hparams)

    def spelling(name: str) -> str:  # the same for the name in files, in memory, and inside other models
        return canonical(f"{canonical(name, kind.in_memory)}.weight", kind.renamed)

    names = {spelling(name): name for name in known}
    halves: dict[str, dict[str, Array]] = {}
    for key in files.names():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        name = names.get(spelling(match[1])) if match else None
        where = f"{path / TENSORS}: tensor {show(key)}"
        if match is None:
            raise CheckpointError(f"{where} is no part of a plain LoRA adapter of linear layers")
        if name is None:
            raise CheckpointError(
                f"{where} is for a module that this model ({params.hparams.family}) has not or that "
                "cannot be adapted; use it with its own model"
            )
        if files.dtype(key) not in FLOATS:
            raise CheckpointError(f"{where} has dtype {files.dtype(key)}; only floating point can be read")
        shape, at = files.shape(key), 1 if match[2] == "A" else 0
        if len(shape) != 2 or shape[at] != known[name].shape[at]:
            n_out, n_in = known[name].shape
            raise CheckpointError(
                f"{where} has shape {shape}, its module maps {n_in} to {n_out}; the adapter is for another "
                "model"
            )
        half = halves.setdefault(name, {})
        if match[2] in half:
            raise CheckpointError(f"{where} is there under another spelling too; {AGAIN}")
        factor = np.asarray(files.read(key), np.float32)
        if not np.isfinite(factor).all():
            raise CheckpointError(f"{where} holds numbers that are not finite; train it again")
        half[match[2]] = jnp.asarray(factor)
    factors: dict[str, Factors] = {}
    scales: list[tuple[str, float]] = []
    for name, half in halves.items():
        if half.keys() != {"A", "B"} or not half["A"].shape[0] == half["B"].shape[1] > 0:
            raise CheckpointError(
                f"{path / TENSORS}: module {show(name)} has no lora_A and lora_B of one rank, at least 1; "
                f"{AGAIN}"
            )
        factors[name] = Factors(half["A"], half["B"])
        scales.append((name, _scale(config, name, len(half["A"]), path / CONFIG)))
    if not factors:
        raise CheckpointError(f"{path / TENSORS}: holds no tensors; {AGAIN}")
    return Lora(factors, tuple(sorted(scales)))


# ------------------------------------------------------------------------------------------ helpers


def _with(params: Params, lora: Lora, merge: bool) -> Params:
    known, scales = modules(params.hparams), dict(lora.scales)
    specs, sources = flatten(spec(params.hparams)), tensors_of(params.hparams)
    by_path: dict[str, dict[int, Factors]] = {}
    for name, (a, b) in lora.factors.items():
        module = known.get(name)
        if module is None or (len(b), a.shape[1]) != module.shape:
            raise UsageError(
                f"module {name} is not in this model ({params.hparams.family}), or of another shape; "
                "the adapter is for another model"
            )
        by_path.setdefault(module.path, {})[module.part] = Factors(a, b * scales[name])
    flat: dict[str, Any] = flatten(params.tensors)
    for path, parts in by_path.items():
        tensor, source, leaf = specs[path], sources[path], flat[path]
        if not merge and tensor.quantizable and "experts" not in tensor.axes:
            flat[path] = _beside(leaf, parts, source)
        elif isinstance(leaf, Array):
            flat[path] = (leaf.astype(jnp.float32) + _correction(parts, source, tensor)).astype(leaf.dtype)
        else:
            what = "quantized" if base_of(leaf) is leaf else "adapted already"
            raise UsageError(
                f"parameter {path} is {what}, so nothing can be added to it; load the model without quantize"
            )
    return Params(unflatten(flat), params.hparams)


def _beside(leaf: Any, parts: dict[int, Factors], source: Source) -> AdaptedMatrix:
    """The parts' factors side by side: each has columns of its own in `up`, in the rows of its tensor."""
    n_rows = [shape[0] for shape in source.shapes]
    first = np.cumsum([0, *n_rows])
    width = sum(b.shape[1] for _, b in parts.values())
    up, column = jnp.zeros((sum(n_rows), width), jnp.float32), 0
    for part, (_, b) in parts.items():
        up = lax.dynamic_update_slice(up, b, (int(first[part]), column))
        column += b.shape[1]
    up = up if source.order is None else up[np.asarray(source.order)]
    return AdaptedMatrix(leaf, jnp.concatenate([a for a, _ in parts.values()]), up)


def _correction(parts: dict[int, Factors], source: Source, tensor: TensorSpec) -> Array:
    """The sum of b a of every part, where it lies in the parameter."""
    bands = [
        jnp.matmul(*reversed(parts[i]), precision=lax.Precision.HIGHEST) if i in parts else jnp.zeros(shape)
        for i, shape in enumerate(source.shapes)
    ]
    rows = jnp.concatenate(bands)
    rows = rows if source.order is None else rows[np.asarray(source.order)]
    return rows.reshape(tensor.shape)


_LEFT_OUT = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), r"\.out_proj$"),
    "lara_mini": r"\.linear_attn\.in_proj$",
    "qwen3_next": r"\.mlp\..*(gate|up|down)_proj$",
}
"""What PEFT 0.21 does not adapt, by family: weights that fused kernels read past their module, one that is
four modules in transformers' memory, and MLPs whose names PEFT takes for those of single experts."""


def _usual(hparams: Hparams, name: str, tensor: TensorSpec) -> bool:
    left_out = _LEFT_OUT.get(hparams.family)
    refused = name == "lm_head" or left_out is not None and re.search(left_out, name)
    return tensor.quantizable and "experts" not in tensor.axes and not refused


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _number(value: float) -> float:
    """As a whole number where it is one but for rounding, which is how configurations have it."""
    return round(value) if abs(value - round(value)) < 1e-9 * max(1.0, abs(value)) else value


def _read_config(path: Path) -> dict[str, Any]:
    config = parse_json(read_bytes(path), str(path), AGAIN)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path}: peft_type is {show(str(kind))}; only LORA adapters can be used")
    for field, value in config.items():
        if _NOT_PLAIN.fullmatch(field) and value not in ("none", None, False, [], {}):
            raise CheckpointError(
                f"{path}: {field} is {show(str(value))}, which is not supported; only plain LoRA is"
            )
    return config


def _scale(config: dict[str, Any], name: str, rank: int, path: Path) -> float:
    """By `lora_alpha` or the first pattern that fits the module; rank-stabilised (arXiv:2312.03732) if so
    configured."""
    try:
        patterns = (config.get("alpha_pattern") or {}).items()
        fitting = (a for p, a in patterns if re.match(rf"(.*\.)?({p})$", name))
        alpha = float(next(fitting, config.get("lora_alpha", math.nan)))
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError, re.error):
        alpha = math.nan
    if not math.isfinite(alpha):
        raise CheckpointError(
            f"{path}: lora_alpha or alpha_pattern gives no number for {show(name)}; {AGAIN}, or write the "
            "alpha it was trained with"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
