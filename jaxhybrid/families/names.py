"""What family files share: sources of tensors, and careful reading of configuration fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.hparams import Hparams, RopeHparams
from jaxhybrid.ops.activations import activation
from jaxhybrid.ops.rope import SCALINGS


@dataclass(frozen=True)
class Source:
    """The tensors in a file that make one parameter, and their shapes there.

    Several are laid one after the other along their first axis; then rows are taken in `order`, if given (a
    permutation); the result is reshaped to the parameter's shape.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] | None = None


def one(name: str, *shape: int) -> Source:
    return Source((name,), (shape,))


def rows(names_and_rows: Iterable[tuple[str, int]], *rest: int) -> Source:
    """Tensors [rows, *rest] with the same rest."""
    pairs = list(names_and_rows)
    return Source(tuple(name for name, _ in pairs), tuple((n, *rest) for _, n in pairs))


def ends(hp: Hparams, embed: str, norm: str, head: str = "lm_head.weight") -> dict[str, Source]:
    """The embeddings, the last norm and the head, by the names of their weights."""
    found = {
        "embed.weight": one(embed, hp.vocab_size, hp.d_model),
        "norm.weight": one(norm, hp.d_model),
    }
    if not hp.tie_embeddings:
        found["head.weight"] = one(head, hp.vocab_size, hp.d_model)
    return found


class Fields:
    """Typed access to a configuration: each method returns the field or raises naming it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, name: str, default: Any = None) -> Any:
        """The field as it is; null is as good as missing."""
        value = self._config.get(name)
        return default if value is None else value

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

    def activation(self, recurrent: bool = False, field: str = "hidden_act", default: str = "silu") -> str:
        """An activation that the MLPs know; recurrent mixers know silu only."""
        name = self.text(field, default)
        activation(name)
        if recurrent and name not in ("silu", "swish"):
            raise HparamsError(f"{field}: {name!r} is not supported by recurrent mixers, only silu")
        return name

    def integers(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        value = self._value(name, default)
        if not isinstance(value, list | tuple) or any(type(v) is not int for v in value):
            raise HparamsError(f"{name}: {value!r} must be a list of whole numbers")
        return list(value)

    def numbers(self, name: str, count: int, default: Sequence[float] | None = None) -> tuple[float, ...]:
        value = self._value(name, default)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise HparamsError(f"{name}: {value!r} must be {count} numbers")
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in value):
            raise HparamsError(f"{name}: {value!r} must be {count} numbers")
        return tuple(float(v) for v in value)

    def inner(self, name: str) -> Fields:
        """A nested object; empty where it is missing."""
        value = self.get(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise HparamsError(f"{name}: {value!r} must be an object")
        return Fields(value)

    def pair(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        first, second = self.numbers(name, 2, default)
        return first, second

    def rope(self, head_dim: int, theta: float = 10000.0, partial: float = 1.0) -> RopeHparams:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        theta, partial: the base, and the part of a head that is rotated, where the configuration is silent.
        """
        new = self.get("rope_parameters")
        scaling = new if new is not None else self.get("rope_scaling")
        if scaling is not None and not isinstance(scaling, Mapping):
            raise HparamsError(f"rope_scaling: {scaling!r} must be an object")
        inner = Fields(scaling or {})
        theta = inner.number("rope_theta", self.number("rope_theta", theta))
        kind = inner.text("rope_type", inner.text("type", "default"))
        if kind not in SCALINGS:
            raise HparamsError(f"rope_scaling: kind {kind!r} is not supported")
        partial = inner.number("partial_rotary_factor", self.number("partial_rotary_factor", partial))
        if kind == "proportional":
            return RopeHparams(dim=head_dim, theta=theta, scaling=kind, fraction=partial)
        dim = int(head_dim * partial)
        if dim < 2 or dim % 2:
            raise HparamsError(f"partial_rotary_factor: {partial} of a head of {head_dim} is not even")
        rope = RopeHparams(
            dim=dim,
            theta=theta,
            scaling=kind,
            factor=inner.number("factor", 1.0),
            low_freq_factor=inner.number("low_freq_factor", 1.0),
            high_freq_factor=inner.number("high_freq_factor", 4.0),
        )
        if kind in ("default", "linear"):
            return rope
        context = self.get("max_position_embeddings")
        original = inner.get("original_max_position_embeddings", self.get("original_max_position_embeddings"))
        original = context if original is None and kind != "llama3" else original
        found = Fields({"original_max_position_embeddings": original})
        original = found.integer("original_max_position_embeddings", 8192)
        rope = dataclasses.replace(rope, original_context=original)
        factor = inner.get("factor")
        if kind != "llama3" and isinstance(context, int) and (factor is None or kind == "longrope"):
            rope = dataclasses.replace(rope, factor=context / original)
        return {"llama3": lambda r: r, "yarn": inner._yarn, "longrope": inner._longrope}[kind](rope)

    def _yarn(self, rope: RopeHparams) -> RopeHparams:
        """With the amplitude of section 3.4 of the paper (arXiv:2309.00071)."""

        def scale(weight: float) -> float:
            return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

        all_dims = self.number("mscale_all_dim", 0.0)
        mscale = self.number("mscale", 0.0)
        usual = scale(mscale) / scale(all_dims) if mscale and all_dims else scale(1.0)
        return dataclasses.replace(
            rope,
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            truncate=self.flag("truncate", True),
            amplitude=self.number("attention_factor", usual),
        )

    def _longrope(self, rope: RopeHparams) -> RopeHparams:
        """With the amplitude of LongRoPE (arXiv:2402.13753)."""
        factor, original = rope.factor, rope.original_context
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return dataclasses.replace(
            rope,
            short_factors=self.numbers("short_factor", rope.dim // 2),
            long_factors=self.numbers("long_factor", rope.dim // 2),
            amplitude=self.number("attention_factor", usual),
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise HparamsError(f"{name}: missing from the configuration")
        return value


def attention_heads(c: Fields) -> tuple[int, int]:
    """Heads of queries, and of K/V, which divide them."""
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise HparamsError(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads={heads}")
    return heads, kv_heads


def experts_per_token(c: Fields, n_experts: int, of: str, field: str = "num_experts_per_tok") -> int:
    """How many of `n_experts` (the field `of`) a token takes."""
    top_k = c.integer(field)
    if top_k > n_experts:
        raise HparamsError(f"{field}: {top_k} exceeds {of}={n_experts}")
    return top_k


def layer_words(
    c: Fields, n_layers: int, known: Mapping[str, str], default: Sequence[str] | None
) -> list[str]:
    """`layer_types`, one word a layer, in our words, the values of `known`; `default` where it is missing."""
    words = c.get("layer_types", default)
    if words is None:
        raise HparamsError("layer_types: missing from the configuration")
    if not isinstance(words, list | tuple) or len(words) != n_layers:
        raise HparamsError(f"layer_types: must be a list of {n_layers} words, one a layer")
    for i, word in enumerate(words):
        if word not in known:
            raise HparamsError(f"layer_types: unknown layer kind {word!r} at layer {i}")
    return [known[word] for word in words]


def where(words: Sequence[str], *kinds: str) -> tuple[int, ...]:
    """The layers whose word is one of these."""
    return tuple(i for i, word in enumerate(words) if word in kinds)
