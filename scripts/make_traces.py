"""Write the traces of tests/traces: random operations with what they should give.

    python scripts/make_traces.py [--golden tests/golden] [--out tests/traces]

Needs torch and transformers; the tests need neither. A dict from sequence to its tokens predicts positions
and results, and transformers' full forward over those tokens gives the logits, so nothing of this package is
asked. `scripts/replay_traces.py` describes the format.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

MODELS = {
    "llama": ("attention", (0,)),
    "gemma3_text": ("attention", (0, 1)),
    "mamba2": ("recurrent", (1,)),
    "granitemoehybrid_dense": ("hybrid", (0, 1)),
}
"""Kind of memory, and seeds of traces; odd ones share one pool of cells and keep states to go back to."""
N_SEQ, N_OPS, N_CTX, LONGEST = 3, 26, 128, 40


class Sequences:
    """What every sequence holds: its tokens from position 0, and how far back its states are remembered."""

    def __init__(self, kind: str, n_rollback: int) -> None:
        self.kind, self.n_rollback = kind, n_rollback
        self.tokens: list[list[int]] = [[] for _ in range(N_SEQ)]
        self.known: list[list[int]] = [[] for _ in range(N_SEQ)]  # lengths with a state, newest first

    def grow(self, seq: int, token: int) -> None:
        self.tokens[seq].append(token)
        self.known[seq] = [len(self.tokens[seq]), *self.known[seq]][: self.n_rollback + 1]

    def cut(self, seq: int, length: int) -> bool:
        """Keep the first `length` tokens; False when a state stands in the way."""
        if length >= len(self.tokens[seq]):
            return True
        if self.kind != "attention" and length > 0 and length not in self.known[seq]:
            return False
        self.tokens[seq] = self.tokens[seq][:length]
        self.known[seq] = [n for n in self.known[seq] if n <= length]
        return True

    def put(self, seq: int, held: tuple[list[int], list[int]]) -> None:
        self.tokens[seq], self.known[seq] = list(held[0]), list(held[1])

    def held(self, seq: int) -> tuple[list[int], list[int]]:
        return list(self.tokens[seq]), list(self.known[seq])

    def positions(self) -> dict[str, Any]:
        last = [len(t) - 1 for t in self.tokens]
        first = last if self.kind != "attention" else [0 if t else -1 for t in self.tokens]
        return {"pos_min": first, "pos_max": last, "can_shift": True}


class Recorder:
    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.vocab = self.model.config.vocab_size
        self.draw = random.Random(f"{folder.name} {seed}")
        self.unified = bool(seed % 2)
        self.n_rollback = 2 if kind != "attention" and seed % 2 else 0
        self.sequences = Sequences(kind, self.n_rollback)
        self.ops: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.saved: dict[int, tuple[list[int], list[int]]] = {}

    def record(self) -> dict[str, Any]:
        weights = {
            self.decode: 10, self.wrong_batch: 2, self.seq_rm: 6, self.seq_cp: 3, self.seq_keep: 1,
            self.clear: 1, self.state_save: 2, self.state_load: 3,
        }  # fmt: skip
        while len(self.ops) < N_OPS:
            op = self.draw.choices(list(weights), list(weights.values()))[0]()
            if op is not None:
                self.ops.append(op | self.sequences.positions())
        return {
            "format": 1,
            "n_ctx": N_CTX if self.unified else N_CTX * N_SEQ,
            "n_seq_max": N_SEQ,
            "n_ubatch": self.draw.choice([4, 16]),
            "kv_unified": self.unified,
            "n_rs_seq": self.n_rollback,
            "ops": self.ops,
        }

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> np.ndarray:
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float().numpy()

    def decode(self) -> dict[str, Any] | None:
        """Sequences in any order, their tokens interleaved; equal ones sometimes share a token."""
        left: list[list[int]] = []
        for seq in self.draw.sample(range(N_SEQ), self.draw.randint(1, N_SEQ)):
            if any(seq in ids for ids in left):
                continue
            twins = [
                s for s in range(N_SEQ) if s != seq and self.sequences.tokens[s] == self.sequences.tokens[seq]
            ]
            ids = [seq, *(twins if twins and self.draw.random() < 0.3 else [])]
            if not any(set(ids) & set(other) for other in left):
                n = min(self.draw.randint(1, 9), LONGEST - len(self.sequences.tokens[seq]))
                left += [sorted(ids)] * n
        if not left:
            return None
        self.draw.shuffle(left)
        op: dict[str, Any] = {"op": "decode", "tokens": [], "pos": [], "seq_id": left, "output": [], "rc": 0}
        rows = []
        for ids in left:
            token, wanted = self.draw.randrange(self.vocab), self.draw.random() < 0.6
            op["tokens"].append(token)
            op["pos"].append(len(self.sequences.tokens[ids[0]]))
            op["output"].append(int(wanted))
            for seq in ids:
                self.sequences.grow(seq, token)
            if wanted:
                rows.append(self.logits(self.sequences.tokens[ids[0]]))
        op["logits"] = f"logits_{len(self.ops)}"
        self.arrays[op["logits"]] = np.stack(rows) if rows else np.zeros((0, self.vocab), np.float32)
        return op

    def wrong_batch(self) -> dict[str, Any]:
        seq = self.draw.randrange(N_SEQ)
        end = len(self.sequences.tokens[seq])
        tokens, pos, ids = self.draw.choice(
            [
                ([], [], []),
                ([self.vocab], [end], [[seq]]),
                ([1], [end], [[N_SEQ]]),
                ([1, 1], [end, end + 2], [[seq]] * 2),
                ([1, 1], [end + 1, end], [[seq]] * 2) if end else ([-1], [0], [[seq]]),
            ]
        )
        op = {"op": "decode", "tokens": tokens, "pos": pos, "seq_id": ids}
        return op | {"output": [1] * len(tokens), "rc": -1}

    def seq_rm(self) -> dict[str, Any]:
        seq = self.draw.randrange(N_SEQ)
        end = len(self.sequences.tokens[seq])
        p0 = self.draw.choice([-1, 0, end - 1, end - 2, end - 4, end, end + 3])
        p1 = self.draw.choice([-1, end, end + 2]) if p0 < end else -1
        ok = self.sequences.cut(seq, max(p0, 0))
        return {"op": "seq_rm", "seq": seq, "p0": max(p0, -1), "p1": p1, "ok": ok}

    def seq_cp(self) -> dict[str, Any]:
        src, dst = self.draw.randrange(N_SEQ), self.draw.randrange(N_SEQ)
        self.sequences.put(dst, self.sequences.held(src))
        return {"op": "seq_cp", "src": src, "dst": dst, "p0": -1, "p1": -1}

    def seq_keep(self) -> dict[str, Any]:
        seq = self.draw.randrange(N_SEQ)
        for other in set(range(N_SEQ)) - {seq}:
            self.sequences.put(other, ([], []))
        return {"op": "seq_keep", "seq": seq}

    def clear(self) -> dict[str, Any]:
        for seq in range(N_SEQ):
            self.sequences.put(seq, ([], []))
        return {"op": "clear", "data": self.draw.random() < 0.5}

    def state_save(self) -> dict[str, Any]:
        seq, slot = self.draw.randrange(N_SEQ), self.draw.randrange(2)
        self.saved[slot] = self.sequences.held(seq)
        return {"op": "state_save", "seq": seq, "slot": slot}

    def state_load(self) -> dict[str, Any] | None:
        if not self.saved:
            return None
        slot, dst = self.draw.choice(sorted(self.saved)), self.draw.randrange(N_SEQ)
        self.sequences.put(dst, self.saved[slot])
        return {"op": "state_load", "slot": slot, "dst": dst}


def main() -> None:
    tests = Path(__file__).resolve().parent.parent / "tests"
    parser = argparse.ArgumentParser(description="Write the traces of tests/traces.")
    parser.add_argument("--golden", type=Path, default=tests / "golden")
    parser.add_argument("--out", type=Path, default=tests / "traces")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    options.out.mkdir(exist_ok=True)
    for name, (kind, seeds) in MODELS.items():
        for seed in seeds:
            recorder = Recorder(options.golden / name, kind, seed)
            trace = {"model": name, **recorder.record()}
            path = options.out / f"{name}-{seed}.json"
            path.write_text(json.dumps(trace) + "\n")
            np.savez_compressed(path.with_suffix(".npz"), **recorder.arrays)  # type: ignore[arg-type]
            rows = sum(len(a) for a in recorder.arrays.values())
            print(f"{path.stem}: {len(trace['ops'])} operations, {rows} rows of logits")


if __name__ == "__main__":
    main()
