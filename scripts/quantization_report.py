"""What quantized weights cost in quality: perplexity, divergence from float32, and how far logits are off.

    python scripts/quantization_report.py [--model FOLDER --text FILE]

Without --text the chapters that the model inside the package never saw (Debian's package bible-kjv).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_text import bible, documents_of, split

import jaxhybrid as jh
from jaxhybrid.ops.quantized import FORMATS
from jaxhybrid.params import Params
from jaxhybrid.units import readable_size


def rows_of(model: jh.Model, path: Path | None, length: int, n_rows: int) -> np.ndarray:
    """int32 [n_rows, length]: held-out text, document after document."""
    _, held_out = split(bible() if path is None else documents_of(path))
    ids = [token for document in held_out for token in model.tokenizer.encode(document.prose)]
    n_rows = min(n_rows, len(ids) // length)
    if n_rows == 0:
        raise SystemExit(f"quantization_report: the text has {len(ids)} tokens, {length} are needed")
    return np.asarray(ids[: n_rows * length], np.int32).reshape(n_rows, length)


@jax.jit
def compare(params: Params, exact: Params, tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Of one row of tokens [1, T], means over tokens: nats a token, KL(exact || params), squared error of
    the logits and squares of the exact ones (both after taking each token's mean away), equal first choice.
    """
    found, wanted = (jh.forward(p, tokens)[0, :-1] for p in (params, exact))
    log_p, log_q = jax.nn.log_softmax(wanted), jax.nn.log_softmax(found)
    nats = -jnp.take_along_axis(log_q, tokens[0, 1:, None], axis=-1)
    divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    centred = [logits - jnp.mean(logits, axis=-1, keepdims=True) for logits in (found, wanted)]
    same = jnp.argmax(found, axis=-1) == jnp.argmax(wanted, axis=-1)
    error = (centred[0] - centred[1]) ** 2
    return tuple(jnp.mean(x) for x in (nats, divergence, error, centred[1] ** 2, same.astype(jnp.float32)))


def lines(model: jh.Model, rows: np.ndarray) -> Iterator[str]:
    """A markdown table with a line for each format."""
    exact = model.params
    yield "| weights | bytes | perplexity | KL to float32 (nats) | logits error (rel. RMS) | same choice |"
    yield "|---|---|---|---|---|---|"
    for form in ("float32", "bfloat16", *FORMATS):
        if form in FORMATS:
            params = jh.quantize(exact, form)
        else:
            params = jh.load_params(model.folder, form)
        figures = [compare(params, exact, jnp.asarray(row[None])) for row in rows]
        nats, divergence, error, square, same = np.mean(np.asarray(figures, np.float64), axis=0)
        size = readable_size(sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
        yield (
            f"| {form} | {size} | {np.exp(nats):.3f} | {max(divergence, 0):.2e} "
            f"| {np.sqrt(error / square):.2e} | {100 * same:.1f}% |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="quantization_report", description="Quality of quantized weights.")
    parser.add_argument("--model", help="a Hugging Face folder or hub id (default: the one in the package)")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file; every 20th part of it is read")
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    model = jh.load(args.model, dtype="float32")
    rows = rows_of(model, args.text, args.length, args.rows)
    print(f"{rows.size} held-out tokens in rows of {rows.shape[1]}\n")
    for line in lines(model, rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
