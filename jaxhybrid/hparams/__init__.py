"""Static description of a model: frozen, hashable, known before a weight is read."""

from jaxhybrid.hparams.encodings import resolve_layers
from jaxhybrid.hparams.feed_forward import MlpHparams, MoeHparams
from jaxhybrid.hparams.mixers import (
    AttendingHparams,
    AttentionHparams,
    GatedDeltaHparams,
    LightningHparams,
    Mamba1Hparams,
    Mamba2Hparams,
    MlaHparams,
    RecurrentHparams,
    RgLruHparams,
    RopeHparams,
    ShortConvHparams,
)
from jaxhybrid.hparams.model import Hparams, Layer, Residual

__all__ = [
    "AttendingHparams",
    "AttentionHparams",
    "GatedDeltaHparams",
    "Hparams",
    "Layer",
    "LightningHparams",
    "Mamba1Hparams",
    "Mamba2Hparams",
    "MlaHparams",
    "MlpHparams",
    "MoeHparams",
    "RecurrentHparams",
    "Residual",
    "RgLruHparams",
    "RopeHparams",
    "ShortConvHparams",
    "resolve_layers",
]
