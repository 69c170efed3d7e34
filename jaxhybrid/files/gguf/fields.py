"""A file's metadata with types, and the fields that architectures share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import show
from jaxhybrid.files.gguf.container import Container, read_rows
from jaxhybrid.hparams import Hparams

_MOST_LAYERS = 512
"""llama.cpp's own limit. Names are made for every layer, so without it a file could ask for any memory."""
Config = dict[str, Any]
Get = Callable[[Hparams], Any]


@dataclass(frozen=True)
class Field:
    """key: in the metadata, after the architecture's name. name: in config.json, None where only llama.cpp
    asks for it. get: the value from hparams, None to leave it out. default: where a file is silent."""

    key: str
    name: str | None
    get: Get
    kind: type = int
    default: Any = None


class Meta:
    """Typed access to the metadata of one architecture, and to what the file's tensors tell."""

    def __init__(self, container: Container) -> None:
        self.path, self._all, self.tensors = container.path, container.metadata, container.tensors
        arch = self._all.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(
                f"{self.path}: general.architecture is missing; use a file that llama.cpp made"
            )
        self.arch = arch

    def get(self, key: str, kind: type = int, default: Any = None) -> Any:
        """A number, flag or text; of an array that holds one for each layer the largest."""
        value = self._all.get(f"{self.arch}.{key}", default)
        if isinstance(value, np.ndarray):
            value = value.max().item() if value.size else default
        if value is None or kind is int and isinstance(value, bool | int):
            return value if value is None else int(value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(str(np.float32(value)))  # the shortest decimal: 1e-06, not 9.999999974752427e-07
        if isinstance(value, kind):
            return value
        raise CheckpointError(
            f"{self.path}: {self.arch}.{key} is {show(str(value))}, expected is {kind.__name__}; "
            "convert it again"
        )

    def need(self, key: str, kind: type = int) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(
                f"{self.path}: {self.arch}.{key} is missing from the metadata; convert it again"
            )
        return value

    def each(self, key: str, n: int, default: Any = None) -> list[Any]:
        """One value a layer, of an array or a single number."""
        value = self._all.get(f"{self.arch}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(value) < n:
                raise CheckpointError(
                    f"{self.path}: {self.arch}.{key} has {len(value)} entries for {n} layers; "
                    "convert it again"
                )
            return value[:n].tolist()
        return [value] * n

    @property
    def n_layers(self) -> int:
        """Without layers that predict further tokens, which come last."""
        n = self.need("block_count") - self.get("nextn_predict_layers", default=0)
        if not 1 <= n <= min(_MOST_LAYERS, max(1, len(self.tensors))):
            raise CheckpointError(f"{self.path}: {self.arch}.block_count makes {n} layers; convert it again")
        return n

    def has(self, name: str) -> bool:
        return name in self.tensors

    def any_layer(self, name: str) -> bool:
        return any(f"blk.{i}.{name}" in self.tensors for i in range(self.n_layers))

    def heads_of_layers(self, interval: int = 0) -> list[int]:
        """Heads of keys and values, 0 where a layer does not attend: by an array of them, of flags or of
        indices, or by `full_attention_interval`, for which `interval` stands where a file is silent."""
        n = self.n_layers
        heads = self.each("attention.head_count_kv", n, self.get("attention.head_count", default=0))
        flags, indices = (self._list(f"attention.{key}") for key in ("recurrent_layers", "layer_indices"))
        interval = self.get("full_attention_interval", default=0 if 0 in heads else interval)
        if indices is not None:
            attends = [i in indices for i in range(n)]
        elif flags is not None:
            attends = [not flag for flag in self.each("attention.recurrent_layers", n)]
        else:
            attends = [interval < 1 or (i + 1) % interval == 0 for i in range(n)]
        return [kv if here else 0 for kv, here in zip(heads, attends, strict=True)]

    def _list(self, key: str) -> list[Any] | None:
        value = self._all.get(f"{self.arch}.{key}")
        if value is None or isinstance(value, np.ndarray) and value.dtype.kind in "biu":
            return None if value is None else value.tolist()
        raise CheckpointError(
            f"{self.path}: {self.arch}.{key} is {show(str(value))}, expected is a list; convert it again"
        )

    def head_dim(self) -> int:
        heads = max(1, self.get("attention.head_count", default=1))
        return self.get("attention.key_length") or self.need("embedding_length") // heads

    def vector(self, name: str) -> list[float]:
        """The numbers of a small tensor."""
        stored = self.tensors[name]
        if stored.type.name != "F32" or len(stored.shape) != 1 or stored.shape[0] > 1 << 16:
            raise CheckpointError(
                f"{self.path}: tensor {name} is not a short vector of F32; convert it again"
            )
        found: list[float] = []
        read_rows(stored, 0, 1, lambda _, data: found.extend(data.view(np.float32)[0].tolist()))
        return found


# --------------------------------------------------------------------------------- shared fields


def first(value: Any) -> Any:
    return next((v for v in value if v is not None), None) if isinstance(value, tuple) else value


def of(part: str, field: str) -> Get:
    """A field of the first layer's `part` (attention, recurrent, mlp, moe)."""

    def get(hp: Hparams) -> Any:
        found = first(getattr(hp, part))
        return None if found is None else getattr(found, field)

    return get


def const(value: Any) -> Get:
    return lambda hp: value


def _kv_heads(hp: Hparams) -> Any:
    """One number where all layers attend alike."""
    each = [a.n_kv_heads if (a := layer.attention) is not None else 0 for layer in hp.layers]  # type: ignore[union-attr]
    return each[0] if len(set(each)) == 1 else each


head_dim = of("attention", "head_dim")

EPS = "attention.layer_norm_rms_epsilon"
BASE = (
    Field("block_count", "num_hidden_layers", lambda hp: hp.n_layers),
    Field("embedding_length", "hidden_size", lambda hp: hp.d_model),
    Field("context_length", "max_position_embeddings", lambda hp: hp.context_length or 1 << 20),
    Field("vocab_size", None, lambda hp: hp.vocab_size),
)
NORM = (Field(EPS, "rms_norm_eps", lambda hp: hp.norm_eps, float),)
HEADS = (
    Field("attention.head_count", "num_attention_heads", of("attention", "n_heads")),
    Field("attention.head_count_kv", "num_key_value_heads", _kv_heads),
)
SIZES = (
    Field("attention.key_length", "head_dim", head_dim),
    Field("attention.value_length", None, head_dim),
)
WIDTH = (Field("feed_forward_length", "intermediate_size", of("mlp", "d_ff")),)
MULTIPLIERS = (
    Field("attention.scale", "attention_multiplier", of("attention", "scale"), float),
    Field("embedding_scale", "embedding_multiplier", lambda hp: hp.embedding_multiplier, float),
    Field("residual_scale", "residual_multiplier", lambda hp: hp.layers[0].mixer_residual.branch, float),
    Field("logit_scale", "logits_scaling", lambda hp: 1 / hp.logits_multiplier, float),
)


def ssm(**names: str) -> tuple[Field, ...]:
    """Sizes of a state space mixer by their names in config.json: kernel, state, inner, rank and groups."""
    fields = {
        "kernel": Field("ssm.conv_kernel", None, of("recurrent", "conv_kernel")),
        "state": Field("ssm.state_size", None, of("recurrent", "state_size")),
        "inner": Field("ssm.inner_size", None, of("recurrent", "d_inner")),
        "rank": Field("ssm.time_step_rank", None, of("recurrent", "dt_rank")),
        "heads": Field("ssm.time_step_rank", None, of("recurrent", "n_heads")),
        "groups": Field("ssm.group_count", None, of("recurrent", "n_groups")),
    }
    return tuple(dataclasses.replace(fields[what], name=name or None) for what, name in names.items())
