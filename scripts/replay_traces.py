"""Replay recorded operations on a cache and compare logits, results and positions.

    python scripts/replay_traces.py tests/traces --checkpoints tests/golden [name ...] [--stand-in]

A trace NAME.json holds operations with the results that another engine gave, NAME.npz its logits;
checkpoints/MODEL the model. Every operation is done with lossy=True. Where this package differs on purpose
the replay does what DIFFERENCES says and counts it; anything else that differs is printed, and the exit
status is 1. With --stand-in a trace whose model this package cannot load is replayed on a random model with
the same kinds of memory: results and positions only.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxhybrid as jh
from jaxhybrid.cache import hybrid
from jaxhybrid.cache.portable import put_sequence, take_sequence
from jaxhybrid.families import FAMILIES
from jaxhybrid.hparams import AttentionHparams, Hparams, Mamba2Hparams, MlpHparams
from jaxhybrid.params import Params

TOLERANCE = 1e-3
"""Absolute, on logits of about 1: relative noise of 1e-5 in the weights moves them by up to 3e-3."""

DIFFERENCES = {
    "coupled": "tokens of several sequences work in every cache: decoded here, refused there; not compared",
    "everyone": "seq_rm of sequence -1 works on every cache; refused there; the cache from before is kept",
    "rollback": "a state that is still remembered is restored; refused there; the cache from before is kept",
    "scope": "a copy of part of a sequence has one scope in both children: the exact state, or none",
    "window": "pos_min of a sliding window: cells are kept longer here",
    "jump": "positions of text follow each other; a jump forward is refused here; the trace ends",
    "below": "a state whose position falls below 0 goes with its sequence",
}


@dataclass
class Replay:
    """One trace on one cache. `problems` are differences that DIFFERENCES does not explain."""

    params: Params
    trace: dict[str, Any]
    logits: Any
    compare_logits: bool
    problems: list[str] = field(default_factory=list)
    differences: collections.Counter = field(default_factory=collections.Counter)
    worst: float = 0.0
    rows: int = 0

    def run(self) -> None:
        t = self.trace
        n = t["n_seq_max"]
        unified = t["kv_unified"]
        hp = self.params.hparams
        self.cache = jh.create_cache(
            hp,
            n_ctx=t["n_ctx"] if unified else t["n_ctx"] // n,
            n_seq_max=n,
            unified=unified,
            n_rollback=t.get("n_rs_seq", 0),
        )
        self.saved: dict[int, Any] = {}
        for i, op in enumerate(t["ops"]):
            if not getattr(self, op["op"])(i, op):
                return
            self._compare_positions(i, op)

    # -------------------------------------------------------------------------------- operations

    def decode(self, i: int, op: dict[str, Any]) -> bool:
        batch = jh.Batch(
            op["tokens"], op["pos"], [tuple(s) for s in op["seq_id"]], [bool(o) for o in op["output"]]
        )
        coupled = any(len(set(s)) > 1 for s in op["seq_id"])
        try:
            logits, after = jh.decode(self.params, self.cache, batch, n_ubatch=self.trace["n_ubatch"])
        except (jh.BatchError, jh.CacheFullError) as error:
            if op["rc"] == 0:
                if isinstance(error, jh.BatchError) and self.trace["model"].startswith("qwen3_5"):
                    self.differences["jump"] += 1
                    return False
                self.problems.append(f"op {i}: refused here: {error}")
                return False
            return True
        if op["rc"] != 0:
            if op["rc"] == 1 and coupled:
                self.differences["coupled"] += 1
            else:
                self.problems.append(f"op {i}: rc {op['rc']} there, decoded here")
            return True  # the cache from before is kept
        self.cache = after
        if self.compare_logits:
            wanted = self.logits[op["logits"]]
            self.rows += len(wanted)
            if wanted.size:
                gap = float(np.max(np.abs(np.asarray(logits) - wanted)))
                self.worst = max(self.worst, gap)
                if not gap <= TOLERANCE:
                    self.problems.append(f"op {i}: logits differ by {gap:.2e}")
        return True

    def seq_rm(self, i: int, op: dict[str, Any]) -> bool:
        after, ok = _seq_rm(self.cache, op["seq"], op["p0"], op["p1"])
        if bool(ok) == op["ok"]:
            self.cache = after
        elif op["seq"] == -1:
            self.differences["everyone"] += 1
        elif bool(ok):
            self.differences["rollback"] += 1
        else:
            self.problems.append(f"op {i}: seq_rm refused here: {op}")
        return True

    def seq_cp(self, i: int, op: dict[str, Any]) -> bool:
        self.cache, ok = _seq_cp(self.cache, op["src"], op["dst"], op["p0"], op["p1"])
        return self._granted(i, op, ok)

    def seq_keep(self, i: int, op: dict[str, Any]) -> bool:
        self.cache = _seq_keep(self.cache, op["seq"])
        return True

    def seq_add(self, i: int, op: dict[str, Any]) -> bool:
        self.cache, ok = _seq_add(self.cache, op["seq"], op["p0"], op["p1"], op["delta"])
        return self._granted(i, op, ok)

    def seq_div(self, i: int, op: dict[str, Any]) -> bool:
        self.cache, ok = _seq_div(self.cache, op["seq"], op["p0"], op["p1"], op["d"])
        return self._granted(i, op, ok)

    def clear(self, i: int, op: dict[str, Any]) -> bool:
        self.cache = jh.clear(self.cache, data=op["data"])
        return True

    def state_save(self, i: int, op: dict[str, Any]) -> bool:
        self.saved[op["slot"]] = take_sequence(self.cache, op["seq"])
        return True

    def state_load(self, i: int, op: dict[str, Any]) -> bool:
        self.cache = put_sequence(self.cache, op["dst"], self.saved[op["slot"]])
        return True

    def _granted(self, i: int, op: dict[str, Any], ok: Any) -> bool:
        if not bool(ok):
            self.problems.append(f"op {i}: refused here: {op}")
        return bool(ok)

    # --------------------------------------------------------------------------------- positions

    def _compare_positions(self, i: int, op: dict[str, Any]) -> None:
        n = self.trace["n_seq_max"]
        low = [int(p) for p in np.asarray(_positions_min(self.cache))]
        high = [int(p) for p in np.asarray(_positions_max(self.cache))]
        if high != op["pos_max"]:
            self.problems.append(f"op {i} {op['op']}: pos_max {high}, recorded {op['pos_max']}")
        for seq in range(n):
            if low[seq] == op["pos_min"][seq]:
                continue
            if self.cache.windowed is not None and low[seq] <= op["pos_min"][seq]:
                self.differences["window"] += 1
            else:
                what = {k: v for k, v in op.items() if k in ("seq", "src", "dst", "p0", "p1", "delta", "d")}
                self.problems.append(
                    f"op {i} {op['op']} {what}: pos_min of {seq} is {low[seq]}, recorded {op['pos_min'][seq]}"
                )
        if jh.can_shift(self.cache) != op["can_shift"] and not self.trace["model"].startswith("qwen3_5"):
            self.problems.append(f"op {i}: can_shift")


_seq_rm = jax.jit(partial(jh.seq_rm, lossy=True))
_seq_cp = jax.jit(partial(jh.seq_cp, lossy=True))
_seq_add = jax.jit(partial(jh.seq_add, lossy=True))
_seq_div = jax.jit(partial(jh.seq_div, lossy=True))
_seq_keep = jax.jit(jh.seq_keep)
_positions_min = jax.jit(hybrid.positions_min)
_positions_max = jax.jit(hybrid.positions_max)


# -------------------------------------------------------------------------------------------- models

_RECURRENT = ("mamba", "mamba2", "falcon_mamba")
_ATTENTION = ("llama", "qwen3", "granite", "gemma3_text")


def stand_in(model: str, vocab: int) -> Params:
    """A tiny random model with the kinds of memory that `model` has."""
    layers = {True: (), False: (0,)}[model in _RECURRENT]
    hp = Hparams(
        family="llama",
        n_layers=1 if model in _RECURRENT + _ATTENTION else 2,
        d_model=8,
        vocab_size=vocab,
        attention_layer_indices=layers,
        attention=AttentionHparams(n_heads=1, n_kv_heads=1, head_dim=4, scale=0.5),
        recurrent=Mamba2Hparams(n_heads=2, head_dim=4, state_size=4),
        mlp=MlpHparams(8),
        tie_embeddings=True,
    )
    return jh.init_params(hp, jax.random.key(0))


def load(folder: Path, model: str, use_stand_in: bool) -> tuple[Params | None, bool]:
    """(the model or its stand-in or None, whether it is the model)."""
    config = json.loads((folder / model / "config.json").read_text())
    if config["model_type"] in FAMILIES:
        return jh.load_params(folder / model), True
    return (stand_in(model, config["vocab_size"]), False) if use_stand_in else (None, False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="traces to replay, as NAME or MODEL (default: all)")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--checkpoints", type=Path, help="folder of the models (default: FOLDER/checkpoints)")
    args = parser.parse_intermixed_args()
    models: dict[str, tuple[Params | None, bool]] = {}
    total: collections.Counter = collections.Counter()
    differences: collections.Counter = collections.Counter()
    worst, failed, skipped = 0.0, 0, []
    for path in sorted(args.folder.glob("*.json")):
        trace = json.loads(path.read_text())
        model = trace["model"]
        if args.names and not {path.stem, model} & set(args.names):
            continue
        if model not in models:
            models[model] = load(args.checkpoints or args.folder / "checkpoints", model, args.stand_in)
        params, is_model = models[model]
        if params is None:
            skipped.append(path.stem)
            continue
        with np.load(path.with_suffix(".npz")) as logits:
            replay = Replay(params, trace, logits, is_model)
            replay.run()
        jax.clear_caches()  # compiled programs take more memory maps than a process may have
        worst, failed = max(worst, replay.worst), failed + bool(replay.problems)
        total["traces"] += 1
        total["rows"] += replay.rows
        differences += replay.differences
        print(
            f"{path.stem}: {'DIFFERS' if replay.problems else 'same'}, logits within {replay.worst:.1e}",
            flush=True,
        )
        for problem in replay.problems[:5]:
            print("    " + problem)
    print(f"{total['traces']} traces, {failed} differ, {total['rows']} rows of logits within {worst:.1e}")
    for name, count in sorted(differences.items()):
        print(f"on purpose, {count} times: {DIFFERENCES[name]}")
    if skipped:
        print(f"skipped, no such family here: {len(skipped)} ({skipped[0]} ...)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
