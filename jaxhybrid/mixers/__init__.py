"""Mixers: what makes tokens see each other. One file for each, all with the same two functions.

spec(hp, d_model) -> tree of TensorSpec
apply(p, x [B, T, D], memory, positions [B, T], lengths [B], hp) -> (y [B, T, D], memory)
"""

from __future__ import annotations

from types import ModuleType

from jaxhybrid.hparams import AttendingHparams, RecurrentHparams
from jaxhybrid.mixers import attention, gated_delta, lightning, mamba1, mamba2, mla, rg_lru, short_conv

_MIXERS: dict[str, ModuleType] = {
    "attention": attention,
    "gated_delta": gated_delta,
    "lightning": lightning,
    "mamba1": mamba1,
    "mamba2": mamba2,
    "mla": mla,
    "rg_lru": rg_lru,
    "short_conv": short_conv,
}


def mixer_of(hp: AttendingHparams | RecurrentHparams) -> ModuleType:
    """The module of a mixer's hparams."""
    return _MIXERS[hp.kind]
