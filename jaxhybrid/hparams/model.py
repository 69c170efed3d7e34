"""Static description of a model: which layer holds which mixer, and every size.

`Hparams` is frozen and hashable. It rides in `Params` as static pytree data, so layer kinds are
resolved while tracing and never on the device. Everything here is known before a weight is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from jaxhybrid.errors import HparamsError
from jaxhybrid.hparams.encodings import checked_indices
from jaxhybrid.hparams.feed_forward import MlpHparams, MoeHparams
from jaxhybrid.hparams.mixers import AttendingHparams, Mamba2Hparams, RecurrentHparams, RopeHparams


@dataclass(frozen=True)
class Residual:
    """How what a mixer or feed-forward block gives joins the stream: stream * x + branch * y.

    from_norm: x is the block's normed input instead of what it was normed from (MiniMax).
    """

    stream: float = 1.0
    branch: float = 1.0
    from_norm: bool = False


@dataclass(frozen=True)
class Layer:
    """What one layer holds. Two equal values are the same layer kind and share one traced function.

    norms: "pre" (a block's input is normed), "post" (its output) or "both". shared_mlp: set where the
    layer's attention and this MLP are one transformer block whose weights other layers share; it reads the
    stream beside the embeddings, and what it gives is added to the recurrent mixer's input only (Zamba).
    """

    attention: AttendingHparams | None
    recurrent: RecurrentHparams | None
    mlp: MlpHparams | None
    moe: MoeHparams | None
    norms: str = "pre"
    mixer_residual: Residual = Residual()
    feed_forward_residual: Residual = Residual()
    shared_mlp: MlpHparams | None = None


A = TypeVar("A")
PerLayer = A | tuple[A | None, ...] | None
"""One value for every layer that has the thing, or one per layer (None where it has not)."""


@dataclass(frozen=True)
class Hparams:
    """A hybrid language model. Sizes in elements, context in tokens.

    `attention_layer_indices` says which layers remember K/V; `recurrent_layer_indices` which keep a
    state, by default all the others. A layer may be in both, or in neither. shared_blocks: for each layer
    the number of the shared transformer block it uses, or None; `shared_mlp` describes its MLP.
    """

    family: str
    n_layers: int
    d_model: int
    vocab_size: int
    attention_layer_indices: tuple[int, ...]
    recurrent_layer_indices: tuple[int, ...] | None = None
    attention: PerLayer[AttendingHparams] = None
    recurrent: PerLayer[RecurrentHparams] = None
    mlp: PerLayer[MlpHparams] = None
    moe: PerLayer[MoeHparams] = None
    norms: PerLayer[str] = "pre"
    mixer_residual: PerLayer[Residual] = Residual()
    feed_forward_residual: PerLayer[Residual] = Residual()
    shared_blocks: tuple[int | None, ...] | None = None
    shared_mlp: MlpHparams | None = None
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the weights of norms: 1 where files store weight - 1
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None  # c: logits become c tanh(logits / c)
    tie_embeddings: bool = False
    residual_in_float32: bool = False
    context_length: int | None = None  # longest sequence the model was trained for

    def __post_init__(self) -> None:
        for name in ("n_layers", "d_model", "vocab_size"):
            if getattr(self, name) < 1:
                raise HparamsError(f"{name}: {getattr(self, name)} must be at least 1")
        attention = checked_indices("attention_layer_indices", self.attention_layer_indices, self.n_layers)
        recurrent = self.recurrent_layer_indices
        if recurrent is None:
            recurrent = tuple(i for i in range(self.n_layers) if i not in attention)
        recurrent = checked_indices("recurrent_layer_indices", recurrent, self.n_layers)
        object.__setattr__(self, "attention_layer_indices", attention)
        object.__setattr__(self, "recurrent_layer_indices", recurrent)
        for field in (*_PER_LAYER, "shared_blocks"):
            value = getattr(self, field)
            if isinstance(value, tuple) and len(value) != self.n_layers:
                raise HparamsError(f"{field}: {len(value)} entries for n_layers={self.n_layers}")
        for field, indices in (("attention", attention), ("recurrent", recurrent)):
            value = getattr(self, field)
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
                norms=_of_layer(self.norms, i) or "pre",
                mixer_residual=_of_layer(self.mixer_residual, i) or Residual(),
                feed_forward_residual=_of_layer(self.feed_forward_residual, i) or Residual(),
                shared_mlp=self.shared_mlp if self.shared_block_of(i) is not None else None,
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

    def for_context(self, n_ctx: int) -> Hparams:
        """The same model for sequences of up to `n_ctx` tokens.

        Only LongRoPE asks: its factors beyond the original context hold for a whole sequence, so that one
        set must be chosen before the first token, as other engines with a cache do. Without this the
        factors of short sequences hold.
        """

        def chosen(hp: AttendingHparams) -> AttendingHparams:
            if hp.rope is None or hp.rope.scaling != "longrope":
                return hp
            long = n_ctx > hp.rope.original_context
            return dataclasses.replace(hp, rope=dataclasses.replace(hp.rope, long=long))

        return dataclasses.replace(self, attention=_each(self.attention, chosen))

    def with_dt_floor(self, floor: float | None) -> Hparams:
        """The same model with a least dt of Mamba-2 layers in prefill, as transformers has it for Nemotron-H
        and Zamba2 (their `time_step_min`) but not in decode; None, the default, treats both alike."""

        def floored(hp: RecurrentHparams) -> RecurrentHparams:
            return dataclasses.replace(hp, dt_floor=floor) if isinstance(hp, Mamba2Hparams) else hp

        return dataclasses.replace(self, recurrent=_each(self.recurrent, floored))

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

    def shared_block_of(self, i: int) -> int | None:
        """The number of the shared transformer block that layer `i` uses."""
        return None if self.shared_blocks is None else self.shared_blocks[i]

    def cell_shapes(self, i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """[heads, size] of one token's K, and of its V, in layer `i`, which must be an attention layer."""
        attention = self.layers[i].attention
        if attention is None:
            raise HparamsError(f"attention_layer_indices: layer {i} holds no K/V")
        return attention.key_shape, attention.value_shape

    def state_shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """Shapes of one sequence's state in layer `i`, which must be a recurrent layer."""
        recurrent = self.layers[i].recurrent
        if recurrent is None:
            raise HparamsError(f"recurrent_layer_indices: layer {i} holds no recurrent state")
        return recurrent.state_shapes


def _each(value: PerLayer[A], f: Callable[[A], A]) -> PerLayer[A]:
    """`f` of every layer's value."""
    if isinstance(value, tuple):
        return tuple(None if v is None else f(v) for v in value)
    return None if value is None else f(value)


def _of_layer(value: PerLayer[A], i: int) -> A | None:
    return value[i] if isinstance(value, tuple) else value


_PER_LAYER = (
    "attention",
    "recurrent",
    "mlp",
    "moe",
    "norms",
    "mixer_residual",
    "feed_forward_residual",
)
