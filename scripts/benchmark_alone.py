"""What the suite measures of jaxhybrid alone, each in a fresh process: prints one JSON object.

python scripts/benchmark_alone.py load FOLDER
python scripts/benchmark_alone.py compilations 1000
python scripts/benchmark_alone.py start
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmark_workers import HYBRID_340M

N_CTX, N_SEQUENCES, N_UBATCH = 512, 4, 16
SMALL_HYBRID = HYBRID_340M | {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "shared_intermediate_size": 128,
}


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)


def load(folder: str) -> dict[str, Any]:
    """Seconds and peak memory of loading a folder, and seconds of reading its file; page cache warm."""
    import jax
    import numpy as np

    import jaxhybrid

    jax.block_until_ready(jax.numpy.zeros(8))  # the runtime is there before
    file = Path(folder) / "model.safetensors"
    with open(file, "rb", buffering=0) as stream:
        while stream.read(1 << 24):
            pass
    before, anonymous = memory("VmRSS"), memory("RssAnon")
    peaks, ended = [anonymous], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peaks.append(memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    params = jaxhybrid.load_params(folder)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    np.fromfile(file, np.uint8)
    return {
        "file_bytes": file.stat().st_size,
        "peak_bytes": peak - before,
        "anonymous_bytes": max(peaks) - anonymous,
        "load_s": seconds,
        "read_s": time.perf_counter() - began,
    }


def compilations(n: int) -> dict[str, Any]:
    """What XLA compiles in `n` random batches of a small hybrid, after a warm-up of every shape that a step
    of 1 to 4 rows can have, with and without outputs."""
    import jax

    import jaxhybrid as jh
    from jaxhybrid.families import hparams_from_config
    from jaxhybrid.model import init_params
    from jaxhybrid.splits import bucket

    compiled: Counter[str] = Counter()

    def note(event: str, duration_secs: float, **details: object) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled[str(details.get("fun_name", "?"))] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    params = init_params(hparams_from_config(SMALL_HYBRID), jax.random.key(0))
    vocab = params.hparams.vocab_size

    def step(cache: Any, lengths: dict[int, int], wanted: bool = True) -> Any:
        total = sum(lengths.values())
        batch = jh.Batch(
            tokens=[random.randrange(vocab) for _ in range(total)],
            seq_ids=[(seq,) for seq, n in lengths.items() for _ in range(n)],
            outputs=None if wanted else [False] * total,
        )
        return jh.decode(params, cache, batch, n_ubatch=N_UBATCH, donate=True)[1]

    def empty() -> Any:
        return jh.create_cache(params.hparams, N_CTX, N_SEQUENCES)

    random.seed(0)
    began = time.perf_counter()
    for rows in range(1, N_SEQUENCES + 1):
        width = 1
        while width <= bucket(N_UBATCH // rows):
            for wanted in (True, False):
                step(empty(), dict.fromkeys(range(rows), width), wanted)
            width *= 2
    warm_up_s, at_warm_up = time.perf_counter() - began, dict(compiled)
    compiled.clear()
    cache, filled = empty(), 0
    for _ in range(n):
        chosen = random.sample(range(N_SEQUENCES), random.randint(1, N_SEQUENCES))
        lengths = {seq: random.choice((1, random.randint(1, 2 * N_UBATCH))) for seq in chosen}
        if filled + max(lengths.values()) > N_CTX:
            cache, filled = empty(), 0
        filled += max(lengths.values())
        cache = step(cache, lengths)
    return {"warm_up_s": warm_up_s, "warm_up": at_warm_up, "after": dict(compiled)}


def start() -> dict[str, Any]:
    """Seconds from starting the command to the first text, with an empty compilation cache and a full one."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        environment["XDG_CACHE_HOME"] = cache
        command = [sys.executable, "-m", "jaxhybrid.generate", "--prompt", "The sea", "--max-tokens", "32"]
        seconds, reports = [], []
        for _ in range(4):
            began = time.perf_counter()
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as process:
                assert process.stdout is not None and process.stderr is not None
                os.read(process.stdout.fileno(), 1)
                seconds.append(time.perf_counter() - began)
                process.stdout.read()
                reports.append(process.stderr.read().decode(errors="replace").strip())
            if process.returncode:
                raise SystemExit(f"{command[2]} ended with {process.returncode}: {reports[-1]}")

    def compiling(report: str) -> str:
        return next((part for part in report.split(" | ") if part.startswith("compile")), "compile ?")

    return {
        "first_s": seconds[0],
        "second_s": statistics.median(seconds[1:]),
        "first_compile": compiling(reports[0]),
        "second_compile": compiling(reports[1]),
    }


def main() -> int:
    name, *arguments = sys.argv[1:]
    if name == "load":
        result = load(arguments[0])
    elif name == "compilations":
        result = compilations(int(arguments[0]))
    else:
        result = start()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
