"""Engines in processes of their own, and measuring them in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_engines import MODULES

HYBRID_340M: dict[str, Any] = {  # the shapes of granite-4.0-h-350m
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


class NotRun(Exception):
    """Why a figure could not be measured, in a line."""


def write_random_model(config: dict[str, Any], folder: Path) -> None:
    """Random weights of a config.json in Hugging Face layout."""
    import jax

    from jaxhybrid.families import hparams_from_config
    from jaxhybrid.files import save_params
    from jaxhybrid.model import init_params

    save_params(init_params(hparams_from_config(config), jax.random.key(0)), folder, config)


def why_unavailable(name: str, interpreter: str) -> str | None:
    """Why an engine cannot run there, or None."""
    check = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULES[name]!r}) is None)"
    try:
        missing = subprocess.run([interpreter, "-c", check], cwd=Path(__file__).parent.parent).returncode
    except OSError as error:
        return f"{interpreter}: {error.strerror}"
    return f"{MODULES[name]} is not installed in {interpreter}" if missing else None


class Worker:
    """The process of one engine with one model; NotRun when it cannot start or ends early."""

    def __init__(self, name: str, interpreter: str, arguments: list[str], threads: int) -> None:
        self.name = name
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        script = str(Path(__file__).with_name("benchmark_engines.py"))
        try:
            self.process = subprocess.Popen(
                [interpreter, script, name, "--threads", str(threads), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise NotRun(f"{interpreter}: {error.strerror}") from error
        self._answer()

    def ask(self, method: str, **keywords: Any) -> Any:
        """Call a method of the engine."""
        assert self.process.stdin is not None
        try:
            print(json.dumps([method, keywords]), file=self.process.stdin, flush=True)
        except BrokenPipeError as error:
            raise NotRun(f"{self.name} has ended") from error
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise NotRun(f"{self.name} ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise NotRun(f"{self.name}: {answer['error']}")
        return answer["value"]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Effort:
    """How long to measure: at most `rounds` rounds, and no new one after `seconds`."""

    rounds: int
    seconds: float


def take_turns(runs: dict[str, Callable[[], float]], effort: Effort) -> dict[str, list[float]]:
    """The results of every run, round after round.

    One whose first run takes more than a third of the time sits out the other rounds.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    slow: set[str] = set()
    began = time.perf_counter()
    for k in range(effort.rounds):
        if k and time.perf_counter() - began > effort.seconds:
            break
        for name, run in runs.items():
            if name in slow:
                continue
            start = time.perf_counter()
            found[name].append(run())
            if time.perf_counter() - start > effort.seconds / 3:
                slow.add(name)
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def say(text: str) -> None:
    """What happens now, on standard error."""
    print(f"benchmark: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
