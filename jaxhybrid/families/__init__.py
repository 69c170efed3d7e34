"""Model families: configuration to hparams, and tensor names. Data only, no mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxhybrid.errors import HparamsError
from jaxhybrid.families import (
    bamba,
    falcon_h1,
    gemma3_text,
    granitemoehybrid,
    jamba,
    kimi_linear,
    lara_mini,
    lfm2,
    llama,
    mamba,
    mamba2,
    minimax,
    nemotron_h,
    olmo_hybrid,
    qwen3_next,
    recurrent_gemma,
    zamba2,
)
from jaxhybrid.families.names import Source
from jaxhybrid.hparams import Hparams


@dataclass(frozen=True)
class Family:
    """`hparams` reads a configuration; `tensors` says where each parameter lies in the files.

    `ignored` and `renamed` are regular expressions: tensors that carry nothing, and old spellings. So is
    `in_memory`: what transformers calls modules otherwise than files do, which is what adapters name.
    """

    hparams: Callable[[dict[str, Any]], Hparams]
    tensors: Callable[[Hparams], dict[str, Source]]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    in_memory: tuple[tuple[str, str], ...] = ()


_NOT_TEXT = (r"(model\.)?visual\..*", r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
_PREDICTION = (r"mtp\..*", r"model\.mtp\..*")
_INSIDE = (
    (r"^(model\.language_model|language_model\.model)\.", "model."),
    (r"^language_model\.lm_head", "lm_head"),
)
"""Names of the text part inside a vision-language checkpoint."""

_OLD_BACKBONE = ((r"^backbone\.embedding\.", "backbone.embeddings."),)
"""What Mamba files called their embeddings once."""

_GEMMA3 = Family(gemma3_text.hparams, gemma3_text.tensors, _NOT_TEXT, _INSIDE)
_LLAMA = Family(llama.hparams, llama.tensors, ignored=(r".*\.rotary_emb\.inv_freq",))
_MAMBA = Family(mamba.hparams, mamba.tensors, renamed=_OLD_BACKBONE)
_QWEN = Family(qwen3_next.hparams, qwen3_next.tensors, (*_NOT_TEXT, *_PREDICTION), _INSIDE)
_LFM = Family(lfm2.hparams, lfm2.tensors, _NOT_TEXT, _INSIDE)

FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        kimi_linear.hparams,
        kimi_linear.tensors,
        ignored=_PREDICTION,
        in_memory=(
            (r"\.attention\.dense$", ".self_attn.o_proj"),
            (r"\.attention\.f_proj$", ".self_attn.forget_gate.f_proj"),
            (r"\.attention\.", ".self_attn."),
        ),
    ),
    "bamba": Family(bamba.hparams, bamba.tensors),
    "falcon_h1": Family(falcon_h1.hparams, falcon_h1.tensors),
    "falcon_mamba": _MAMBA,
    "gemma3_text": _GEMMA3,
    "granite": _LLAMA,
    "granitemoehybrid": Family(granitemoehybrid.hparams, granitemoehybrid.tensors),
    "jamba": Family(jamba.hparams, jamba.tensors),
    "kimi_linear": Family(
        kimi_linear.hparams,
        kimi_linear.tensors,
        renamed=((r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),),
        in_memory=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.self_attn\.(f_[ab]_proj)$", r".self_attn.forget_gate.\1"),
        ),
    ),
    "lara_mini": Family(lara_mini.hparams, lara_mini.tensors),
    "lfm2": _LFM,
    "lfm2_moe": _LFM,
    "lfm3": Family(
        lfm2.hparams,
        lfm2.tensors,
        _NOT_TEXT,
        _INSIDE,
        in_memory=((r"\.self_attn\.gate_proj$", ".self_attn.g_proj"),),
    ),
    "llama": _LLAMA,
    "mamba": _MAMBA,
    "mamba2": Family(
        mamba2.hparams,
        mamba2.tensors,
        renamed=_OLD_BACKBONE,
    ),
    "minimax": Family(minimax.hparams, minimax.tensors, ignored=minimax.IGNORED),
    "mistral": _LLAMA,
    "nemotron_h": Family(
        nemotron_h.hparams,
        nemotron_h.tensors,
        ignored=_PREDICTION,
        in_memory=((r"^backbone\.", "model."),),
    ),
    "olmo_hybrid": Family(olmo_hybrid.hparams, olmo_hybrid.tensors, renamed=olmo_hybrid.RENAMED),
    "qwen3": _LLAMA,
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": _QWEN,
    "recurrent_gemma": Family(recurrent_gemma.hparams, recurrent_gemma.tensors),
    "zamba": Family(zamba2.hparams, zamba2.tensors),
    "zamba2": Family(zamba2.hparams, zamba2.tensors),
}
TEXT_OF = {
    "gemma3": "gemma3_text",
    "lfm2_vl": "lfm2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Vision-language models, of which the text part is read: their `text_config` is of this family."""


def family(model_type: str) -> Family:
    """The family of a configuration's `model_type`; HparamsError when there is none."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise HparamsError(f"model_type: {model_type!r} is not supported; known are {known}") from None


def hparams_from_config(config: dict[str, Any]) -> Hparams:
    """Hparams of a Hugging Face configuration; HparamsError naming the field that does not fit."""
    config = text_config(config)
    return family(config.get("model_type", "")).hparams(config)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the language model: all of it, or `text_config`."""
    kind = TEXT_OF.get(config.get("model_type", ""))
    if kind is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise HparamsError(f"text_config: {text!r} must be an object")
    tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
    return {**tied, **text, "model_type": kind}


def tensors_of(hparams: Hparams) -> dict[str, Source]:
    """Where each parameter of a model lies in its files, by dotted path in the parameter tree."""
    return family(hparams.family).tensors(hparams)
