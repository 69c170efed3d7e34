"""What family files share: sources of tensors, and careful reading of configuration fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.hparams import RopeHparams
from jaxhybrid.ops.activations import activation


@dataclass(frozen=True)
class Source:
    """The tensors in a file that make one parameter, each of shape `shape` there.

    Several are stacked along a new first axis; the result is reshaped to the parameter's shape.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]


def one(name: str, *shape: int) -> Source:
    return Source((name,), shape)


class Fields:
    """Typed access to a configuration: each method returns the field or raises naming it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, name: str, default: Any = None) -> Any:
        return self._config.get(name, default)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise HparamsError(f"{name}: {value!r} must be a whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise HparamsError(f"{name}: {value!r} must be a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise HparamsError(f"{name}: {value!r} must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise HparamsError(f"{name}: {value!r} must be a string")
        return value

    def activation(self, recurrent: bool = False) -> str:
        """`hidden_act`, one that the MLPs know; recurrent mixers know silu only."""
        name = self.text("hidden_act", "silu")
        activation(name)
        if recurrent and name not in ("silu", "swish"):
            raise HparamsError(f"hidden_act: {name!r} is not supported by Mamba-2, only silu")
        return name

    def pair(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        value = self._value(name, default)
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise HparamsError(f"{name}: {value!r} must be two numbers")
        return float(value[0]), float(value[1])

    def rope(self, head_dim: int) -> RopeHparams:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        new = self.get("rope_parameters")
        scaling = new if new is not None else self.get("rope_scaling")
        if scaling is not None and not isinstance(scaling, Mapping):
            raise HparamsError(f"rope_scaling: {scaling!r} must be an object")
        inner = Fields(scaling or {})
        theta = inner.number("rope_theta", self.number("rope_theta", 10000.0))
        kind = inner.text("rope_type", inner.text("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise HparamsError(f"rope_scaling: kind {kind!r} is not supported")
        partial = inner.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        return RopeHparams(
            dim=int(head_dim * partial),
            theta=theta,
            scaling=kind,
            factor=inner.number("factor", 1.0),
            low_freq_factor=inner.number("low_freq_factor", 1.0),
            high_freq_factor=inner.number("high_freq_factor", 4.0),
            original_context=inner.integer("original_max_position_embeddings", 8192),
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        value = default if value is None else value
        if value is None:
            raise HparamsError(f"{name}: missing from the configuration")
        return value


def checked_heads(n_heads: int, n_kv_heads: int) -> None:
    if n_heads % n_kv_heads:
        raise HparamsError(f"num_key_value_heads: {n_kv_heads} does not divide num_attention_heads={n_heads}")
