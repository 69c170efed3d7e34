"""Static description of what follows the mixer: MLPs and routed experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MlpHparams:
    """Gated MLP `down(act(gate x) * up x)`, or `down(act(up x))` without a gate.

    sigmoid_gate: the output times sigmoid(w x), as shared experts of Qwen have it. The multipliers scale
    the gate and the output. adapter_rank: of a low-rank correction to gate and up.
    """

    d_ff: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True
    sigmoid_gate: bool = False
    gate_multiplier: float = 1.0
    out_multiplier: float = 1.0
    adapter_rank: int | None = None


@dataclass(frozen=True)
class MoeHparams:
    """Routed experts, MLPs of width `d_ff` without biases: `top_k` of `n_experts` for each token.

    scores: "softmax" or "sigmoid" of the router's logits. selection_bias: added to the scores for choosing,
    not for weighing. n_groups, top_groups: only experts of the groups with the largest sums of their two best
    scores are chosen. renormalise: weights are divided by their sum plus renormalise_eps, then times
    `multiplier`. latent: width that the experts work in, None for that of the model.
    """

    n_experts: int
    top_k: int
    d_ff: int
    activation: str = "silu"
    gated: bool = True
    scores: str = "softmax"
    selection_bias: bool = False
    n_groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    renormalise_eps: float = 0.0
    multiplier: float = 1.0
    latent: int | None = None
