"""Prefill and decode speed, engines side by side in one run.

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
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark_engines import KINDS, Engine

ENGINES = tuple(KINDS)
MODULES = {"jaxhybrid": "jaxhybrid", "transformers": "transformers", "llama.cpp": "llama_cpp"}
HYBRID_340M = {  # the shapes of granite-4.0-h-350m
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 100352,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.246,
    "logits_scaling": 3,
    "mamba_n_heads": 48,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "shared_intermediate_size": 2048,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def serve(args: argparse.Namespace) -> None:
    """The process of one engine: a JSON request a line in, a JSON answer a line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    engine: Engine = KINDS[args.serve](args)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "prefill":
            seconds = engine.prefill(request["rows"], args.prompt)
        else:
            seconds = engine.decode(request["rows"], args.prompt, args.tokens)
        print(json.dumps(seconds), file=answers, flush=True)


class Worker:
    def __init__(self, name: str, interpreter: str, arguments: list[str], threads: int) -> None:
        self.name = name
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [interpreter, __file__, "--serve", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if name != "jaxhybrid" else None,
            text=True,
            env=environment,
        )
        self._answer()

    def measure(self, what: str, rows: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps({"what": what, "rows": rows}), file=self.process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmark: {self.name} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def available(name: str, interpreter: str, args: argparse.Namespace) -> str | None:
    """Why an engine cannot run, or None."""
    check = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULES[name]!r}) is None)"
    if subprocess.run([interpreter, "-c", check], cwd=Path(__file__).parent.parent).returncode:
        return f"{MODULES[name]} is not installed in {interpreter}"
    if name == "llama.cpp" and args.gguf is None:
        return "it needs --gguf FILE, the same weights"
    return None


def write_random_model(config: dict[str, Any], folder: Path) -> None:
    """Random weights of a config.json in Hugging Face layout."""
    import jax

    from jaxhybrid.families import hparams_from_config
    from jaxhybrid.files import save_params
    from jaxhybrid.model import init_params

    save_params(init_params(hparams_from_config(config), jax.random.key(0)), folder, config)


def run(args: argparse.Namespace) -> dict[str, Any]:
    interpreters = dict(pair.split("=", 1) for pair in args.python)
    arguments = ["--folder", str(args.folder), "--dtype", args.dtype]
    for name in ("prompt", "tokens", "threads", "ubatch"):
        arguments += [f"--{name}", str(getattr(args, name))]
    arguments += ["--gguf", str(args.gguf)] if args.gguf else []
    workers: list[Worker] = []
    skipped: dict[str, str] = {}
    seconds: dict[tuple[str, str, int], list[float]] = {}
    try:
        for name in args.engines:
            interpreter = interpreters.get(name, sys.executable)
            reason = available(name, interpreter, args)
            if reason is None:
                workers.append(Worker(name, interpreter, arguments, args.threads))
            else:
                skipped[name] = reason
                print(f"benchmark: {name} left out: {reason}", file=sys.stderr)
        for what in ("prefill", "decode"):
            for rows in args.batch:
                for worker in workers:  # compiles and warms up
                    worker.measure(what, rows)
                for k in range(args.rounds):
                    print(f"{what}, batch {rows}: round {k + 1}/{args.rounds}", file=sys.stderr)
                    for worker in workers:
                        found = seconds.setdefault((worker.name, what, rows), [])
                        found.append(worker.measure(what, rows))
    finally:
        for worker in workers:
            worker.stop()
    tokens = {"prefill": args.prompt, "decode": args.tokens}
    figures = [
        {
            "engine": name,
            "what": what,
            "batch": rows,
            "tokens_per_s": rows * tokens[what] / statistics.median(found),
            "seconds": found,
        }
        for (name, what, rows), found in seconds.items()
    ]
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
    parser = argparse.ArgumentParser(prog="benchmark", description="Prefill and decode speed.")
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face folder")
    add("--config", type=Path, help="a config.json: random weights of its shapes")
    add("--gguf", type=Path, help="the same weights for llama.cpp")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--python", action="append", default=[], metavar="ENGINE=INTERPRETER")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--prompt", type=int, default=256, help="tokens of each row before decoding")
    add("--tokens", type=int, default=32, help="tokens of each row to decode")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=os.cpu_count() or 1, help="for the peers")
    add("--ubatch", type=int, default=512)
    add("--json", type=Path, help="write the figures here")
    add("--folder", type=Path, help=argparse.SUPPRESS)
    add("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.serve:
        serve(args)
        return 0
    if args.model and args.config:
        parser.error("--model and --config exclude each other")
    if any("=" not in pair or pair.split("=", 1)[0] not in ENGINES for pair in args.python):
        parser.error(f"--python takes ENGINE=INTERPRETER, ENGINE one of {', '.join(ENGINES)}")
    if min(args.prompt, args.tokens, args.rounds, *args.batch) < 1:
        parser.error("--prompt, --tokens, --rounds and --batch must be at least 1")
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.model or Path(temporary)
        if args.model is None:
            config = json.loads(args.config.read_text()) if args.config else HYBRID_340M
            write_random_model(config, args.folder)
        result = run(args)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
