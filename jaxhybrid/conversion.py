"""Models from one form on disk to another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxhybrid.errors import CheckpointError, TokenizerError, UsageError
from jaxhybrid.files import writing
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.source import gguf_part, is_gguf
from jaxhybrid.files.stored import StoredModel, is_model, open_model, warn_of_unexpected
from jaxhybrid.text import Tokenizer
from jaxhybrid.weights import check_format

FORMS = {"safetensors": "", "orbax": ".orbax", "gguf": ".gguf"}
"""What can be written, and the suffix that says so where `to` does not."""

_WRITERS = {"safetensors": writing.write_folder, "orbax": writing.write_orbax}


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    force: bool = False,
    tokenizer: bool = True,
    progress: writing.Progress | None = None,
) -> None:
    """Write the model at `source` (a folder, .gguf file or hub id) to the folder or .gguf file `destination`.

    to: a key of FORMS, None for what the destination's suffix says. dtype: of the weights, None for that of
    the source; norms, decays and biases only ever become wider. quantize: "int8", "int8_block" or "int4", of
    the large matrices. force: replace a model that is there. tokenizer: whether it goes along. progress: see
    `load_params`. Chat template, generation settings and licence go along; tensors that the model does not
    use too, as they are, but a stored copy of tied embeddings does not.

    A GGUF file has blocks: read, they become float32 unless `quantize` names their layout (Q8_0 is
    "int8_block", Q4_0 "int4"), which keeps them bit for bit; written, `quantize` makes them. It has the
    tokenizer, chat template and ends of texts, no other companion, and no tensor that the model does not use.

    In memory at once: one file of at most 2 GiB, for orbax the whole model twice, for GGUF two parameters.
    Raises UsageError, CheckpointError or HparamsError; what was at `destination` is then still there.
    """
    check_format(quantize)
    form, target = _form(to, destination), Path(destination).absolute()
    folder = resolve_model(str(source))
    if folder.resolve().is_relative_to(target.resolve()):
        raise UsageError(f"{destination}: is where the source lies; choose another folder")
    if form == "gguf" and target.is_dir():
        raise UsageError(f"{destination}: is a folder, and a GGUF model one file; choose another name")
    writing.check_free(target, force)
    if os.path.lexists(target) and not _replaceable(target):
        raise UsageError(f"{destination}: holds no model, so it is not replaced; choose another name")
    model = open_model(folder, quantize)
    changes = writing.Changes(None if dtype is None else jnp.dtype(dtype), quantize)
    through_gguf = form == "gguf" or is_gguf(folder)
    found = _tokenizer(folder) if tokenizer and through_gguf else None
    if form == "gguf":
        kind = _gguf_dtype(model, changes)
        gguf_part("write").write(target, model.hparams, model.read, found, kind, progress)
    else:
        if changes.dtype == jnp.float16 and (quantize or model.kept):
            raise UsageError(
                "dtype: activations beside quantized weights are float32 or bfloat16, not float16"
            )
        with writing.new_folder(target, force) as made:
            if through_gguf:
                if found is not None:
                    found.save(made)
                model.config |= _said_elsewhere(model, found)
            else:
                writing.copy_companions(folder, made, tokenizer)
            _WRITERS[form](made, model, changes, progress)
    if through_gguf:
        warn_of_unexpected(model, folder, "; left out")


def _said_elsewhere(model: StoredModel, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Fields of config.json that a GGUF file has with its tensors and tokenizer; without them other readers
    take those of some released model."""
    found: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer is not None:
        pad = tokenizer.token_id(tokenizer.special_tokens.get("pad_token", ""))
        ends = sorted(tokenizer.eos_ids) or None
        found = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends, "pad_token_id": pad}
    return found | {"dtype": writing.weights_dtype(model).name}


def _tokenizer(path: Path) -> Tokenizer | None:
    """That of a model, None where it has none; CheckpointError where it cannot be used."""
    if is_gguf(path):
        there = gguf_part("tokenizer").has_tokenizer(path)
    else:
        there = any(path.glob("tokenizer*"))
    try:
        return Tokenizer.load(path) if there else None
    except TokenizerError as error:
        raise CheckpointError(f"{error}; or leave the tokenizer out (--no-tokenizer)") from error


def _gguf_dtype(model: StoredModel, changes: writing.Changes) -> str:
    form = changes.quantize or (model.kept.format if model.kept else None)
    if changes.quantize == "int8":
        raise UsageError("quantize: GGUF files have no int8 with one scale a channel; give int8_block")
    if form is not None and changes.dtype is not None:
        raise UsageError("dtype: what a quantized GGUF file does not quantize is F32; leave dtype out")
    return gguf_part("write").dtype_of(form, changes.dtype or writing.weights_dtype(model))


def _form(to: str | None, destination: str | Path) -> str:
    """What to write."""
    suffix = Path(destination).suffix.lower()
    if to is None:
        to = next((form for form, end in FORMS.items() if end == suffix and end), "safetensors")
    if to not in FORMS:
        raise UsageError(f"to: {to!r} is not one of {', '.join(FORMS)}")
    return to


def _replaceable(path: Path) -> bool:
    """Whether it is a model, or an empty folder: nothing else is ever removed."""
    return is_model(path) or path.is_dir() and not any(path.iterdir())
