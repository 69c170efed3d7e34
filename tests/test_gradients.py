"""Gradients through `step` and `forward`, and the transformations of jax around them."""

import dataclasses
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import Array

import jaxhybrid as jh
from jaxhybrid.hparams import MlpHparams, MoeHparams

ROWS, TOKENS = 3, 5
REAL = (5, 0, 3)
"""Real tokens of each row of the second step: a full row, an empty one and a ragged one."""
PADDING = tiny.VOCAB - 1
"""The token that padding is made of, and nothing else."""


@cache
def model() -> jh.Params:
    """Mamba-2 with an MLP, then attention with experts; a head of its own, so that the embedding sees
    nothing but its tokens. Every expert is chosen, as the choice itself has no slope.
    """
    experts = MoeHparams(n_experts=3, top_k=3, d_ff=6)
    hp = dataclasses.replace(
        tiny.hparams("hybrid"), mlp=(MlpHparams(24), None), moe=(None, experts), tie_embeddings=False
    )
    leaves, tree = jax.tree.flatten(jh.init_params(hp, jax.random.key(3)))
    rng = np.random.default_rng(4)
    noisy = [leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(tree, noisy)


def some_tokens(seed: int = 0) -> np.ndarray:
    """int32 [2, rows, T]: tokens of two steps, padding where a row of the second is short."""
    tokens = np.random.default_rng(seed).integers(0, PADDING, (2, ROWS, TOKENS)).astype(np.int32)
    for row, n in enumerate(REAL):
        tokens[1, row, n:] = PADDING
    return tokens


WEIGHTS = np.ones((2, ROWS, TOKENS), np.float32)
WEIGHTS[1] = np.arange(TOKENS) < np.array(REAL)[:, None]


def cross_entropy(logits: Array, tokens: Array, weights: np.ndarray) -> Array:
    """Of targets that are some function of the tokens."""
    scores = jax.nn.log_softmax(logits.reshape(*tokens.shape, -1))
    chosen = jnp.take_along_axis(scores, (7 * tokens + 3)[..., None] % tiny.VOCAB, axis=-1)[..., 0]
    return -jnp.sum(chosen * weights) / weights.sum()


def everything(tokens: Array, lengths: Any) -> jh.Ubatch:
    """A ubatch whose every token yields logits."""
    return jh.make_ubatch(tokens, lengths, outputs=jnp.arange(tokens.size))


def empty_cache(params: jh.Params) -> jh.Cache:
    return jh.create_cache(params.hparams, 16, ROWS, cell_multiple=16)


jitted_step = jax.jit(jh.step)


def step_loss(params: jh.Params, tokens: Array, memory: jh.Cache) -> Array:
    """Of a step with ragged rows, from the cache that the first tokens left."""
    out, _ = jh.step(params, memory, everything(tokens[1], jnp.asarray(REAL)))
    return cross_entropy(out.logits, tokens[1], WEIGHTS[1])


def forward_loss(params: jh.Params, tokens: Array, _: jh.Cache) -> Array:
    """Of both steps' tokens in one pass."""
    joined, lengths = jnp.concatenate([tokens[0], tokens[1]], axis=1), TOKENS + jnp.asarray(REAL)
    weights = np.concatenate([WEIGHTS[0], WEIGHTS[1]], axis=1)
    return cross_entropy(jh.forward(params, joined, lengths), joined, weights)


def two_step_loss(params: jh.Params, tokens: Array, _: jh.Cache) -> Array:
    """The same as `forward_loss`, in two steps that are computed again for the gradient."""
    step = jax.checkpoint(jh.step)
    first, after = step(params, empty_cache(params), everything(tokens[0], [TOKENS] * ROWS))
    second, _ = step(params, after, everything(tokens[1], jnp.asarray(REAL)))
    logits = jnp.stack([first.logits, second.logits]).reshape(2, ROWS, TOKENS, -1)
    # as `forward_loss` joins its rows, so that both sum in the same order
    joined, targets = (jnp.concatenate([a[0], a[1]], axis=1) for a in (logits, tokens))
    return cross_entropy(joined, targets, np.concatenate([WEIGHTS[0], WEIGHTS[1]], axis=1))


LOSSES = {"step": step_loss, "forward": forward_loss, "two steps": two_step_loss}
value_and_grad = {name: jax.jit(jax.value_and_grad(loss)) for name, loss in LOSSES.items()}


@cache
def a_past() -> jh.Cache:
    ubatch = everything(jnp.asarray(some_tokens()[0]), [TOKENS] * ROWS)
    return jitted_step(model(), empty_cache(model()), ubatch)[1]


def loss_and_gradient(
    through: str, tokens: np.ndarray | None = None, params: jh.Params | None = None
) -> tuple[Array, jh.Params]:
    tokens = some_tokens() if tokens is None else tokens
    return value_and_grad[through](model() if params is None else params, tokens, a_past())


@pytest.mark.parametrize("through", ["step", "forward"])
def test_gradients_agree_with_finite_differences(through):
    """The slope along a random direction in each tensor by itself, so that no small one hides.

    The package computes in float32 whatever the parameters are. A loss near 4 is rounded to about 2e-7,
    which a step of h turns into an error of 2e-7 / h, and the stencil of fourth order leaves one of
    h^4: at h = 0.015 (of directions of length 1) each is near 2e-5.
    """
    _, gradient = loss_and_gradient(through)
    leaves, tree = jax.tree.flatten(model())
    rng, h = np.random.default_rng(1), 0.015
    for i, (path, slope) in enumerate(jax.tree.leaves_with_path(gradient)):
        name, direction = jax.tree_util.keystr(path), rng.standard_normal(slope.shape)
        direction = (direction / np.linalg.norm(direction)).astype(np.float32)

        def at(distance: float, i=i, direction=direction) -> float:
            moved = [*leaves[:i], leaves[i] + distance * direction, *leaves[i + 1 :]]
            return float(loss_and_gradient(through, params=jax.tree.unflatten(tree, moved))[0])

        found = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        expected = float(np.sum(np.asarray(slope) * direction))
        assert abs(found - expected) < 1e-4 + 1e-2 * abs(expected), (name, found, expected)
        assert np.abs(slope).max() > 1e-4, name  # something arrives at every tensor


@pytest.mark.parametrize("through", ["step", "forward"])
def test_gradients_are_finite_and_padding_gets_none(through):
    tokens = some_tokens()
    _, gradient = loss_and_gradient(through)
    chex.assert_tree_all_finite(gradient)
    rows = np.asarray(gradient["embed"]["weight"])
    seen = tokens[1] if through == "step" else tokens
    used = np.setdiff1d(seen, [PADDING])
    assert np.all(np.any(rows[used] != 0, axis=1))
    # neither padding nor what a step finds in the cache: its past is a constant
    assert np.all(rows[np.setdiff1d(np.arange(tiny.VOCAB), used)] == 0)
    # other padding, the same gradient to the bit
    other = np.where(tokens == PADDING, used[0], tokens)
    chex.assert_trees_all_equal(loss_and_gradient(through, other)[1], gradient)


def test_two_checkpointed_steps_are_one_forward():
    """The loss and, as the cache is part of the graph, the whole gradient too."""
    losses, gradients = zip(*map(loss_and_gradient, ("two steps", "forward")), strict=True)
    np.testing.assert_allclose(*losses, rtol=1e-6)
    chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-5)


def test_vmap_over_caches_equals_a_loop():
    params = model()
    caches = jax.tree.map(lambda a: jnp.stack([a] * 3), empty_cache(params))
    lengths = jnp.asarray([REAL, (1, 2, 3), (0, 0, 5)], jnp.int32)
    real = np.asarray(jnp.arange(TOKENS) < lengths[:, :, None]).reshape(3, -1, 1)
    together = jax.jit(jax.vmap(jh.step, in_axes=(None, 0, 0)))
    # from empty caches, and from three that hold different things
    for seed in range(2):
        tokens = jnp.stack([jnp.asarray(some_tokens(seed + 3 * i)[0]) for i in range(3)])
        ubatches = jax.vmap(everything)(tokens, lengths)
        out, after = together(params, caches, ubatches)
        for i in range(3):
            one, one_after = jitted_step(params, *jax.tree.map(lambda a, i=i: a[i], (caches, ubatches)))
            np.testing.assert_array_equal(out.status[i], one.status)
            chex.assert_trees_all_close(out.logits[i] * real[i], one.logits * real[i], rtol=0, atol=1e-5)
            chex.assert_trees_all_close(
                jax.tree.map(lambda a, i=i: a[i], after), one_after, rtol=0, atol=1e-5
            )
        caches = after


def test_jit_equals_eager():
    ubatch = everything(jnp.asarray(some_tokens()[1]), jnp.asarray(REAL))
    out, after = jitted_step(model(), a_past(), ubatch)
    eager, eager_after = jh.step(model(), a_past(), ubatch)
    real = WEIGHTS[1].reshape(-1, 1)
    np.testing.assert_allclose(out.logits * real, eager.logits * real, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(out.status, eager.status)
    assert not np.any(out.status)
    chex.assert_trees_all_close(after, eager_after, rtol=0, atol=1e-5)
