"""Texts to vectors: the hidden states after the last norm, pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxhybrid.batch import Batch
from jaxhybrid.cache import create_cache
from jaxhybrid.driver import decode_hidden
from jaxhybrid.engine import encode_prompt
from jaxhybrid.errors import UsageError
from jaxhybrid.settings import Model, Prompt

POOLINGS = ("mean", "last", "none")


def embed(
    model: Model,
    texts: Prompt | Sequence[Prompt],
    *,
    pooling: str = "mean",
    normalize: bool = True,
    n_ubatch: int = 512,
    batch_size: int = 16,
) -> Any:
    """Vectors of texts (or of token ids), float32.

    pooling: "mean" over all tokens of a text; "last", its last token, which alone has seen all of a causal
    model's text; "none", every token. normalize: to length 1. batch_size: texts side by side. n_ubatch:
    tokens of a step. Returns [D] for one text, [n, D] for several; with "none" [T, D], or a list of them.
    Raises UsageError for an empty text or an unknown pooling.
    """
    if pooling not in POOLINGS:
        raise UsageError(f"pooling: {pooling!r} is not one of {', '.join(POOLINGS)}")
    for name, value in (("n_ubatch", n_ubatch), ("batch_size", batch_size)):
        if value < 1:
            raise UsageError(f"{name}: {value} must be at least 1")
    single = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int | np.integer))
    several: Sequence[Prompt] = [texts] if single else texts  # type: ignore[assignment, list-item]
    ids = [tuple(encode_prompt(model, text, i)) for i, text in enumerate(several)]
    unique = list(dict.fromkeys(ids))
    found: dict[tuple[int, ...], np.ndarray] = {}
    # texts of similar length side by side waste little padding
    unique.sort(key=len)
    for first in range(0, len(unique), batch_size):
        group = unique[first : first + batch_size]
        for tokens, states in zip(group, _states(model, group, pooling, n_ubatch), strict=True):
            vector = states.mean(axis=0) if pooling == "mean" else states[-1] if pooling == "last" else states
            if normalize:
                length = np.linalg.norm(vector, axis=-1, keepdims=True)
                vector = vector / np.maximum(length, np.finfo(np.float32).tiny)
            found[tokens] = vector.astype(np.float32)
    vectors = [found[tokens] for tokens in ids]
    if single:
        return vectors[0]
    if pooling == "none":
        return vectors
    return np.stack(vectors) if vectors else np.zeros((0, model.params.hparams.d_model), np.float32)


def _states(model: Model, group: list[tuple[int, ...]], pooling: str, n_ubatch: int) -> list[np.ndarray]:
    """Hidden states [T, D] of each text; of its last token only, [1, D], where no more is needed."""
    params = model.params
    cache = create_cache(
        params.hparams, max(map(len, group)), len(group), dtype=params.dtype, n_ubatch=n_ubatch
    )
    batch = Batch(
        tokens=[t for tokens in group for t in tokens],
        seq_ids=[(i,) for i, tokens in enumerate(group) for _ in tokens],
        outputs=None if pooling == "last" else [True] * sum(map(len, group)),
    )
    hidden, _ = decode_hidden(params, cache, batch, n_ubatch=n_ubatch, donate=True)
    lengths = [1] * len(group) if pooling == "last" else [len(tokens) for tokens in group]
    return np.split(np.asarray(hidden.astype(jnp.float32)), np.cumsum(lengths)[:-1])
