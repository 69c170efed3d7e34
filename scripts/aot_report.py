"""What XLA makes of the step for a TPU v5e and an H100, without either: aliasing, temporaries, traffic.

    python scripts/aot_report.py                                # every target installed, batch 1, 8, 64
    python scripts/aot_report.py --targets v5e --batch 8 --config config.json --json rows.json --hlo FOLDER

`scripts/aot_targets.py` says what a target needs. The step is that of decoding: bfloat16, one token a row,
the cache donated and full to `--ctx` tokens. A row a figure:

- cache aliased: bytes of the cache that the executable updates in place, of all its bytes
- temporaries: bytes of scratch memory, of the bytes of the arguments
- traffic: bytes to and from main memory (`scripts/hlo_traffic.py`), of weights + K/V and states read + states
  and new K/V written. Loops that depend on data (states that change their slot when a sequence is forked,
  and the writing of a TPU's new cells) are printed beside it, a turn of each.
- whole K/V buffers copied: instructions whose result is as large as one and that do nothing but move it.
  Buffers that a TPU fetches ahead into on-chip memory and writes back are told apart.

The number of instructions that run a layer is printed beside them: a small batch pays for launches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from aot_targets import Target, compile_for, missing, target
from benchmark_workers import HYBRID_340M
from hlo_traffic import Traffic
from step_bytes import step_bytes, tree_bytes

from jaxhybrid.batch import make_ubatch
from jaxhybrid.cache import create_cache
from jaxhybrid.errors import UsageError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.hparams import Hparams
from jaxhybrid.model import init_params, step

TARGETS = ("v5e", "h100")
MOVES = ("copy", "copy-start", "gather", "transpose", "fusion")


def compile_step(where: Target, hparams: Hparams, rows: int, ctx: int) -> tuple[Any, Any, Any]:
    """(executable, shapes of the parameters, shapes of the cache) of one decode step."""
    params = jax.eval_shape(lambda: init_params(hparams, jax.random.key(0), jnp.bfloat16))
    cache = jax.eval_shape(lambda: create_cache(hparams, ctx, rows, dtype=jnp.bfloat16))
    ubatch = jax.eval_shape(lambda: make_ubatch(jnp.zeros((rows, 1), jnp.int32), aligned=True, n_kv=ctx))
    return compile_for(where, step, params, cache, ubatch, donate_argnums=1), params, cache


def figures(name: str, rows: int, executable: Any, params: Any, cache: Any) -> tuple[list[dict], str]:
    """The rows of one executable, and a line about its instructions."""
    memory = executable.memory_analysis()
    traffic = Traffic(executable.as_text())
    buffers = {tree_bytes(b) for child in cache.cell_children for b in (*child.keys, *child.values)}
    ideal, held = step_bytes(params, cache), tree_bytes(cache)
    copied = traffic.moves(buffers, MOVES)
    where = f"{name}, batch {rows}"
    found = [
        _row(f"{where}: cache aliased", min(memory.alias_size_in_bytes / held, 1.0), 1.0, "higher"),
        _row(
            f"{where}: temporaries / arguments",
            memory.temp_size_in_bytes / memory.argument_size_in_bytes,
            0.05,
            "lower",
        ),
        _row(f"{where}: traffic / (weights + cache)", traffic.bytes / ideal, 1.2, "lower"),
        _row(f"{where}: whole K/V buffers copied", float(copied), 0.0, "lower"),
    ]
    n_layers = params.hparams.n_layers
    line = f"{where}: {traffic.n_kernels / n_layers:.0f} instructions a layer"
    line += f", {traffic.bytes / 1e6:.0f} MB moved"
    line += f", {traffic.open_loops / 1e6:.0f} MB a turn in loops that depend on data"
    fetched = traffic.fetched_and_written_back(buffers)
    if fetched:
        line += f", {fetched} K/V buffers fetched into on-chip memory and written back"
    return found, line


def _row(figure: str, value: float, goal: float, better: str) -> dict[str, Any]:
    met = value >= goal if better == "higher" else value <= goal
    return {"figure": figure, "value": round(value, 4), "goal": goal, "better": better, "met": met}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="aot_report", description="The step compiled ahead of time.")
    add = parser.add_argument
    add("--targets", nargs="+", choices=TARGETS, help="default: those whose packages are installed")
    add("--batch", type=int, nargs="+", default=[1, 8, 64])
    add("--ctx", type=int, default=4096)
    add("--config", type=Path, help="a config.json; default: a 340M hybrid")
    add("--json", type=Path, help="write the rows here")
    add("--hlo", type=Path, help="write the optimized HLO of each executable into this folder")
    args = parser.parse_args(argv)
    if min(*args.batch, args.ctx) < 1:
        parser.error("--batch and --ctx must be at least 1")
    names = args.targets or [name for name in TARGETS if missing(name) is None]
    if not names:
        print("aot_report: " + "; or ".join(str(missing(name)) for name in TARGETS), file=sys.stderr)
        return 1
    hparams = hparams_from_config(json.loads(args.config.read_text()) if args.config else HYBRID_340M)
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            where = target(name)
        except UsageError as error:
            print(f"aot_report: {error}", file=sys.stderr)
            return 1
        for rows in args.batch:
            executable, params, cache = compile_step(where, hparams, rows, args.ctx)
            more, line = figures(name, rows, executable, params, cache)
            found += more
            print(line)
            for row in more:
                verdict = "met" if row["met"] else "NOT met"
                print(f"  {row['figure']}: {row['value']} (goal {row['goal']}, {verdict})")
            if args.hlo:
                args.hlo.mkdir(parents=True, exist_ok=True)
                (args.hlo / f"{name}-{rows}.hlo").write_text(executable.as_text(), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
