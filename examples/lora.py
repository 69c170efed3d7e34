"""Fine-tune a model on a text file with LoRA, and save an adapter that PEFT and `generate --adapter` load.

    python examples/lora.py --text FILE --out ADAPTER --plot loss.png
    python -m jaxhybrid.generate --adapter ADAPTER --prompt "..."

Only the adapter is trained: the model stays as it is, and may be quantized (--quantize).
Needs optax, and matplotlib for --plot.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhybrid as jh
from jaxhybrid.command import read_text
from jaxhybrid.errors import JaxHybridError, UsageError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fine-tune a model on a text file with LoRA.")
    add = parser.add_argument
    add("--model", metavar="PATH", help="a folder or hub id (default: the model inside the package)")
    add("--text", required=True, type=Path, metavar="FILE", help="what to learn, UTF-8")
    add("--out", required=True, type=Path, metavar="FOLDER", help="where the adapter goes")
    add("--plot", type=Path, metavar="PNG", help="draw the loss")
    add("--quantize", choices=["int8", "int8_block", "int4"], help="of the frozen weights")
    add("--targets", nargs="+", metavar="NAME", help="ends of module names (default: every linear map)")
    add("--rank", type=int, default=8)
    add("--alpha", type=float, default=16.0, help="the adapter's products are scaled by alpha / rank")
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=4, help="pieces of text a step")
    add("--length", type=int, default=128, help="tokens of a piece")
    add("--learning-rate", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    return parser


def pieces(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """int32 [batch, length + 1] from random places of the text, without end."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - length, batch)
        yield np.stack([tokens[i : i + length + 1] for i in starts])


def loss(lora: jh.Lora, params: jh.Params, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats a token, of tokens [B, T + 1]."""
    logits = jh.forward(jh.apply_lora(params, lora), tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(
    params: jh.Params, lora: jh.Lora, tokens: np.ndarray, args: argparse.Namespace
) -> tuple[jh.Lora, list]:
    """The trained adapter, and the loss of every step."""
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    optimizer: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))
    state = optimizer.init(lora)

    @jax.jit
    def update(lora: jh.Lora, state: optax.OptState, params: jh.Params, tokens: jax.Array):
        value, gradient = jax.value_and_grad(loss)(lora, params, tokens)
        changes, state = optimizer.update(gradient, state, lora)
        return jax.tree.map(jnp.add, lora, changes), state, value

    losses = []
    for i, piece in zip(range(args.steps), pieces(tokens, args.batch, args.length, args.seed), strict=False):
        lora, state, value = update(lora, state, params, jnp.asarray(piece))
        losses.append(float(value))
        if i % 20 == 0 or i == args.steps - 1:
            print(f"step {i}: loss {losses[-1]:.3f}", flush=True)
    return lora, losses


def draw(losses: Sequence[float], path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot no display is needed

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a token)")
    axes.plot(losses)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = build_parser().parse_args(argv)
    try:
        if os.path.lexists(args.out):  # before the work, not after it
            raise UsageError(f"--out {args.out}: exists already; choose another name")
        if args.steps < 1 or args.batch < 1 or args.length < 1:
            raise UsageError("--steps, --batch and --length must be at least 1")
        model = jh.load(args.model, dtype=jnp.float32, quantize=args.quantize)
        tokens = np.asarray(model.tokenizer.encode(read_text(str(args.text))), np.int32)
        if len(tokens) <= args.length:
            raise UsageError(f"--text {args.text}: {len(tokens)} tokens are too few; lower --length")
        targets = args.targets or "all-linear"
        key = jax.random.key(args.seed)
        lora = jh.init_lora(model.params, key, rank=args.rank, alpha=args.alpha, targets=targets)
        print(f"{sum(x.size for x in jax.tree.leaves(lora))} parameters in {len(lora.factors)} modules")
        lora, losses = train(model.params, lora, tokens, args)
        jh.save_adapter(args.out, lora, base=str(args.model or ""))
        if args.plot is not None:
            draw(losses, args.plot)
    except (JaxHybridError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    return losses


if __name__ == "__main__":
    main()
