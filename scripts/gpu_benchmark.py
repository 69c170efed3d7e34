"""Decoding on an accelerator against what its memory allows: one command, under six minutes.

    python scripts/gpu_benchmark.py --out FOLDER            # 340M and 3B, batch 1, 8 and 64, bfloat16
    python scripts/gpu_benchmark.py --models tiny --batch 1 2 --tokens 4 --out FOLDER

A step has to read all weights, the K/V cells it attends to and the recurrent states, and to write the states:
that many bytes over the device's bandwidth is the least time. Weights are random and made on the device.
First the logits of a small model are held against those of the CPU in the same process. FOLDER/gpu.json and
FOLDER/gpu.md are written anew with each row. Rows that would begin after --budget seconds are not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_alone import SMALL_HYBRID
from benchmark_workers import HYBRID_340M
from step_bytes import step_bytes, tree_bytes

from jaxhybrid import create_cache, make_ubatch, step, token_loop
from jaxhybrid.families import hparams_from_config
from jaxhybrid.hparams import Hparams
from jaxhybrid.model import init_params
from jaxhybrid.params import Params
from jaxhybrid.sampling import make_sampling

HYBRID_3B = HYBRID_340M | {  # the shapes of granite-4.0-h-micro
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "logits_scaling": 8,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "shared_intermediate_size": 8192,
}
MODELS = {"tiny": SMALL_HYBRID, "340M": HYBRID_340M, "3B": HYBRID_3B}
CHECKED = HYBRID_340M | {  # small, with the head sizes of the models above, which choose the kernels
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 16,
    "shared_intermediate_size": 512,
}
PROMPTS, N_DECODED = (160, 93), 8
TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}
"""Of `differences`. On a CPU, float32 logits differ by 5e-7 when the weights are cut to the 22 bits that
three TF32 products keep, and by 4e-4 with the 11 of one. bfloat16 logits differ from float32's by 7e-3, so
two orders of rounding by about 9e-3; weights cut to 5 of its 8 bits make 2.8e-2."""
GB_PER_S = {  # of the data sheets, by a part of jax's device_kind; the longest that fits counts
    "H200": 4800,
    "H100": 3350,
    "H100 NVL": 3900,
    "H100 PCIe": 2000,
    "A100": 1555,
    "A100-SXM4-80GB": 2039,
    "A100 80GB PCIe": 1935,
    "L40S": 864,
    "L4": 300,
    "T4": 320,
    "RTX 4090": 1008,
    "TPU v4": 1228,
    "TPU v5 lite": 819,
    "TPU v5p": 2765,
    "TPU v6 lite": 1640,
}


def data_sheet(device_kind: str) -> float | None:
    """Bytes/s of a known device."""
    names = [name for name in GB_PER_S if name in device_kind]
    return 1e9 * GB_PER_S[max(names, key=len)] if names else None


def copy_bandwidth(n_bytes: int) -> float:
    """Bytes/s read and written by adding to an array: the best of 5 times 10 runs."""
    x = jnp.zeros(n_bytes // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(x).block_until_ready()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10):
            x = add(x)
        x.block_until_ready()
        seconds.append((time.perf_counter() - began) / 10)
    return 2 * x.nbytes / min(seconds)


def measure(hp: Hparams, params: Params, rows: int, n_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens/s of `rows` sequences decoding `n_tokens` a dispatch, the median of `rounds`."""
    n_kv = n_tokens * (rounds + 2)
    cache = create_cache(hp, n_kv, rows, dtype=params.dtype)
    n_kv = cache.n_cells or n_kv
    _, state = token_loop.start(
        params,
        jnp.zeros((rows, hp.vocab_size)),
        [[1]] * rows,
        list(range(rows)),
        [0] * rows,
        [n_kv] * rows,
        [[]] * rows,
        make_sampling(rows),
    )
    sizes = {"n_tokens": n_tokens, "n_kv": n_kv, "aligned": True}
    began = time.perf_counter()
    advance = token_loop.advance.lower(params, cache, state, **sizes).compile()
    compile_s = time.perf_counter() - began
    held, moved = tree_bytes(cache), step_bytes(params, cache)
    memory = advance.memory_analysis()
    aliased = None if memory is None else memory.alias_size_in_bytes
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        jax.block_until_ready((cache, state))
        began = time.perf_counter()
        written, cache, state = advance(params, cache, state)
        jax.block_until_ready((written, cache, state))
        seconds.append(time.perf_counter() - began)
        if int(written.min()) < 0:
            raise RuntimeError("a row ended early")
    return {
        "batch": rows,
        "tokens_per_s": rows * n_tokens / statistics.median(seconds[1:]),
        "step_ms": 1e3 * statistics.median(seconds[1:]) / n_tokens,
        "step_bytes": moved,
        "cache_bytes": held,
        "aliased_bytes": aliased,
        "aliases": aliased is not None and aliased >= held,
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        "compile_s": compile_s,
    }


step_on_device = jax.jit(step)


def logits_of(params: Params, device: Any) -> dict[str, np.ndarray]:
    """Logits on one device, each float32 [tokens, V]: "prefill" of prompts of different lengths in one step,
    and "decode" of tokens that do not depend on them."""
    hp, rows = params.hparams, len(PROMPTS)
    cache = create_cache(hp, 256, rows, dtype=params.dtype)
    params, cache = jax.device_put((params, cache), device)
    width = max(PROMPTS)
    tokens = np.random.default_rng(0).integers(0, hp.vocab_size, (rows, width + N_DECODED)).astype(np.int32)
    real = np.arange(width) < np.array(PROMPTS)[:, None]
    prompt = make_ubatch(tokens[:, :width], np.array(PROMPTS), outputs=np.flatnonzero(real), aligned=True)
    out, cache = step_on_device(params, cache, prompt)
    decoded = []
    for column in tokens[:, width:].T:
        next_out, cache = step_on_device(params, cache, make_ubatch(column[:, None], aligned=True))
        decoded.append(np.asarray(next_out.logits, np.float32))
    return {"prefill": np.asarray(out.logits, np.float32), "decode": np.concatenate(decoded)}


def differences(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """The worst token's difference: root mean square over its logits, relative to that of the wanted ones."""
    return {
        name: float(np.max(np.linalg.norm(found[name] - x, axis=-1) / np.linalg.norm(x, axis=-1)))
        for name, x in wanted.items()
    }


def agreement(dtype: str, device: Any) -> dict[str, Any]:
    """How far a device's logits are from those of the CPU, with the same weights."""
    row: dict[str, Any] = {"dtype": dtype, "tolerance": TOLERANCES[dtype], "agrees": False}
    try:
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            params = init_params(hparams_from_config(CHECKED), jax.random.key(0), jnp.dtype(dtype))
        row |= differences(logits_of(params, device), logits_of(params, cpu))
        row["agrees"] = all(row[name] <= row["tolerance"] for name in ("prefill", "decode"))
    except Exception as error:  # speed can be measured nevertheless
        row["error"] = " ".join(str(error).split())[:200]
    return row


def of_roofline(row: dict[str, Any], bandwidth: float | None) -> float | None:
    """The part of the tokens/s that the bandwidth allows."""
    return None if bandwidth is None else row["step_bytes"] / bandwidth / (row["step_ms"] / 1e3)


def markdown(device: dict[str, Any], checks: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    known = device["data_sheet_bytes_per_s"]
    lines = [
        f"{device['kind']}: {device['copy_bytes_per_s'] / 1e9:.0f} GB/s copying"
        + (f", {known / 1e9:.0f} by its data sheet" if known else ", not in the table of data sheets"),
        "",
        "| model | batch | tok/s | ms/step | MB/step | of data sheet | of copying | aliased | compile |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['batch']} | {row['error']} |" + " |" * 6)
            continue
        parts = [row["of_data_sheet"], row["of_copying"]]
        shown = ["-" if part is None else f"{part:.0%}" for part in parts]
        aliased = "yes" if row["aliases"] else f"NO: {row['aliased_bytes']} of {row['cache_bytes']} bytes"
        megabytes = row["step_bytes"] / 1e6
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['tokens_per_s']:.1f} | {row['step_ms']:.2f} | "
            f"{megabytes:.0f} | {shown[0]} | {shown[1]} | {aliased} | {row['compile_s']:.0f} s |"
        )
    lines += ["", "| logits against the CPU's | prefill | decode | tolerance | agree |", "|---" * 5 + "|"]
    for check in checks:
        found = [f"{check[what]:.1e}" if what in check else "-" for what in ("prefill", "decode")]
        verdict = check.get("error", "yes" if check["agrees"] else "NO")
        lines.append(f"| {check['dtype']} | {found[0]} | {found[1]} | {check['tolerance']:.0e} | {verdict} |")
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> bool:
    """Measure and write every row; whether logits agree, and all rows were measured and alias their cache."""
    began = time.perf_counter()
    first = jax.devices()[0]
    device = {
        "kind": first.device_kind,
        "platform": first.platform,
        "data_sheet_bytes_per_s": data_sheet(first.device_kind),
        "copy_bytes_per_s": copy_bandwidth(1 << 30 if first.platform != "cpu" else 1 << 26),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    checks = [agreement(dtype, first) for dtype in TOLERANCES]

    def write() -> None:
        found = {"device": device, "agreement": checks, "rows": rows}
        (args.out / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")
        (args.out / "gpu.md").write_text(markdown(device, checks, rows))

    write()
    print(f"gpu_benchmark: {checks}", file=sys.stderr, flush=True)
    for model in args.models:
        hp = hparams_from_config(MODELS[model])
        params = None
        for batch in args.batch:
            row: dict[str, Any] = {"model": model, "batch": batch}
            spent = time.perf_counter() - began
            try:
                if spent > args.budget:
                    raise TimeoutError(f"not run: {spent:.0f} of {args.budget} s are spent")
                if params is None:
                    params = jax.block_until_ready(init_params(hp, jax.random.key(0), jnp.bfloat16))
                row |= measure(hp, params, batch, args.tokens, args.rounds)
                row["of_data_sheet"] = of_roofline(row, device["data_sheet_bytes_per_s"])
                row["of_copying"] = of_roofline(row, device["copy_bytes_per_s"])
            except Exception as error:  # the rows that were measured count
                row["error"] = " ".join(str(error).split())[:200]
            rows.append(row)
            write()
            print(f"gpu_benchmark: {row}", file=sys.stderr, flush=True)
    print(markdown(device, checks, rows), end="")
    return all(check["agrees"] for check in checks) and all(row.get("aliases") for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_benchmark", description="Decoding against memory bandwidth.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for gpu.json and gpu.md")
    add("--models", nargs="+", choices=list(MODELS), default=["340M", "3B"])
    add("--batch", type=int, nargs="+", default=[1, 8, 64])
    add("--tokens", type=int, default=64, help="tokens of each row a dispatch")
    add("--rounds", type=int, default=5)
    add("--budget", type=float, default=270, help="seconds after which no row is begun")
    return 0 if run(parser.parse_args(argv)) else 1


if __name__ == "__main__":
    sys.exit(main())
