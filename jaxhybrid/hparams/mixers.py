"""Static description of each mixer: its sizes, its variants, and the state it keeps.

Every class names its place in the parameter tree (`kind`). Attention-like mixers say what a cell holds
(`key_shape`, `value_shape`), recurrent ones what a slot holds (`state_shapes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class RopeHparams:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) on the first `dim` dims of a head.

    interleaved: pairs are (0, 1), (2, 3), ... instead of halves. amplitude: factor of sine and cosine.
    """

    dim: int
    theta: float = 10000.0
    scaling: str = "default"  # default | linear | llama3 | yarn | longrope | proportional
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3, yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope, up to the original context
    long_factors: tuple[float, ...] = ()  # longrope, beyond it
    long: bool = False  # longrope: which of the two hold
    fraction: float = 1.0  # proportional: part of the frequencies that is not zero
    interleaved: bool = False
    amplitude: float = 1.0


@dataclass(frozen=True)
class AttentionHparams:
    """Grouped-query attention. `rope=None` is NoPE; `scale` multiplies the scores.

    window: tokens a query sees, itself included (None: all). qk_norm_eps: of an RMS norm of q and k, None
    for none; of every head, or of all heads together with qk_norm_full; its weights plus qk_norm_offset.
    gate: sigmoid gates of the outputs, None, "element" (one an element, projected together with q) or
    "head" (one a head). The multipliers scale the input, the keys and the output. d_in: width of the
    input where it is not d_model. adapter_rank: of low-rank corrections to q, k and v.
    """

    kind: ClassVar[str] = "attention"

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeHparams | None = None
    bias: bool = False  # of q, k and v
    out_bias: bool = False
    window: int | None = None
    qk_norm_eps: float | None = None
    qk_norm_full: bool = False
    qk_norm_offset: float = 0.0
    gate: str | None = None
    in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    out_multiplier: float = 1.0
    d_in: int | None = None
    adapter_rank: int | None = None

    @property
    def key_shape(self) -> tuple[int, int]:
        """Shape of one token's K in a cache."""
        return (self.n_kv_heads, self.head_dim)

    @property
    def value_shape(self) -> tuple[int, int]:
        return (self.n_kv_heads, self.head_dim)


@dataclass(frozen=True)
class MlaHparams:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V of all heads from one latent.

    A head's key has `nope_dim` dims from the latent and `rope_dim` shared by all heads, which `rope`
    rotates (None: not at all). q_rank: of a low-rank query projection, None for a plain one. gate: a sigmoid
    gate for each head's output. A cell holds the shared key part (K) and the normed latent (V).
    """

    kind: ClassVar[str] = "mla"
    window: ClassVar[None] = None

    n_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeHparams | None = None
    q_rank: int | None = None
    gate: bool = False
    norm_eps: float = 1e-6

    @property
    def key_shape(self) -> tuple[int, int]:
        return (1, self.rope_dim)

    @property
    def value_shape(self) -> tuple[int, int]:
        return (1, self.kv_rank)


@dataclass(frozen=True)
class Mamba1Hparams:
    """Mamba (selective state spaces, arXiv:2312.00752): `d_inner` channels with states of `state_size`.

    inner_norm: of dt, B and C; None, "plain" (RMS without weights, Falcon Mamba) or "weighted" (Jamba).
    n_heads: dt, B and C are projected for each group of channels apart (Zamba).
    """

    kind: ClassVar[str] = "mamba1"

    d_inner: int
    state_size: int
    dt_rank: int
    conv_kernel: int = 4
    n_heads: int = 1
    chunk: int = 32
    inner_norm: str | None = None
    norm_eps: float = 1e-6
    bias: bool = False
    conv_bias: bool = True

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "conv": (self.conv_kernel - 1, self.d_inner),
            "ssm": (self.d_inner, self.state_size),
        }


@dataclass(frozen=True)
class Mamba2Hparams:
    """Mamba-2 (SSD, arXiv:2405.21060): `n_heads` heads of `head_dim`, states of `state_size`.

    gated_norm: "after" the gate (the reference), "before" it, or None for the gate alone. dt_floor: least
    dt of prefill only, as transformers has it for Nemotron-H and Zamba2; None, the default, treats prefill
    and decode alike. multipliers: of the input, the output, and of z, x, B, C and dt as projected.
    """

    kind: ClassVar[str] = "mamba2"

    n_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 1
    conv_kernel: int = 4
    chunk: int = 64
    dt_min: float = 0.0
    dt_max: float = math.inf
    dt_floor: float | None = None
    norm_eps: float = 1e-5
    gated_norm: str | None = "after"
    bias: bool = False
    conv_bias: bool = True
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    multipliers: tuple[float, float, float, float, float] | None = None

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
class GatedDeltaHparams:
    """Gated delta net (arXiv:2412.06464), or Kimi delta attention (arXiv:2510.26692) by channel.

    Each of n_heads value heads keeps a [key_dim, value_dim] matrix; n_key_heads divide them. decay: "head"
    (one a head), "channel" (one a key channel) or "safe_channel" (the same, at least e^decay_bound).
    decay_rank, gate_rank: of low-rank projections, None for plain ones. beta_scale: 2 allows negative
    eigenvalues. gate: of the normed output, "silu" or "sigmoid".
    """

    kind: ClassVar[str] = "gated_delta"

    n_heads: int
    n_key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4
    chunk: int = 64
    decay: str = "head"
    decay_bound: float = -5.0
    decay_rank: int | None = None
    gate: str = "silu"
    gate_rank: int | None = None
    beta_scale: float = 1.0
    norm_eps: float = 1e-6

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.n_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.n_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def decays(self) -> int:
        """Width of all decays."""
        return self.n_heads if self.decay == "head" else self.n_heads * self.key_dim

    @property
    def projections(self) -> tuple[int, ...]:
        """Widths of q, k, v, the gate, beta and the decay as projected from the input."""
        gate = self.values if self.gate_rank is None else self.gate_rank
        decay = self.decays if self.decay_rank is None else self.decay_rank
        return (self.keys, self.keys, self.values, gate, self.n_heads, decay)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "conv": (self.conv_kernel - 1, self.conv_channels),
            "delta": (self.n_heads, self.key_dim, self.value_dim),
        }


@dataclass(frozen=True)
class ShortConvHparams:
    """Gated short convolution (LFM2, arXiv:2511.23404) over `width` channels."""

    kind: ClassVar[str] = "short_conv"

    width: int
    conv_kernel: int = 3
    bias: bool = False

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"conv": (self.conv_kernel - 1, self.width)}


@dataclass(frozen=True)
class RgLruHparams:
    """Real-gated linear recurrent unit (Griffin, arXiv:2402.19427) over `width` channels in `n_blocks`."""

    kind: ClassVar[str] = "rg_lru"

    width: int
    n_blocks: int
    conv_kernel: int = 4
    chunk: int = 64

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"conv": (self.conv_kernel - 1, self.width), "lru": (self.width,)}


@dataclass(frozen=True)
class LightningHparams:
    """Lightning attention (arXiv:2401.04658): linear attention with a constant decay for each head.

    depth: what the ALiBi-like slopes 2^(-8 (h + 1) / n_heads) are multiplied by, smaller in later layers.
    """

    kind: ClassVar[str] = "lightning"

    n_heads: int
    head_dim: int
    depth: float
    chunk: int = 64
    norm_eps: float = 1e-6

    @property
    def slopes(self) -> tuple[float, ...]:
        """Minus the log decay a token of each head."""
        return tuple(2.0 ** (-8.0 * (h + 1) / self.n_heads) * self.depth for h in range(self.n_heads))

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"kv": (self.n_heads, self.head_dim, self.head_dim)}


AttendingHparams: TypeAlias = AttentionHparams | MlaHparams
"""Mixers that remember a cell for every token."""
RecurrentHparams: TypeAlias = (
    Mamba1Hparams | Mamba2Hparams | GatedDeltaHparams | ShortConvHparams | RgLruHparams | LightningHparams
)
"""Mixers that remember one state."""
