"""Fork a prompt into many branches, go back, and compare with computing the prompt again.

    python examples/time_travel.py --out FOLDER    # writes time_travel.png and time_travel.json

In float32; times are medians of a few runs, without compiling; bytes are those of the arrays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhybrid as jh

GOING_ON = 8
"""Tokens that every branch has room for after the prompt."""


def seconds(f: Callable[[], Any], repeats: int) -> float:
    """Median time of f, whose result is awaited; called once more beforehand, to compile."""
    jax.block_until_ready(f())
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(f())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure(model: jh.Model, length: int, branches: int, repeats: int = 3) -> dict[str, float]:
    """Seconds and bytes for one length of prompt, and how far the logits of both ways are apart."""
    params, hp = model.params, model.params.hparams
    prompt = np.random.default_rng(length).integers(3, hp.vocab_size, length).tolist()
    everyone = range(branches)
    # one pool: the branches share the prompt's cells; apart: each has a stream of its own
    pool = jh.create_cache(hp, length + branches * GOING_ON, branches, unified=True)
    apart = jh.create_cache(hp, length + GOING_ON, branches)
    first = jh.make_ubatch(np.arange(3, 3 + branches)[:, None])  # one row a branch, each with another token
    step = jax.jit(jh.step)

    def once(cache: jh.Cache) -> jh.Cache:
        return jh.decode(params, cache, jh.Batch(prompt))[1]

    def computed_again() -> tuple[jax.Array, jh.Cache]:
        seq_ids = [(s,) for s in everyone for _ in prompt]
        cache = jh.decode(params, apart, jh.Batch(prompt * branches, seq_ids=seq_ids))[1]
        output, cache = step(params, cache, first)
        return output.logits, cache

    def forked() -> tuple[jax.Array, jh.Cache]:
        output, cache = step(params, jh.fork(past, 0, tuple(everyone[1:])), first)
        return output.logits, cache

    past = once(pool)
    there = jh.checkpoint(past, 0)
    later = forked()[1]
    back = jh.rewind(later, 0, there)
    assert jh.seq_pos_max(back, 0) == jh.seq_pos_max(past, 0) == length - 1
    return {
        "length": length,
        "fork": seconds(forked, repeats),
        "compute again, all": seconds(computed_again, repeats),
        "rewind": seconds(lambda: jh.rewind(later, 0, there), repeats),
        "compute again, one": seconds(lambda: once(pool), repeats),
        "bytes shared": sum(leaf.nbytes for leaf in jax.tree.leaves(pool)),
        "bytes apart": sum(leaf.nbytes for leaf in jax.tree.leaves(apart)),
        "bytes of a checkpoint": sum(leaf.nbytes for leaf in jax.tree.leaves(there)),
        "difference": float(jnp.max(jnp.abs(forked()[0] - computed_again()[0]))),
    }


def plot(records: Sequence[dict[str, float]], branches: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    times, sizes = figure.subplots(1, 2)
    x = [r["length"] for r in records]
    for name, label, style in (
        ("compute again, all", f"prompt computed {branches} times, a step each", "s--C1"),
        ("fork", f"fork into {branches}, a step each", "o-C0"),
        ("compute again, one", "prompt computed again", "^--C3"),
        ("rewind", "rewind to a checkpoint", "v-C2"),
    ):
        times.plot(x, [1e3 * r[name] for r in records], style, label=label)
    times.set(ylabel="milliseconds (median)", title="Time")
    for name, label, style in (
        ("bytes apart", f"{branches} streams of cells", "s--C1"),
        ("bytes shared", "one pool, the prompt shared", "o-C0"),
        ("bytes of a checkpoint", "a checkpoint", "v-C2"),
    ):
        sizes.plot(x, [r[name] / 1e6 for r in records], style, label=label)
    sizes.set(ylabel="MB of arrays", title="Memory")
    for axes in (times, sizes):
        axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt")
        axes.set_xticks(x, [f"{n:g}" for n in x], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))  # beside no curve
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description="Forking and going back, against computing again.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--model", help="folder or hub id; by default the model inside the package")
    parser.add_argument("--branches", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    model, records = jh.load(args.model, dtype=jnp.float32), []
    for length in args.lengths:
        records.append(measure(model, length, args.branches, args.repeats))
        print(json.dumps(records[-1]), flush=True)
    (args.out / "time_travel.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    plot(records, args.branches, args.out / "time_travel.png")
    return records


if __name__ == "__main__":
    main()
