"""Static description of a model: which layer holds which mixer, and every size.

`Hparams` is frozen and hashable. It rides in `Params` as static pytree data, so layer kinds are
resolved while tracing and never on the device. Everything here is known before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from jaxhybrid.errors import HparamsError


@dataclass(frozen=True)
class RopeHparams:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) on the first `dim` dims of a head."""

    dim: int
    theta: float = 10000.0
    scaling: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as are the two below
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class AttentionHparams:
    """Grouped-query attention. `rope=None` is NoPE; `scale` multiplies the scores.

    window: tokens a query sees, itself included (None: all). qk_norm_eps: of an RMS norm on every head of
    q and k, None for none.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeHparams | None = None
    bias: bool = False  # of q, k and v
    out_bias: bool = False
    window: int | None = None
    qk_norm_eps: float | None = None

    @property
    def cell_shape(self) -> tuple[int, int]:
        """Shape of one token's K (and V) in a cache."""
        return (self.n_kv_heads, self.head_dim)


@dataclass(frozen=True)
class Mamba2Hparams:
    """Mamba-2 (SSD, arXiv:2405.21060): `n_heads` heads of `head_dim`, states of `state_size`."""

    n_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 1
    conv_kernel: int = 4
    chunk: int = 64
    dt_min: float = 0.0
    dt_max: float = math.inf
    norm_eps: float = 1e-5
    bias: bool = False
    conv_bias: bool = True

    @property
    def d_inner(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.d_inner + 2 * self.n_groups * self.state_size

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one sequence's state: raw convolution inputs, oldest first, and the SSM state."""
        return {
            "conv": (self.conv_kernel - 1, self.conv_channels),
            "ssm": (self.n_heads, self.head_dim, self.state_size),
        }


@dataclass(frozen=True)
class MlpHparams:
    """Gated MLP `down(act(gate x) * up x)`."""

    d_ff: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class MoeHparams:
    """Routed experts: `top_k` of `n_experts` by router logit, weighted by a softmax over the chosen."""

    n_experts: int
    top_k: int
    d_ff: int
    activation: str = "silu"


@dataclass(frozen=True)
class Layer:
    """What one layer holds. Two equal values are the same layer kind and share one traced function."""

    attention: AttentionHparams | None
    recurrent: Mamba2Hparams | None
    mlp: MlpHparams | None
    moe: MoeHparams | None
    post_norms: bool = False  # what a mixer or MLP gives is normed before it joins the residual stream


A = TypeVar("A")
PerLayer = A | tuple[A | None, ...] | None
"""One value for every layer that has the thing, or one per layer (None where it has not)."""


@dataclass(frozen=True)
class Hparams:
    """A hybrid language model. Sizes in elements, context in tokens.

    `attention_layer_indices` says which layers remember K/V; `recurrent_layer_indices` which keep a
    state, by default all the others. A layer may be in both, or in neither.
    """

    family: str
    n_layers: int
    d_model: int
    vocab_size: int
    attention_layer_indices: tuple[int, ...]
    recurrent_layer_indices: tuple[int, ...] | None = None
    attention: PerLayer[AttentionHparams] = None
    recurrent: PerLayer[Mamba2Hparams] = None
    mlp: PerLayer[MlpHparams] = None
    moe: PerLayer[MoeHparams] = None
    post_norms: bool = False
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the weights of norms: 1 where files store weight - 1
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tie_embeddings: bool = False
    residual_in_float32: bool = False
    context_length: int | None = None  # longest sequence the model was trained for

    def __post_init__(self) -> None:
        for name in ("n_layers", "d_model", "vocab_size"):
            if getattr(self, name) < 1:
                raise HparamsError(f"{name}: {getattr(self, name)} must be at least 1")
        attention = _checked_indices("attention_layer_indices", self.attention_layer_indices, self.n_layers)
        recurrent = self.recurrent_layer_indices
        if recurrent is None:
            recurrent = tuple(i for i in range(self.n_layers) if i not in attention)
        recurrent = _checked_indices("recurrent_layer_indices", recurrent, self.n_layers)
        object.__setattr__(self, "attention_layer_indices", attention)
        object.__setattr__(self, "recurrent_layer_indices", recurrent)
        for field, indices in (("attention", attention), ("recurrent", recurrent)):
            value = getattr(self, field)
            if isinstance(value, tuple) and len(value) != self.n_layers:
                raise HparamsError(f"{field}: {len(value)} entries for n_layers={self.n_layers}")
            missing = [i for i in indices if _of_layer(value, i) is None]
            if missing:
                raise HparamsError(
                    f"{field}: missing for layer {missing[0]}, which {field}_layer_indices lists"
                )
        windows = {w for i in attention if (w := self.window_of(i)) is not None}
        if len(windows) > 1 or any(w < 1 for w in windows):
            raise HparamsError(
                f"window: layers have windows {sorted(windows)}, one of at least 1 is supported"
            )

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layer kinds, in order."""
        return tuple(
            Layer(
                attention=_of_layer(self.attention, i) if self.is_attention_layer(i) else None,
                recurrent=_of_layer(self.recurrent, i) if self.is_recurrent_layer(i) else None,
                mlp=_of_layer(self.mlp, i),
                moe=_of_layer(self.moe, i),
                post_norms=self.post_norms,
            )
            for i in range(self.n_layers)
        )

    def is_attention_layer(self, i: int) -> bool:
        return i in self.attention_layer_indices

    def is_recurrent_layer(self, i: int) -> bool:
        return i in (self.recurrent_layer_indices or ())

    def is_windowed_layer(self, i: int) -> bool:
        """An attention layer that sees the last tokens only."""
        return self.is_attention_layer(i) and self.window_of(i) is not None

    def window_of(self, i: int) -> int | None:
        """Tokens that a query of attention layer `i` sees, None for all of them."""
        attention = _of_layer(self.attention, i)
        return None if attention is None else attention.window

    def rope_of(self, i: int) -> RopeHparams | None:
        """How attention layer `i` rotates, None where it does not."""
        attention = _of_layer(self.attention, i)
        return None if attention is None else attention.rope

    @property
    def window(self) -> int | None:
        """The window of the layers that have one."""
        return next(
            (self.window_of(i) for i in self.attention_layer_indices if self.is_windowed_layer(i)), None
        )

    @property
    def is_recurrent(self) -> bool:
        """Purely recurrent: no layer remembers K/V."""
        return bool(self.recurrent_layer_indices) and not self.attention_layer_indices

    @property
    def is_hybrid(self) -> bool:
        """Both kinds of memory are needed."""
        return bool(self.recurrent_layer_indices) and bool(self.attention_layer_indices)

    def cell_shape(self, i: int) -> tuple[int, int]:
        """[kv heads, head size] of one token's K in layer `i`, which must be an attention layer."""
        attention = self.layers[i].attention
        if attention is None:
            raise HparamsError(f"attention_layer_indices: layer {i} holds no K/V")
        return attention.cell_shape

    def state_shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """Shapes of one sequence's state in layer `i`, which must be a recurrent layer."""
        recurrent = self.layers[i].recurrent
        if recurrent is None:
            raise HparamsError(f"recurrent_layer_indices: layer {i} holds no recurrent state")
        return recurrent.state_shapes


def _of_layer(value: PerLayer[A], i: int) -> A | None:
    return value[i] if isinstance(value, tuple) else value


def _checked_indices(field: str, indices: Iterable[int], n_layers: int) -> tuple[int, ...]:
    found = list(indices)
    for i in found:
        if isinstance(i, bool) or not isinstance(i, int):
            raise HparamsError(f"{field}: {i!r} is not a layer index")
        if not 0 <= i < n_layers:
            raise HparamsError(f"{field}: {i} is out of range, the model has {n_layers} layers")
    if len(set(found)) != len(found):
        raise HparamsError(f"{field}: a layer index occurs twice in {found}")
    return tuple(sorted(found))


# ------------------------------------------------------------------ encodings found in the wild

_ATTENTION_WORDS = frozenset({"attention", "full_attention", "sliding_attention"})
_RECURRENT_WORDS = frozenset({"mamba", "mamba2", "linear_attention", "recurrent", "conv"})
_BOTH_WORDS = frozenset({"hybrid"})
_NEITHER_WORDS = frozenset({"mlp", "moe"})
_PATTERN = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}

LAYER_ENCODINGS = (
    "attention_layer_indices",
    "layer_types",
    "kv_heads",
    "recurrent_layers",
    "interval",
    "period",
    "pattern",
)


def resolve_layers(
    n_layers: int,
    *,
    attention_layer_indices: Sequence[int] | None = None,
    layer_types: Sequence[str] | None = None,
    kv_heads: Sequence[int] | None = None,
    recurrent_layers: Sequence[bool] | None = None,
    interval: int | None = None,
    period: int | None = None,
    offset: int | None = None,
    pattern: str | None = None,
    field_names: Mapping[str, str] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Turn any encoding of the layer kinds into (attention indices, recurrent indices).

    attention_layer_indices: the list itself. layer_types: one word a layer. kv_heads: heads of K/V a
    layer, 0 where it has none. recurrent_layers: one boolean a layer. interval: every interval-th layer
    is attention. period and offset: layer i is attention iff i % period == offset. pattern: one
    character a layer, `*` attention, `M` recurrent, `-` MLP, `E` experts. `field_names` gives the names
    to use in errors. Several may be given; HparamsError if they disagree, naming both.
    """
    names = {key: (field_names or {}).get(key, key) for key in (*LAYER_ENCODINGS, "offset")}
    kinds: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def from_words(key: str, words: Sequence[str]) -> None:
        _checked_length(names[key], words, n_layers)
        known = _ATTENTION_WORDS | _RECURRENT_WORDS | _BOTH_WORDS | _NEITHER_WORDS
        for i, word in enumerate(words):
            if word not in known:
                raise HparamsError(f"{names[key]}: unknown layer kind {word!r} at layer {i}")
        kinds[key] = (
            tuple(i for i, w in enumerate(words) if w in _ATTENTION_WORDS | _BOTH_WORDS),
            tuple(i for i, w in enumerate(words) if w in _RECURRENT_WORDS | _BOTH_WORDS),
        )

    def from_attention(key: str, attention: Iterable[int]) -> None:
        chosen = _checked_indices(names[key], attention, n_layers)
        kinds[key] = (chosen, tuple(i for i in range(n_layers) if i not in chosen))

    if attention_layer_indices is not None:
        from_attention("attention_layer_indices", attention_layer_indices)
    if layer_types is not None:
        from_words("layer_types", layer_types)
    if kv_heads is not None:
        _checked_length(names["kv_heads"], kv_heads, n_layers)
        for i, heads in enumerate(kv_heads):
            if isinstance(heads, bool) or not isinstance(heads, int) or heads < 0:
                raise HparamsError(f"{names['kv_heads']}: {heads!r} at layer {i} is no number of heads")
        from_attention("kv_heads", (i for i, heads in enumerate(kv_heads) if heads))
    if recurrent_layers is not None:
        _checked_length(names["recurrent_layers"], recurrent_layers, n_layers)
        from_attention("recurrent_layers", (i for i, r in enumerate(recurrent_layers) if not r))
    if interval is not None:
        _checked_at_least(names["interval"], interval, 1)
        from_attention("interval", range(interval - 1, n_layers, interval))
    if (period is None) != (offset is None):
        given, absent = ("period", "offset") if offset is None else ("offset", "period")
        raise HparamsError(f"{names[given]}: needs {names[absent]} beside it")
    if period is not None and offset is not None:
        _checked_at_least(names["period"], period, 1)
        if not 0 <= offset < period:
            raise HparamsError(f"{names['offset']}: {offset} is out of range for {names['period']}={period}")
        from_attention("period", range(offset, n_layers, period))
    if pattern is not None:
        unknown = [c for c in pattern if c not in _PATTERN]
        if unknown:
            raise HparamsError(f"{names['pattern']}: unknown layer kind {unknown[0]!r}")
        from_words("pattern", [_PATTERN[c] for c in pattern])

    if not kinds:
        raise HparamsError("layer_types: missing, nothing says which layers are attention")
    first, *others = kinds
    for other in others:
        if kinds[other] != kinds[first]:
            differing = min(
                set(kinds[other][0]) ^ set(kinds[first][0]) or set(kinds[other][1]) ^ set(kinds[first][1])
            )
            raise HparamsError(f"{names[other]}: contradicts {names[first]} at layer {differing}")
    return kinds[first]


def _checked_length(field: str, values: Sequence[object], n_layers: int) -> None:
    if len(values) != n_layers:
        raise HparamsError(f"{field}: {len(values)} entries, but the model has {n_layers} layers")


def _checked_at_least(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HparamsError(f"{field}: {value!r} must be a whole number of at least {least}")
