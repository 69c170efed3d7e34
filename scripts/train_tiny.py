"""Train the small hybrid model that the package carries, and export it in Hugging Face layout.

    python scripts/train_tiny.py --out DIR             # about an hour on two CPU cores
    python scripts/train_tiny.py --out DIR --resume    # go on after an interruption

Checkpoints go to DIR/checkpoints, the finished model to DIR/model. A resumed run gives the same bits as
an uninterrupted one: the batch of a step depends only on the seed and the step's number.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tiny_export
import tiny_text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxhybrid.families import hparams_from_config
from jaxhybrid.files import load_params, save_params
from jaxhybrid.files.config import write_json
from jaxhybrid.model import forward, init_params
from jaxhybrid.params import Params

EVALUATION_LENGTH = 512
"""Tokens of a window in which the held-out text is scored."""


def model_config(vocab_size: int, micro: bool) -> dict[str, Any]:
    """config.json: six Mamba-2 layers and two of attention (a quarter of the size for `micro`)."""
    width, n_layers, attention = (32, 4, (2,)) if micro else (160, 8, (3, 7))
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": n_layers,
        "layer_types": ["attention" if i in attention else "mamba" for i in range(n_layers)],
        "num_attention_heads": width // 32,
        "num_key_value_heads": 1,
        "position_embedding_type": "nope",
        "attention_multiplier": 32**-0.5,
        "embedding_multiplier": 8.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.0,
        "mamba_n_heads": 2 * width // 32,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 2 * width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; ids 0, 1, 2 are the end of a text and the two speakers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [tiny_text.END, tiny_text.USER, tiny_text.ASSISTANT]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Data:
    """Token streams: one for training, one held out (prose only)."""

    def __init__(self, text: str, vocab_size: int):
        found = tiny_text.bible() if text == "bible" else tiny_text.documents_of(Path(text))
        training, held_out = tiny_text.split(found)
        texts = tiny_text.training_texts(training)
        self.tokenizer = train_tokenizer([d.prose for d in training], vocab_size)
        self.training = self._stream(texts)
        self.held_out = self._stream([d.prose for d in held_out])
        self.held_out_bytes = sum(len(d.prose.removesuffix(tiny_text.END)) for d in held_out)
        self.documents = (len(training), len(held_out))

    def _stream(self, texts: list[str]) -> np.ndarray:
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return np.array([i for e in encoded for i in e.ids], np.int32)

    def batch(self, seed: int, step: int, rows: int, length: int) -> np.ndarray:
        """[rows, length + 1] windows at random places; depends on nothing but the arguments."""
        if len(self.training) <= length:
            raise SystemExit(
                f"train_tiny: the text has {len(self.training)} tokens, --length {length} needs more"
            )
        starts = np.random.default_rng([seed, step]).integers(len(self.training) - length, size=rows)
        return self.training[starts[:, None] + np.arange(length + 1)]

    def windows(self, rows: int, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The held-out tokens, each predicted once: ([rows, length + 1] tokens, targets that count)."""
        tokens = np.concatenate([[0], self.held_out]).astype(np.int32)
        n = -(-(len(tokens) - 1) // length)
        for first in range(0, n, rows):
            block = np.zeros((rows, length + 1), np.int32)
            counts = np.zeros((rows, length), bool)
            for row, start in enumerate(range(first * length, min(first + rows, n) * length, length)):
                part = tokens[start : start + length + 1]
                block[row, : len(part)] = part
                counts[row, : len(part) - 1] = True
            yield block, counts


def optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    warmup = max(1, min(100, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1))
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.98,
            weight_decay=0.1,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        ),
    )


def nats(params: Params, tokens: jax.Array) -> jax.Array:
    """[B, T] cross entropy of each next token of tokens [B, T + 1]."""
    logits = forward(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def bits_per_byte(params: Params, data: Data, rows: int, length: int) -> float:
    """Over the whole held-out text, in windows of `length` tokens that each start afresh."""
    scored = jax.jit(lambda p, tokens, counts: jnp.sum(nats(p, tokens) * counts))
    total = sum(float(scored(params, *window)) for window in data.windows(rows, length))
    return total / math.log(2) / data.held_out_bytes


class Run:
    """One training run in a folder; `settings` must be the same when it is resumed."""

    def __init__(self, folder: Path, settings: dict[str, Any], data: Data, resume: bool):
        self.folder, self.settings, self.data = folder, settings, data
        _check_folder(folder, settings, resume)
        self.config = model_config(data.tokenizer.get_vocab_size(), settings["micro"])
        hparams = hparams_from_config(self.config)
        assert not isinstance(hparams.recurrent, tuple) and hparams.recurrent is not None
        # shorter chunks are faster to differentiate; the function is the same
        chunk = dataclasses.replace(hparams.recurrent, chunk=32)
        self.hparams = dataclasses.replace(hparams, recurrent=chunk)
        self.optimizer = optimizer(settings["steps"], settings["rate"])
        params = init_params(self.hparams, jax.random.key(settings["seed"]))
        self.state = {"params": params.tensors, "optimizer": self.optimizer.init(params.tensors)}
        self.step = 0
        self.manager = ocp.CheckpointManager(
            (folder / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )
        latest = self.manager.latest_step()
        if resume and latest is not None:
            restored = self.manager.restore(latest, args=ocp.args.StandardRestore(self.state))
            self.state, self.step = restored, latest
        self._update = jax.jit(self._pure_update, donate_argnums=0)

    @property
    def params(self) -> Params:
        return Params(self.state["params"], self.hparams)

    def _pure_update(self, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        def loss(tensors: Any) -> jax.Array:
            return nats(Params(tensors, self.hparams), tokens).mean()

        value, gradient = jax.value_and_grad(loss)(state["params"])
        updates, optimizer_state = self.optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state}, value

    def train(self, until: int, save_every: int) -> None:
        """Go on to step `until`, or to the end of the step in which an interrupt comes."""
        rows, length, seed = (self.settings[k] for k in ("batch", "length", "seed"))
        began, first, losses = time.monotonic(), self.step, []
        with _interrupts() as interrupted:
            while self.step < until and not interrupted:
                tokens = self.data.batch(seed, self.step, rows, length)
                self.state, loss = self._update(self.state, tokens)
                self.step += 1
                losses.append(float(loss))
                if self.step % 20 == 0 or self.step == until:
                    _say(self.step, until, losses, (time.monotonic() - began) / (self.step - first))
                    losses = []
                if self.step % save_every == 0:
                    self.save()
            self.save()

    def save(self) -> None:
        if self.step and self.manager.latest_step() != self.step:
            self.manager.save(self.step, args=ocp.args.StandardSave(self.state))
        self.manager.wait_until_finished()

    def export(self) -> float:
        """Write DIR/model in bfloat16; returns the bits per byte of the exported weights."""
        model = self.folder / "model"
        hparams = hparams_from_config(self.config)
        save_params(Params(self.state["params"], hparams), model, self.config, jnp.bfloat16)
        exported = load_params(model, jnp.float32)
        measured = bits_per_byte(exported, self.data, self.settings["batch"], EVALUATION_LENGTH)
        tiny_export.write_tokenizer(self.data.tokenizer, model, self.config["max_position_embeddings"])
        report = self.settings | {
            "steps done": self.step,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(self.state["params"])),
            "training tokens seen": self.step * self.settings["batch"] * self.settings["length"],
            "tokens in the training text": len(self.data.training),
            "documents trained on and held out": self.data.documents,
            "held-out bytes": self.data.held_out_bytes,
            "evaluation length": EVALUATION_LENGTH,
            "held-out bits per byte": round(measured, 4),
        }
        write_json(self.folder / "report.json", report)
        card = tiny_export.model_card(report, tiny_export.samples(model))
        (model / "README.md").write_text(card, encoding="utf-8")
        return measured


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that a Ctrl-C fills. An exception in the middle of a step would lose the donated state."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def _check_folder(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    written = folder / "settings.json"
    if written.exists() and not resume:
        raise SystemExit(f"train_tiny: {folder} holds a run already: add --resume or give another --out")
    if written.exists():
        before = json.loads(written.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if before.get(name) != value:
                raise SystemExit(
                    f"train_tiny: --{name} is {value}, but the run in {folder} has {before.get(name)}"
                )
    elif resume:
        raise SystemExit(f"train_tiny: {folder} holds no run to resume")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(written, settings)


def _say(step: int, until: int, losses: list[float], seconds: float) -> None:
    left = (until - step) * seconds / 60
    end = "\r" if sys.stderr.isatty() and step < until else "\n"
    line = f"step {step}/{until}  loss {np.mean(losses):.3f}  {seconds:.2f} s/step  {left:.1f} min left "
    print(line, end=end, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="train_tiny", description="Train the small hybrid model that the package carries."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--text", default="bible", help="'bible' (Debian's bible-kjv) or a UTF-8 file")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--stop-at", type=int, help="stop after this step; --resume goes on")
    parser.add_argument("--batch", type=int, default=4, help="rows in a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--micro", action="store_true", help="a toy size, to try the script")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "length", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    names = ("text", "steps", "batch", "length", "rate", "vocab", "seed", "micro")
    settings = {name: getattr(args, name) for name in names}
    data = Data(args.text, args.vocab)
    run = Run(args.out, settings, data, args.resume)
    until = min(args.steps, args.stop_at or args.steps)
    run.train(until, args.save_every)
    if run.step < args.steps:
        print(f"\nsaved at step {run.step}; go on with --resume", file=sys.stderr)
        return 0 if run.step == until else 130
    print(f"held-out bits per byte: {run.export():.4f}; model in {args.out / 'model'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
