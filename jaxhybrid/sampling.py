"""From logits to tokens, inside the graph: pure functions whose settings are arrays.

`sample` works in this order, and each filter sees what the one before it left, renormalised:

1. penalties: repetition (CTRL, arXiv:1909.05858: a positive logit of a token seen in the prompt or
   generated is divided by it, a negative one multiplied), then presence and frequency (the OpenAI
   API: `logit -= presence * (n > 0) + frequency * n`, n = times generated, the prompt left out);
2. temperature; a row with temperature 0 is greedy and takes the first largest logit;
3. top-k; 4. top-p; 5. min-p; 6. one draw by the inverse of the distribution function.

Every draw is made by `jaxhybrid.draw`, which says what is exact and why.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxhybrid.draw import argmax, pick, token_weights, total_weight
from jaxhybrid.errors import UsageError


class Sampling(struct.PyTreeNode):
    """How each row is sampled. All fields are [B]; changing any value compiles nothing."""

    temperature: Array  # float32, 0 = greedy
    top_k: Array  # int32, 0 = off
    top_p: Array  # float32, 1 = off
    min_p: Array  # float32, 0 = off
    repetition_penalty: Array  # float32, 1 = off
    presence_penalty: Array  # float32, 0 = off
    frequency_penalty: Array  # float32, 0 = off
    seed: Array  # uint32


class TokenCounts(struct.PyTreeNode):
    """What the penalties need to know about each row's tokens."""

    prompt: Array  # bool [B, V], the token occurs in the prompt
    generated: Array  # int32 [B, V], times generated


def make_sampling(
    n_rows: int,
    *,
    temperature: object = 0.0,
    top_k: object = 0,
    top_p: object = 1.0,
    min_p: object = 0.0,
    repetition_penalty: object = 1.0,
    presence_penalty: object = 0.0,
    frequency_penalty: object = 0.0,
    seed: object = 0,
) -> Sampling:
    """Checks settings, each a number or one number per row, and makes them arrays.

    A single seed s gives row i the seed (s + i) mod 2**32. Raises UsageError that names the field,
    the value and the allowed range.
    """
    if n_rows < 1:
        raise UsageError(f"n_rows is {n_rows}; give at least 1")
    limit = float(np.finfo(np.float32).max)
    real = {
        "temperature": (temperature, 0.0, limit, "a finite number, 0 or more"),
        "top_p": (top_p, 0.0, 1.0, "0 to 1"),
        "min_p": (min_p, 0.0, 1.0, "0 to 1"),
        "repetition_penalty": (repetition_penalty, 1e-6, 1e6, "1e-6 to 1e6"),
        "presence_penalty": (presence_penalty, -2.0, 2.0, "-2 to 2"),
        "frequency_penalty": (frequency_penalty, -2.0, 2.0, "-2 to 2"),
    }
    fields = {
        name: jnp.asarray(_column(n_rows, name, *rule, "iuf").astype(np.float32))
        for name, rule in real.items()
    }
    k = _column(n_rows, "top_k", top_k, 0, 2**31 - 1, "a whole number, 0 to 2**31 - 1", "iu")
    seeds = _column(n_rows, "seed", seed, -(2**63), 2**63 - 1, "a whole number of 64 bits", "iu")
    seeds = seeds.astype(np.uint64)
    if np.ndim(seed) == 0:  # pyright: ignore[reportArgumentType]
        seeds = seeds + np.arange(n_rows, dtype=np.uint64)
    return Sampling(
        top_k=jnp.asarray(k.astype(np.int32)),
        seed=jnp.asarray((seeds % 2**32).astype(np.uint32)),
        **fields,
    )


def _column(
    n_rows: int, name: str, value: object, low: float, high: float, allowed: str, kinds: str
) -> np.ndarray:
    try:
        column = np.asarray(value)
    except ValueError:
        column = np.asarray(None)
    if column.dtype.kind not in kinds:
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}, or one per row")
    if column.shape not in ((), (n_rows,)):
        raise UsageError(f"{name} has shape {column.shape}; give a number or {n_rows}, one per row")
    bad = ~((column >= low) & (column <= high))
    if bad.any():
        raise UsageError(f"{name} is {column[bad].flat[0]}; allowed: {allowed}")
    return np.broadcast_to(column, (n_rows,))


def empty_counts(n_rows: int, vocab: int) -> TokenCounts:
    """Counts of rows that have no tokens yet."""
    shape = (n_rows, vocab)
    return TokenCounts(prompt=jnp.zeros(shape, bool), generated=jnp.zeros(shape, jnp.int32))


def count_prompt(counts: TokenCounts, tokens: Array, lengths: Array) -> TokenCounts:
    """Marks the first `lengths` [B] of the prompt tokens [B, T]; ids outside [0, V) are ignored."""
    n_rows, width = tokens.shape
    vocab = counts.prompt.shape[1]
    real = (jnp.arange(width)[None] < lengths[:, None]) & (tokens >= 0)
    columns = jnp.where(real, tokens, vocab)  # vocab is out of range, and dropped
    rows = jnp.arange(n_rows)[:, None]
    prompt = counts.prompt.at[rows, columns].set(True, mode="drop")
    return TokenCounts(prompt=prompt, generated=counts.generated)


def count_token(counts: TokenCounts, tokens: Array, active: Array) -> TokenCounts:
    """Adds one generated token [B] to each row where `active` [B, bool]."""
    n_rows, vocab = counts.generated.shape
    columns = jnp.where(active & (tokens >= 0), tokens, vocab)
    generated = counts.generated.at[jnp.arange(n_rows), columns].add(1, mode="drop")
    return TokenCounts(prompt=counts.prompt, generated=generated)


def sample(logits: Array, sampling: Sampling, counts: TokenCounts, positions: Array) -> Array:
    """One token per row, int32 [B], from logits [B, V]; the order of work is the module's.

    The randomness of a row comes from its seed and its entry in `positions` (int32 [B], another
    value for every token of a sequence) and from nothing else. NaN logits count as -inf; a row
    without any finite logit still gives a valid token id. Work that no row asks for is skipped at
    run time.
    """
    logits = _penalise(logits.astype(jnp.float32), sampling, counts)
    greedy = argmax(logits)
    random = sampling.temperature > 0

    def mixed() -> Array:
        drawn = lax.platform_dependent(logits, sampling, positions, cpu=_draw_row_by_row, default=_draw)
        return jnp.where(random, drawn, greedy)

    return lax.cond(random.any(), mixed, lambda: greedy)


def probabilities(logits: Array, sampling: Sampling, counts: TokenCounts) -> Array:
    """The distribution `sample` draws from, float32 [B, V]; a greedy row is one-hot."""
    logits = _penalise(logits.astype(jnp.float32), sampling, counts)
    vocab = logits.shape[1]
    weights = _weights(logits, sampling)
    total = total_weight(weights).astype(jnp.float32)
    drawn = weights.reshape(weights.shape[0], -1)[:, :vocab] / total[:, None]
    greedy = jax.nn.one_hot(argmax(logits), vocab)
    return jnp.where((sampling.temperature > 0)[:, None], drawn, greedy)


def _penalise(logits: Array, sampling: Sampling, counts: TokenCounts) -> Array:
    repetition = sampling.repetition_penalty[:, None]
    presence = sampling.presence_penalty[:, None]
    frequency = sampling.frequency_penalty[:, None]

    def change() -> Array:
        seen = counts.prompt | (counts.generated > 0)
        scaled = jnp.where(logits < 0, logits * repetition, logits / repetition)
        times = counts.generated.astype(jnp.float32)
        once = jnp.where(times > 0, presence, 0.0)
        return jnp.where(seen, scaled, logits) - (once + frequency * times)

    on = (repetition != 1) | (presence != 0) | (frequency != 0)
    return lax.cond(on.any(), change, lambda: logits)


def _draw_row_by_row(logits: Array, sampling: Sampling, positions: Array) -> Array:
    """`_draw` for CPU: one row at a time stays in the CPU's cache, and skips its own filters."""

    def row(args: tuple[Array, Sampling, Array]) -> Array:
        x, settings, position = jax.tree.map(lambda leaf: leaf[None], args)
        return lax.cond(
            settings.temperature[0] > 0,
            lambda: _draw(x, settings, position)[0],
            lambda: jnp.int32(0),
        )

    return lax.map(row, (logits, sampling, positions))


def _draw(logits: Array, sampling: Sampling, positions: Array) -> Array:
    """Tokens [B] drawn from logits [B, V]; greedy rows get some valid token."""

    def uniform(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.bits(key, dtype=jnp.uint32)

    return pick(_weights(logits, sampling), jax.vmap(uniform)(sampling.seed, positions))


def _weights(logits: Array, sampling: Sampling) -> Array:
    return token_weights(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
