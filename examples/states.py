"""Read and edit the recurrent states of the model inside the package.

    python examples/states.py --out FOLDER    # writes states.png and states.json

A checkpoint of a sequence is a pytree with its states, and rewinding to an edited checkpoint puts edited
states back. Nothing else is needed to measure how fast each head forgets, what can be read from a state, and
what a layer's state is worth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhybrid as jh

TEXT = (
    "And God said, Let there be light: and there was light. And God saw the light, that it was good: and God "
    "divided the light from the darkness. And God called the light Day, and the darkness he called Night."
)
WIDTH = 512
"""Numbers that a state is projected to, at random, before a probe reads it."""
PENALTY = 1.0
"""Of the ridge regression, for features of variance 1."""


def edited(cache: jh.Cache, seq: Any, edit: Any) -> jh.Cache:
    """The cache with edit(states) for the states of one sequence; states is a tuple of dicts, one a layer."""
    there = jh.checkpoint(cache, seq)
    return jh.try_rewind(cache, seq, there.replace(states=edit(there.states)))[0]


def ssm(cache: jh.Cache, seq: Any) -> jax.Array:
    """The states [layers, H, P, N] of one sequence of a Mamba-2 hybrid whose layers are alike."""
    return jnp.stack([state["ssm"] for state in jh.checkpoint(cache, seq).states])


def decays(params: jh.Params, tokens: np.ndarray) -> jax.Array:
    """What every token multiplies each head's state with: float32 [T - 1, layers, H] for tokens int32 [T].

    A layer's next state is S' = a S + u b, where a, u and b do not depend on S. So a is how much larger S'
    becomes when S is larger by 1.
    """
    cache = jh.create_cache(params.hparams, len(tokens))
    n_layers = len(params.hparams.recurrent_layer_indices or ())

    def token(cache: jh.Cache, t: jax.Array) -> tuple[jh.Cache, jax.Array]:
        ubatch = jh.make_ubatch(t[None, None])
        _, after = jh.step(params, cache, ubatch)

        def moved(layer: jax.Array) -> jax.Array:
            def larger(states: Any) -> Any:
                return tuple(s | {"ssm": s["ssm"] + (layer == i)} for i, s in enumerate(states))

            _, other = jh.step(params, edited(cache, 0, larger), ubatch)
            return jnp.mean((ssm(other, 0) - ssm(after, 0))[layer], axis=(1, 2))

        return after, jax.vmap(moved)(jnp.arange(n_layers))

    # before the first token there is no state to edit
    return jax.jit(lambda c, t: jax.lax.scan(token, c, t)[1])(cache, jnp.asarray(tokens))[1:]


def half_lives(a: jax.Array) -> np.ndarray:
    """Tokens after which half of a state is left, [layers, H], from decays [T, layers, H]."""
    rate = -np.log(np.clip(np.asarray(a, np.float64), 1e-9, 1 - 1e-7)).mean(axis=0)
    return np.log(2) / rate


def states_of_texts(params: jh.Params, tokens: np.ndarray) -> np.ndarray:
    """Every layer's state after every token, projected: [B, T, layers, WIDTH] for tokens [B, T]."""
    rows, length = tokens.shape
    cache = jh.create_cache(params.hparams, length, rows)
    size = ssm(cache, 0)[0].size
    projection = jax.random.normal(jax.random.key(0), (size, WIDTH)) / size**0.5

    def token(cache: jh.Cache, column: jax.Array) -> tuple[jh.Cache, jax.Array]:
        _, cache = jh.step(params, cache, jh.make_ubatch(column[:, None]))
        states = jax.vmap(lambda seq: ssm(cache, seq))(jnp.arange(rows))
        # slow heads have large states and would drown the others
        states = states / (jnp.sqrt(jnp.mean(states**2, axis=(-2, -1), keepdims=True)) + 1e-6)
        return cache, states.reshape(rows, -1, size) @ projection

    found = jax.jit(lambda c, t: jax.lax.scan(token, c, t)[1])(cache, jnp.asarray(tokens.T))
    return np.asarray(found).transpose(1, 0, 2, 3)


def probe(params: jh.Params, tokens: np.ndarray, distances: list[int]) -> np.ndarray:
    """R^2 [layers, distances] of a ridge regression from a state to the embedding of a token some way back.

    The last quarter of the rows is held out.
    """
    features = states_of_texts(params, tokens)
    embeddings = np.asarray(params["embed"]["weight"], np.float32)[tokens]
    first, held_out = max(distances), -(-len(tokens) * 3 // 4)
    scores = np.zeros((features.shape[2], len(distances)))
    for layer in range(features.shape[2]):
        x = features[:, first:, layer]
        x = (x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-6)
        a, b = (part.reshape(-1, WIDTH) for part in (x[:held_out], x[held_out:]))
        inverse = np.linalg.inv(a.T @ a + PENALTY * len(a) * np.eye(WIDTH)) @ a.T
        for i, distance in enumerate(distances):
            y = embeddings[:, first - distance : tokens.shape[1] - distance]
            u, v = (part.reshape(-1, y.shape[-1]) for part in (y[:held_out], y[held_out:]))
            mean = u.mean(axis=0)
            error = np.sum((v - mean - b @ (inverse @ (u - mean))) ** 2)
            scores[layer, i] = 1 - error / np.sum((v - mean) ** 2)
    return scores


def damage(params: jh.Params, tokens: np.ndarray, cut: int) -> dict[str, np.ndarray]:
    """Nats a token that texts [B, T] get worse by after `cut`, [layers], with one layer's state exchanged.

    "zero": the state after `cut` tokens becomes zero; "swap": it becomes that of the next row.
    """
    rows = len(tokens)
    past = jh.create_cache(params.hparams, tokens.shape[1], rows)
    step = jax.jit(jh.step)
    _, past = step(params, past, jh.make_ubatch(tokens[:, :cut]))
    rest = tokens[:, cut:]
    ubatch = jh.make_ubatch(rest[:, :-1], outputs=np.arange(rest[:, :-1].size))

    def nats(cache: jh.Cache) -> float:
        logits = step(params, cache, ubatch)[0].logits.reshape(*rest[:, 1:].shape, -1)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(rest[:, 1:, None]), axis=-1)
        return -float(picked.mean())

    there = [jh.checkpoint(past, seq).states for seq in range(rows)]
    zero = jax.tree.map(jnp.zeros_like, there[0])

    def changed(layer: int, other: Any) -> float:
        cache = past
        for seq in range(rows):
            states = tuple(other(seq)[i] if i == layer else s for i, s in enumerate(there[seq]))
            cache = edited(cache, seq, lambda _, states=states: states)
        return nats(cache)

    intact, layers = nats(past), range(len(zero))
    return {
        "zero": np.array([changed(layer, lambda _: zero) - intact for layer in layers]),
        "swap": np.array([changed(layer, lambda seq: there[(seq + 1) % rows]) - intact for layer in layers]),
    }


def plot(found: dict[str, Any], path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    lives, probes, worth = figure.subplots(1, 3)
    names = [str(i) for i in found["layers"]]
    image = lives.imshow(np.sort(found["half-lives"], axis=1), aspect="auto", norm=LogNorm(), cmap="viridis")
    lives.set_yticks(range(len(names)), names)
    lives.set(xlabel="heads, fast to slow", ylabel="layer", title="Half-life of a head's state")
    figure.colorbar(image, ax=lives, label="tokens")
    for i, scores in enumerate(found["probe"]):
        color = colormaps["viridis"](i / len(names))
        probes.plot(found["distances"], scores, "o-", ms=3, color=color, label=f"layer {names[i]}")
    probes.set(xlabel="tokens back", ylabel="$R^2$ on held-out texts", title="Reading a token from a state")
    probes.grid(alpha=0.3)
    probes.legend(fontsize=7)
    x = np.arange(len(names))
    for shift, (name, label) in zip(
        (-0.2, 0.2), (("zero", "set to zero"), ("swap", "of another text")), strict=True
    ):
        worth.bar(x + shift, found[name], 0.4, label=label)
    worth.set_xticks(x, names)
    worth.set(
        xlabel="layer whose state is edited", ylabel="nats a token worse", title="Worth of a layer's state"
    )
    worth.legend(fontsize=8)
    worth.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Read and edit recurrent states.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--model", help="folder or hub id; by default the model inside the package")
    parser.add_argument("--rows", type=int, default=128, help="texts that the model writes, to be probed")
    parser.add_argument("--length", type=int, default=64, help="tokens of such a text")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    model = jh.load(args.model, dtype=jnp.float32)
    params = model.params
    start, n = model.tokenizer.encode("And"), args.length - 1
    texts = jh.generate(
        model, [start] * args.rows, max_tokens=n, temperature=1.0, ignore_eos=True, batch_size=args.rows
    )
    tokens = np.array([[*start, *result.tokens] for result in texts])[:, : args.length]
    distances = [d for d in (0, 1, 2, 3, 4, 6, 8, 12, 16) if d < args.length // 2]
    found = {
        "layers": list(params.hparams.recurrent_layer_indices or ()),
        "half-lives": half_lives(decays(params, np.array(model.tokenizer.encode(TEXT)))).tolist(),
        "distances": distances,
        "probe": probe(params, tokens, distances).tolist(),
    } | {k: v.tolist() for k, v in damage(params, tokens[: min(16, args.rows)], args.length // 2).items()}
    (args.out / "states.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    plot(found, args.out / "states.png")
    return found


if __name__ == "__main__":
    main()
