"""Model families: configuration to hparams, and tensor names. Data only, no mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families import gemma3_text, granitemoehybrid, llama, mamba2
from jaxhybrid.families.names import Source
from jaxhybrid.hparams import Hparams


@dataclass(frozen=True)
class Family:
    """`hparams` reads a configuration; `tensors` says where each parameter lies in the files.

    `ignored` and `renamed` are regular expressions: tensors that carry nothing, and old spellings.
    """

    hparams: Callable[[dict[str, Any]], Hparams]
    tensors: Callable[[Hparams], dict[str, Source]]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


FAMILIES: dict[str, Family] = {
    "gemma3_text": Family(gemma3_text.hparams, gemma3_text.tensors),
    "granitemoehybrid": Family(granitemoehybrid.hparams, granitemoehybrid.tensors),
    "llama": Family(llama.hparams, llama.tensors, ignored=(r".*\.rotary_emb\.inv_freq",)),
    "mamba2": Family(
        mamba2.hparams,
        mamba2.tensors,
        renamed=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    ),
}


def family(model_type: str) -> Family:
    """The family of a configuration's `model_type`; HparamsError when there is none."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise HparamsError(f"model_type: {model_type!r} is not supported; known are {known}") from None


def hparams_from_config(config: dict[str, Any]) -> Hparams:
    """Hparams of a Hugging Face configuration; HparamsError naming the field that does not fit."""
    return family(config.get("model_type", "")).hparams(config)


def tensors_of(hparams: Hparams) -> dict[str, Source]:
    """Where each parameter of a model lies in its files, by dotted path in the parameter tree."""
    return family(hparams.family).tensors(hparams)
