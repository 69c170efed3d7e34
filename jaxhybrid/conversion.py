"""Models from one form on disk to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.files import writing
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.stored import is_model, open_model
from jaxhybrid.weights import check_format

FORMS = {"safetensors": "", "orbax": ".orbax"}
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
    """Write the model at `source` (a folder or hub id) to the folder `destination`.

    to: a key of FORMS, None for what the destination's suffix says. dtype: of the weights, None for that of
    the source; norms, decays and biases only ever become wider. quantize: "int8", "int8_block" or "int4", of
    the large matrices. force: replace a model that is there. progress: see `load_params`. Tokenizer, chat
    template, generation settings and licence go along; tensors that the model does not use too, as they are,
    but a stored copy of tied embeddings does not.

    In memory at once: one file of at most 2 GiB, or, for orbax, the whole model. Raises UsageError,
    CheckpointError or HparamsError; what was at `destination` is then still there.
    """
    check_format(quantize)
    form, target = _form(to, destination), Path(destination).absolute()
    folder = resolve_model(str(source))
    if folder.resolve().is_relative_to(target.resolve()):
        raise UsageError(f"{destination}: is where the source lies; choose another folder")
    if (
        force
        and target.exists()
        and not (target.is_dir() and (is_model(target) or not any(target.iterdir())))
    ):
        raise UsageError(f"{destination}: holds no model, so it is not replaced; choose another folder")
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
        writing.copy_companions(folder, made)


def _form(to: str | None, destination: str | Path) -> str:
    """What to write."""
    suffix = Path(destination).suffix.lower()
    if to is None:
        to = next((form for form, end in FORMS.items() if end == suffix and end), "safetensors")
    if to not in FORMS:
        raise UsageError(f"to: {to!r} is not one of {', '.join(FORMS)}")
    return to


def _replaceable(path: Path) -> bool:
    """Whether it is a model, or empty: nothing else is ever removed."""
    return path.is_dir() and (is_model(path) or not any(path.iterdir()))
