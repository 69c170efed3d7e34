"""From a folder and a prompt to text: `load`, `generate`, `stream`."""

from __future__ import annotations

import importlib.resources
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxhybrid.adapters import add_lora, load_adapter
from jaxhybrid.cache import create_cache
from jaxhybrid.clock import Clock
from jaxhybrid.errors import UsageError
from jaxhybrid.files.hub import resolve_model
from jaxhybrid.files.load import load_params
from jaxhybrid.files.writing import Progress
from jaxhybrid.generation import Generation, prefill
from jaxhybrid.settings import Model, Piece, Prompt, Settings, Timings


def load(
    path: str | Path | None = None,
    *,
    dtype: Any = None,
    quantize: str | None = None,
    n_ctx: int | None = None,
    adapter: str | Path | None = None,
    progress: Progress | None = None,
) -> Model:
    """A model from a folder (Hugging Face's or orbax), a .gguf file or a hub id; None: the small one inside
    this package.

    dtype: of the weights, None for that of the files. quantize: "int8", "int8_block" or "int4", see
    `load_params`. n_ctx: tokens a sequence will hold, which models with LongRoPE must know from the start
    (None: no more than they were first trained for). adapter: the folder of a LoRA adapter for the model, as
    PEFT or `save_adapter` writes it: merged into float32 weights, beside others. Raises CheckpointError,
    HparamsError or UsageError.
    """
    began = time.perf_counter()
    folder = embedded_folder() if path is None else resolve_model(str(path))
    params = load_params(folder, dtype, quantize=quantize, progress=progress)
    if adapter is not None:
        params = add_lora(params, load_adapter(adapter, params))
    if n_ctx is not None:
        params = params.replace(hparams=params.hparams.for_context(n_ctx))
    jax.block_until_ready(params)
    return Model(params, folder, time.perf_counter() - began)


def embedded_folder() -> Path:
    """Where the model inside this package lies."""
    return Path(str(importlib.resources.files("jaxhybrid") / "models" / "tiny"))


def generate(model: Model, prompts: Prompt | Sequence[Prompt], **settings: Any) -> Any:
    """Continue one prompt (a Result) or several side by side (a list of Results, in order).

    A prompt is text, or token ids. Keywords are the fields of `Settings`.
    """
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
    several: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[assignment, list-item]
    results = [p.result for p in stream(model, several, **settings) if p.result is not None]
    results.sort(key=lambda r: r.index)
    return results[0] if single else results


def stream(model: Model, prompts: Sequence[Prompt], **settings: Any) -> Iterator[Piece]:
    """The same as `generate`, piece by piece, as the text appears.

    Closing the iterator ends the generation. Raises before anything is computed when a prompt is
    empty or does not fit.
    """
    wanted = Settings(**settings)
    wanted.check_model(model)
    ids = [encode_prompt(model, p, i) for i, p in enumerate(prompts)]
    _check_lengths(model, ids, wanted)
    return _stream(model, ids, wanted)


def _stream(model: Model, ids: list[list[int]], wanted: Settings) -> Iterator[Piece]:
    for first in range(0, len(ids), wanted.batch_size):
        group = ids[first : first + wanted.batch_size]
        cells = wanted.n_ctx or max(len(p) for p in group) + wanted.max_tokens
        cache = create_cache(
            model.params.hparams,
            cells,
            len(group),
            dtype=model.params.dtype,
            n_rollback=wanted.n_rollback,
            n_ubatch=max(wanted.n_ubatch, wanted.n_rollback + 1),
        )
        timings = Timings()
        with Clock() as clock:
            logits, cache = prefill(model, cache, group, wanted)
            jax.block_until_ready(logits)
        timings.prompt, timings.compile = clock.run, clock.compile
        rows = Generation(model, cache, group, [len(p) for p in group], first, wanted, timings)
        yield from rows.run(logits)


def encode_prompt(model: Model, prompt: Prompt, index: int = 0) -> list[int]:
    """Token ids of a prompt; UsageError when there are none or one is outside the vocabulary."""
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
    if not ids:
        raise UsageError(f"prompt {index + 1} is empty: it has no tokens to continue from")
    vocab = model.params.hparams.vocab_size
    for token in ids:
        if not 0 <= token < vocab:
            raise UsageError(
                f"prompt {index + 1}: token {token} is outside the model's vocabulary of {vocab}; "
                "the tokenizer and the weights do not belong together"
            )
    return ids


def _check_lengths(model: Model, ids: list[list[int]], wanted: Settings) -> None:
    hp = model.params.hparams
    if wanted.n_ctx is not None and not hp.is_recurrent:
        for i, prompt in enumerate(ids):
            if len(prompt) > wanted.n_ctx:
                raise UsageError(
                    f"prompt {i + 1} has {len(prompt)} tokens, the context holds {wanted.n_ctx}; "
                    "raise n_ctx (--ctx) or shorten the prompt"
                )
    longest = max((len(p) for p in ids), default=0)
    if hp.context_length is not None and longest > hp.context_length:
        warnings.warn(
            f"a prompt of {longest} tokens is longer than the {hp.context_length} the model was "
            "trained on; expect poor text",
            stacklevel=3,
        )
