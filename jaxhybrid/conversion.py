"""Models from one form on disk to another."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxhybrid.errors import CheckpointError, TokenizerError, UsageError
from jaxhybrid.files import writing
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.load import load_params, write_gguf
from jaxhybrid.files.source import is_gguf
from jaxhybrid.files.stored import is_model, open_model
from jaxhybrid.files.writing import weights_dtype
from jaxhybrid.text import Tokenizer
from jaxhybrid.weights import check_format, format_name

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
    progress: writing.Progress | None = None,
) -> None:
    """Write the model at `source` (a folder, .gguf file or hub id) to `destination`, a folder or .gguf file.

    to: a key of FORMS, None for what the destination's suffix says. dtype: of the weights, None for that of
    the source; norms, decays and biases only ever become wider. quantize: "int8", "int8_block" or "int4", of
    the large matrices. force: replace a model that is there. progress: see `load_params`. Tokenizer, chat
    template, generation settings and licence go along; tensors that the model does not use too, as they are,
    but a stored copy of tied embeddings does not. A GGUF file has int8_block and int4 as Q8_0 and Q4_0, has
    no int8, and carries no tensors that the model does not use.

    In memory at once: one file of at most 2 GiB, or, for orbax and GGUF, the whole model. Raises UsageError,
    CheckpointError or HparamsError; what was at `destination` is then still there.
    """
    check_format(quantize)
    form, target = _form(to, destination), Path(destination).absolute()
    folder = resolve_model(str(source))
    if folder.resolve().is_relative_to(target.resolve()):
        raise UsageError(f"{destination}: is where the source lies; choose another folder")
    if force and target.exists() and not _replaceable(target, form):
        raise UsageError(f"{destination}: holds no model, so it is not replaced; choose another name")
    if form == "gguf":
        if target.exists() and not force:
            raise CheckpointError(
                f"{destination}: exists already; choose another name or replace it with --force"
            )
        _write_gguf(folder, target, dtype, quantize, progress)
        return
    with writing.new_folder(target, force) as made:
        model = open_model(folder)
        if quantize is not None and model.kept is not None:
            raise CheckpointError(
                f"{source}: its weights are {model.kept.format} already; leave out quantize"
            )
        if dtype is not None and jnp.dtype(dtype) == jnp.float16 and (quantize or model.kept):
            raise UsageError(
                "dtype: activations beside quantized weights are float32 or bfloat16, not float16"
            )
        changes = writing.Changes(None if dtype is None else jnp.dtype(dtype), quantize)
        _WRITERS[form](made, model, changes, progress)
        if is_gguf(folder):
            tokenizer = _tokenizer(folder)
            if tokenizer is not None:
                tokenizer.save(made)
        else:
            writing.copy_companions(folder, made)


def _form(to: str | None, destination: str | Path) -> str:
    """What to write."""
    suffix = Path(destination).suffix.lower()
    if to is None:
        to = next((form for form, end in FORMS.items() if end == suffix and end), "safetensors")
    if to not in FORMS:
        raise UsageError(f"to: {to!r} is not one of {', '.join(FORMS)}")
    return to


def _write_gguf(source: Path, target: Path, dtype: Any, quantize: str | None, progress: Any) -> None:
    if quantize == "int8":
        raise UsageError("quantize: GGUF has no int8 by channel; use int8_block or int4")
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    form = {"int8_block": "Q8_0", "int4": "Q4_0"}.get(quantize or "")
    if form is None and dtype is not None:
        form = names.get(jnp.dtype(dtype).name)
    if form is None and dtype is not None:
        raise UsageError(f"dtype: {jnp.dtype(dtype).name} is not one of {', '.join(names)}")
    params = load_params(source, quantize=quantize, progress=progress)
    if form is None and format_name(params) is None:  # float16 in the source is bfloat16 in memory
        form = names[weights_dtype(open_model(source)).name]
    write_gguf(params, target, tokenizer=_tokenizer(source), dtype=form)


def _tokenizer(source: Path) -> Tokenizer | None:
    """None, with a warning, where there is none; TokenizerError where it cannot be read."""
    try:
        return Tokenizer.load(source)
    except TokenizerError as error:
        if "has no tokenizer" not in str(error):
            raise
        warnings.warn(f"{source}: has no tokenizer; the result runs on token ids only", stacklevel=4)
        return None


def _replaceable(path: Path, form: str) -> bool:
    """Whether it is a model, or empty: nothing else is ever removed."""
    if form == "gguf":
        return path.is_file() and is_gguf(path)
    return path.is_dir() and (is_model(path) or not any(path.iterdir()))
