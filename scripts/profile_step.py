"""Where the time of a step goes: XLA's operations of one compiled step, summed by what they belong to.

    python scripts/profile_step.py                                     # decode, batch 1, random 340M hybrid
    python scripts/profile_step.py --batch 8 --dtype bfloat16
    python scripts/profile_step.py --tokens 512 --top 20

Each operation of the optimized program is timed by jax's profiler over a few steps and named by the part of
the model it came from; a fusion counts where its result belongs. The table gives milliseconds a step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
from benchmark_workers import HYBRID_340M

import jaxhybrid
from jaxhybrid.batch import make_ubatch
from jaxhybrid.families import hparams_from_config
from jaxhybrid.model import init_params, step
from jaxhybrid.ops.quantized import FORMATS

STEPS = 5


def profiled(args: argparse.Namespace) -> tuple[Counter[tuple[str, str]], float]:
    """(milliseconds a step of each (operation, origin), milliseconds a step on the wall)."""
    config = json.loads(args.config.read_text()) if args.config else HYBRID_340M
    hparams = hparams_from_config(config)
    params = init_params(hparams, jax.random.key(0), jnp.dtype(args.dtype))
    if args.quantize:
        params = jaxhybrid.quantize(params, args.quantize)
    cache = jaxhybrid.create_cache(hparams, args.ctx, args.batch, dtype=params.dtype)
    tokens = jnp.ones((args.batch, args.tokens), jnp.int32)
    n_kv = None if cache.n_cells is None else min(args.ctx, cache.n_cells)
    ubatch = make_ubatch(tokens, n_kv=n_kv, aligned=True)
    compiled = jax.jit(step, donate_argnums=1).lower(params, cache, ubatch).compile()
    origins = {}
    for line in (compiled.as_text() or "").splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*op_name=\"([^\"]*)\"", line)
        if found:
            origins[found.group(1)] = found.group(2)
    for _ in range(2):
        out, cache = compiled(params, cache, ubatch)
    jax.block_until_ready((out, cache))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            began = time.perf_counter()
            for _ in range(STEPS):
                out, cache = compiled(params, cache, ubatch)
            jax.block_until_ready((out, cache))
            wall = (time.perf_counter() - began) * 1e3 / STEPS
        (trace,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spent: Counter[tuple[str, str]] = Counter()
    for event in events:
        name = event.get("name", "")
        if event.get("ph") == "X" and name in origins:
            spent[re.sub(r"[.\d]+$", "", name), short(origins[name])] += event["dur"] / 1e3 / STEPS
    return spent, wall


def short(origin: str) -> str:
    """The end of an operation's path: the functions of the model and the primitive."""
    return re.sub(r"jit\((?:step|block)\)/", "", origin)[-70:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="profile_step", description="Where the time of a step goes.")
    add = parser.add_argument
    add("--config", type=Path, help="a config.json; default: a 340M hybrid")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--quantize", choices=FORMATS)
    add("--batch", type=int, default=1)
    add("--tokens", type=int, default=1, help="tokens a row")
    add("--ctx", type=int, default=512)
    add("--top", type=int, default=15, help="rows of the table")
    args = parser.parse_args()
    spent, wall = profiled(args)
    print(f"| ms a step of {wall:.1f} | operation | origin |\n|---|---|---|")
    for (operation, origin), milliseconds in spent.most_common(args.top):
        print(f"| {milliseconds:.2f} | {operation} | {origin} |")
    print(f"| {sum(spent.values()):.2f} | all | |")


if __name__ == "__main__":
    main()
