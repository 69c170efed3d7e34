"""Speed of engines side by side in one run, and the goals that jaxhybrid is held to.

    python scripts/benchmark.py --suite quick --json figures.json   # every goal, see docs/benchmarks.md
    python scripts/benchmark.py                              # random weights of a 340M hybrid
    python scripts/benchmark.py --model FOLDER --engines jaxhybrid transformers
    python scripts/benchmark.py --config config.json --json figures.json
    python scripts/benchmark.py --model FOLDER --gguf FILE --engines jaxhybrid llama.cpp

Every engine loads the same weights in a process of its own (--python ENGINE=INTERPRETER where they live in
different environments) and the engines take turns, round after round; a figure is the median of its rounds,
the ratio that of jaxhybrid to each peer. Nothing that compiles, loads or warms up is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmark_suite
from benchmark_engines import KINDS
from benchmark_workers import (
    HYBRID_340M,
    Effort,
    NotRun,
    Worker,
    say,
    take_turns,
    why_unavailable,
    write_random_model,
)

ENGINES = tuple(KINDS)


def run(args: argparse.Namespace, interpreters: dict[str, str]) -> dict[str, Any]:
    arguments = ["--folder", str(args.folder), "--dtype", args.dtype, "--ubatch", str(args.ubatch)]
    arguments += ["--gguf", str(args.gguf)] if args.gguf else []
    workers: list[Worker] = []
    skipped: dict[str, str] = {}
    figures: list[dict[str, Any]] = []
    try:
        for name in args.engines:
            interpreter = interpreters.get(name, sys.executable)
            reason = why_unavailable(name, interpreter)
            if reason is None and name == "llama.cpp" and args.gguf is None:
                reason = "it needs --gguf FILE, the same weights"
            if reason is None:
                workers.append(Worker(name, interpreter, arguments, args.threads))
            else:
                skipped[name] = reason
                say(f"{name} left out: {reason}")
        for what in ("prefill", "decode"):
            sizes = {"n_prompt": args.prompt} | ({"n_tokens": args.tokens} if what == "decode" else {})
            for rows in args.batch:
                say(f"{what}, batch {rows}")
                runs = {w.name: lambda w=w: w.ask(what, rows=rows, **sizes) for w in workers}  # noqa: B023
                for warm_up in runs.values():
                    warm_up()
                found = take_turns(runs, Effort(args.rounds, float("inf")))
                tokens = args.prompt if what == "prefill" else args.tokens
                figures += [
                    {
                        "engine": name,
                        "what": what,
                        "batch": rows,
                        "tokens_per_s": rows * tokens / statistics.median(seconds),
                        "seconds": seconds,
                    }
                    for name, seconds in found.items()
                ]
    finally:
        for worker in workers:
            worker.stop()
    settings = {
        "model": str(args.model or args.config or "random 340M hybrid"),
        "dtype": args.dtype,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "threads": args.threads,
    }
    return {"settings": settings, "skipped": skipped, "figures": figures}


def table(result: dict[str, Any]) -> str:
    """A row for each engine: tokens/s, and in brackets how many times that jaxhybrid reaches."""
    speed = {(f["engine"], f["what"], f["batch"]): f["tokens_per_s"] for f in result["figures"]}
    columns = list(dict.fromkeys((what, rows) for _, what, rows in speed))
    lines = ["| engine | " + " | ".join(f"{w} tok/s, batch {b}" for w, b in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for engine in dict.fromkeys(name for name, _, _ in speed):
        cells = []
        for column in columns:
            cell = f"{speed[engine, *column]:.1f}"
            if engine != "jaxhybrid" and ("jaxhybrid", *column) in speed:
                cell += f" ({speed['jaxhybrid', *column] / speed[engine, *column]:.2f} x)"
            cells.append(cell)
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmark", description="Prefill and decode speed, and goals.")
    add = parser.add_argument
    add("--suite", choices=list(benchmark_suite.EFFORTS), help="measure every goal; quick: within 8 minutes")
    add("--plot", type=Path, help="PNG of the suite's decode speeds (default: beside --json)")
    add("--model", type=Path, help="a Hugging Face folder")
    add("--config", type=Path, help="a config.json: random weights of its shapes")
    add("--gguf", type=Path, help="the same weights for llama.cpp")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=INTERPRETER",
        help="where an engine, or aot for the suite's compiling, is installed",
    )
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--prompt", type=int, default=256, help="tokens of each row before decoding")
    add("--tokens", type=int, default=32, help="tokens of each row to decode")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=os.cpu_count() or 1, help="of every engine")
    add("--ubatch", type=int, default=512)
    add("--json", type=Path, help="write the figures here")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.model and args.config:
        parser.error("--model and --config exclude each other")
    if any("=" not in pair or pair.split("=", 1)[0] not in (*ENGINES, "aot") for pair in args.python):
        parser.error(f"--python takes ENGINE=INTERPRETER, ENGINE one of {', '.join(ENGINES)}, aot")
    if min(args.prompt, args.tokens, args.rounds, args.threads, *args.batch) < 1:
        parser.error("--prompt, --tokens, --rounds, --threads and --batch must be at least 1")
    interpreters = dict(pair.split("=", 1) for pair in args.python)
    if args.suite:
        plot = args.plot or (args.json.with_suffix(".png") if args.json else Path("benchmark.png"))
        benchmark_suite.run(args.suite, interpreters, args.json, plot)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.model or Path(temporary)
        if args.model is None:
            config = json.loads(args.config.read_text()) if args.config else HYBRID_340M
            write_random_model(config, args.folder)
        try:
            result = run(args, interpreters)
        except NotRun as error:
            raise SystemExit(f"benchmark: {error}") from error
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
