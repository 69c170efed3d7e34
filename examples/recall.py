"""How many attention layers does recall need, and where?

    python examples/recall.py --out FOLDER    # some minutes a model; writes recall.png and recall.json

Hybrids of four layers that differ in `attention_layer_indices` alone are trained from scratch on multi-query
associative recall (arXiv:2312.04927): a row lists pairs of a key and a value and then asks for every key in
another order; the answer to a key is its value.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhybrid as jh
from jaxhybrid.hparams import AttentionHparams, Mamba2Hparams, RopeHparams

N_LAYERS = 4
PLACES = ((), (0,), (1,), (2,), (3,), (1, 3), (0, 1, 2, 3))
"""Attention layers of each model; the other layers are Mamba-2."""
SIZES = (2, 4, 8, 16)
"""Pairs in a row; training mixes them."""
N_KEYS = N_VALUES = 32


def hparams(attention_layer_indices: tuple[int, ...]) -> jh.Hparams:
    """Some 20,000 parameters; a Mamba-2 state has room for few pairs (4 heads of 8 x 4 numbers)."""
    return jh.Hparams(
        family="llama",
        n_layers=N_LAYERS,
        d_model=32,
        vocab_size=N_KEYS + N_VALUES,
        attention_layer_indices=attention_layer_indices,
        attention=AttentionHparams(
            n_heads=2, n_kv_heads=2, head_dim=16, scale=16**-0.5, rope=RopeHparams(dim=16)
        ),
        recurrent=Mamba2Hparams(n_heads=4, head_dim=8, state_size=4, chunk=3 * max(SIZES)),
        tie_embeddings=True,
    )


def rows(key: jax.Array, n_pairs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows for n_pairs int32 [B]: tokens, answers (-1: no question) int32 [B, 3 max(SIZES)], lengths [B]."""
    most = max(SIZES)

    def one(key: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        for_keys, for_values, for_order = jax.random.split(key, 3)
        keys = jax.random.permutation(for_keys, N_KEYS)[:most]
        values = N_KEYS + jax.random.randint(for_values, (most,), 0, N_VALUES)
        order = jnp.argsort(jnp.where(jnp.arange(most) < n, jax.random.uniform(for_order, (most,)), 2.0))
        place = jnp.arange(3 * most)
        pair, asked = place // 2 % most, order[jnp.clip(place - 2 * n, 0, most - 1)]
        listed = jnp.where(place % 2 == 0, keys[pair], values[pair])
        question = (place >= 2 * n) & (place < 3 * n)
        tokens = jnp.where(question, keys[asked], jnp.where(place < 2 * n, listed, 0))
        return tokens, jnp.where(question, values[asked], -1), 3 * n

    return jax.vmap(one)(jax.random.split(key, len(n_pairs)), n_pairs)


def loss(params: jh.Params, tokens: jax.Array, answers: jax.Array, lengths: jax.Array) -> jax.Array:
    """Mean cross entropy of the answers, in nats."""
    logits = jh.forward(params, tokens, lengths)
    asked = answers >= 0
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(answers, 0))
    return jnp.sum(nats * asked) / jnp.sum(asked)


def train(places: tuple[int, ...], steps: int, batch: int, seed: int = 0) -> jh.Params:
    """A model trained from scratch; the batches of a seed are the same for every model."""
    params = jh.init_params(hparams(places), jax.random.key(seed))
    warmup = max(1, min(100, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, max(steps, warmup + 1))
    optimizer: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, key):
        for_sizes, for_rows = jax.random.split(key)
        sizes = jnp.array(SIZES)[jax.random.randint(for_sizes, (batch,), 0, len(SIZES))]
        gradient = jax.grad(loss)(params, *rows(for_rows, sizes))
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state

    state = optimizer.init(params)  # type: ignore[arg-type]
    data = jax.random.key(1000 + seed)
    for i in range(steps):
        params, state = update(params, state, jax.random.fold_in(data, i))
    return params


def accuracy(params: jh.Params, n_pairs: int, n_rows: int = 256) -> float:
    """Part of the questions of new rows whose likeliest token is the answer."""
    tokens, answers, lengths = rows(jax.random.key(1), jnp.full(n_rows, n_pairs))
    best = jnp.argmax(jax.jit(jh.forward)(params, tokens, lengths), axis=-1)
    return float(jnp.sum(best == answers) / jnp.sum(answers >= 0))


def guessing(n_pairs: int, n_rows: int = 4096) -> float:
    """Accuracy of always answering with a row's most frequent value."""
    values = np.random.default_rng(0).integers(0, N_VALUES, (n_rows, n_pairs, 1))
    return float((values == values.swapaxes(1, 2)).sum(axis=1).max(axis=1).mean()) / n_pairs


def measure(
    places: Sequence[tuple[int, ...]], steps: int, batch: int, seeds: int
) -> Iterator[dict[str, Any]]:
    """One record a model and seed: its attention layers, its accuracy for each size, seconds of training."""
    for seed in range(seeds):
        for where in places:
            began = time.monotonic()
            params = train(where, steps, batch, seed)
            found = {n: accuracy(params, n) for n in SIZES}
            seconds = time.monotonic() - began
            print(f"attention {where or 'none'}, seed {seed}: {found} in {seconds:.0f} s", flush=True)
            yield {"attention": where, "seed": seed, "accuracy": found, "seconds": seconds}


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy for each choice of attention layers and size: a bar for the mean of the seeds, a dot each."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    places = list(dict.fromkeys(tuple(r["attention"]) for r in records))
    seeds = len({r["seed"] for r in records})
    for number, n in enumerate(SIZES):
        found = [[r["accuracy"][n] for r in records if tuple(r["attention"]) == p] for p in places]
        x = [i + 0.2 * (number - (len(SIZES) - 1) / 2) for i in range(len(places))]
        color = colormaps["viridis"](number / len(SIZES))
        axes.bar(x, [sum(f) / len(f) for f in found], 0.2, color=color, label=f"{n} pairs")
        for where, values in zip(x, found, strict=True):
            axes.plot([where] * len(values), values, ".", color="black", ms=3 * (seeds > 1))
        label = "the row's most\nfrequent value" if number == 0 else ""
        axes.hlines(
            [guessing(n)] * len(x), [i - 0.1 for i in x], [i + 0.1 for i in x], color="C3", lw=2, label=label
        )
    names = [", ".join(map(str, p)) if p else "none" for p in places]
    axes.set_xticks(range(len(places)), names)
    axes.set(
        xlabel=f"attention layers (of layers 0 to {N_LAYERS - 1}; the others are Mamba-2)", ylim=(0, 1.03)
    )
    axes.set(ylabel="part of the answers that is right", title="Recalling pairs of keys and values")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="Recall against the number and place of attention layers.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help="rows in a batch")
    parser.add_argument("--seeds", type=int, default=1, help="models of each kind")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    records = []
    for record in measure(PLACES, args.steps, args.batch, args.seeds):
        records.append(record)  # what is measured stays if the run is ended early
        (args.out / "recall.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
        plot(records, args.out / "recall.png")
    return records


if __name__ == "__main__":
    main()
