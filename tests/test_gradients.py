"""Gradients through `step` and `forward`, and the transformations of jax around them."""

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import Array

import jaxhybrid as jh
from jaxhybrid.hparams import MoeHparams

KINDS = ("attention", "recurrent", "hybrid", "experts")
ROWS, TOKENS = 3, 5
REAL = (5, 0, 3)
"""Real tokens of each row of the second step: a full row, an empty one and a ragged one."""
PADDING = tiny.VOCAB - 1
"""The token that padding is made of, and nothing else."""


def params_of(kind: str, top_k: int = 2) -> jh.Params:
    """The tiny models with a head of their own, so that the embedding sees nothing but its tokens."""
    made = tiny.params("hybrid" if kind == "experts" else kind)
    hp = dataclasses.replace(made.hparams, tie_embeddings=False)
    if kind == "experts":
        hp = dataclasses.replace(hp, moe=MoeHparams(n_experts=4, top_k=top_k, d_ff=6))
        made = jh.init_params(hp, jax.random.key(3))
        return jh.Params(made.tensors, hp)
    head = 0.3 * jax.random.normal(jax.random.key(2), (tiny.VOCAB, tiny.D_MODEL))
    return jh.Params({**made.tensors, "head": {"weight": head}}, hp)


def some_tokens(seed: int = 0) -> np.ndarray:
    """int32 [2, rows, T]: tokens of two steps, padding where a row of the second is short."""
    tokens = np.random.default_rng(seed).integers(0, PADDING, (2, ROWS, TOKENS)).astype(np.int32)
    for row, n in enumerate(REAL):
        tokens[1, row, n:] = PADDING
    return tokens


def cross_entropy(logits: Array, targets: Array, weights: Array) -> Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * weights) / jnp.sum(weights)


def everything(tokens: Array, lengths: Any = None) -> jh.Ubatch:
    """A ubatch whose every token yields logits."""
    return jh.make_ubatch(tokens, lengths, outputs=jnp.arange(tokens.size))


def weights_of(lengths: Any) -> Array:
    return (jnp.arange(TOKENS) < jnp.asarray(lengths)[:, None]).astype(jnp.float32)


def two_step_logits(params: jh.Params, tokens: Array) -> tuple[Array, Array]:
    """Logits [2, rows, T, V] of two steps, the second from the cache that the first left; statuses."""
    cache = jh.create_cache(params.hparams, 16, ROWS, cell_multiple=16)
    first, cache = jh.step(params, cache, everything(tokens[0]))
    second, _ = jh.step(params, cache, everything(tokens[1], jnp.asarray(REAL)))
    logits = jnp.stack([first.logits, second.logits]).reshape(*tokens.shape, -1)
    return logits, jnp.stack([first.status, second.status])


def step_loss(params: jh.Params, tokens: Array) -> Array:
    """Every real token predicts the one below it in `targets`."""
    logits, _ = two_step_logits(params, tokens)
    weights = jnp.stack([weights_of([TOKENS] * ROWS), weights_of(REAL)])
    return cross_entropy(logits, (tokens * 7 + 3) % tiny.VOCAB, weights)


def forward_loss(params: jh.Params, tokens: Array) -> Array:
    """The same loss from one pass over the concatenation."""
    joined = jnp.concatenate([tokens[0], tokens[1]], axis=1)
    lengths = TOKENS + jnp.asarray(REAL)
    weights = jnp.concatenate([weights_of([TOKENS] * ROWS), weights_of(REAL)], axis=1)
    logits = jh.forward(params, joined, lengths)
    return cross_entropy(logits, (joined * 7 + 3) % tiny.VOCAB, weights)


LOSSES = {"step": step_loss, "forward": forward_loss}
jitted = {name: jax.jit(jax.value_and_grad(loss)) for name, loss in LOSSES.items()}
value = {name: jax.jit(loss) for name, loss in LOSSES.items()}


def named(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", LOSSES)
def test_gradients_agree_with_finite_differences(kind, through):
    """The slope along a random direction in each tensor by itself, so that no small one hides.

    The package computes in float32. A loss near 4 is rounded to about 2e-7, which a step of h turns
    into an error of 2e-7 / h, and the stencil of fourth order leaves one of h^4: at h = 0.02 (of
    directions of length 1) both lie near 1e-5.
    """
    # which experts are chosen jumps along the way, so all are; their weights still move
    params, tokens = params_of(kind, top_k=4), some_tokens()
    loss, gradient = jitted[through](params, tokens)
    assert 2 < loss < 8
    leaves, tree = jax.tree.flatten(params)
    rng, h = np.random.default_rng(1), 0.02
    for i, (name, slope) in enumerate(named(gradient).items()):
        direction = rng.standard_normal(leaves[i].shape).astype(np.float32)
        direction /= np.linalg.norm(direction)

        def at(distance: float, i=i, direction=direction) -> float:
            moved = [*leaves[:i], leaves[i] + distance * direction, *leaves[i + 1 :]]
            return float(value[through](jax.tree.unflatten(tree, moved), tokens))

        found = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        expected = float(np.sum(slope * direction))
        assert abs(found - expected) < 1e-4 + 1e-2 * abs(expected), (name, found, expected)
        assert np.abs(slope).max() > 1e-5, name  # something arrives at every tensor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", LOSSES)
def test_gradients_are_finite_and_padding_gets_none(kind, through):
    params, tokens = params_of(kind), some_tokens()
    _, gradient = jitted[through](params, tokens)
    chex.assert_tree_all_finite(gradient)
    rows = np.asarray(gradient["embed"]["weight"])
    used = np.unique(tokens[tokens != PADDING])
    assert np.all(rows[PADDING] == 0)
    assert np.all(np.any(rows[used] != 0, axis=1))
    # other padding, the same gradient to the bit
    other = np.where(tokens == PADDING, int(used[0]), tokens)
    chex.assert_trees_all_equal(jitted[through](params, other)[1], gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_are_one_forward(kind):
    """The loss and, as the cache is part of the graph, the whole gradient too."""
    params, tokens = params_of(kind), some_tokens()
    losses, gradients = zip(*(jitted[name](params, tokens) for name in LOSSES), strict=True)
    np.testing.assert_allclose(*losses, rtol=1e-6)
    chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_cache_that_is_a_constant_cuts_the_gradient():
    """Truncated backpropagation: the loss is that of the whole, the gradient that of the last step."""
    params, tokens = params_of("hybrid"), jnp.asarray(some_tokens())
    weights = weights_of(REAL)

    def last_loss(params: jh.Params, cut: bool) -> Array:
        cache = jh.create_cache(params.hparams, 16, ROWS, cell_multiple=16)
        _, cache = jh.step(params, cache, everything(tokens[0]))
        if cut:
            cache = jax.lax.stop_gradient(cache)
        out, _ = jh.step(params, cache, everything(tokens[1], jnp.asarray(REAL)))
        return cross_entropy(out.logits.reshape(ROWS, TOKENS, -1), tokens[1], weights)

    grad = jax.jit(jax.value_and_grad(last_loss), static_argnums=1)
    (whole, through), (part, cut) = grad(params, False), grad(params, True)
    np.testing.assert_allclose(whole, part, rtol=1e-6)
    only_before = np.setdiff1d(np.asarray(tokens[0]), np.asarray(tokens[1]))
    assert np.all(np.asarray(cut["embed"]["weight"])[only_before] == 0)
    assert np.any(np.asarray(through["embed"]["weight"])[only_before] != 0)


@pytest.mark.parametrize("through", LOSSES)
def test_checkpoint_gives_the_same_gradient(through):
    params, tokens = params_of("hybrid"), some_tokens()
    remade = jax.jit(jax.value_and_grad(jax.checkpoint(LOSSES[through])))(params, tokens)
    chex.assert_trees_all_close(remade, jitted[through](params, tokens), rtol=1e-5, atol=1e-6)


@partial(jax.jit, static_argnames="together")
def three_steps(params: jh.Params, caches: jh.Cache, ubatches: jh.Ubatch, together: bool) -> Any:
    """`step` over the leading axis of caches and ubatches, by vmap or in a loop."""
    if together:
        return jax.vmap(jh.step, in_axes=(None, 0, 0))(params, caches, ubatches)
    parts = [jh.step(params, *jax.tree.map(lambda a, i=i: a[i], (caches, ubatches))) for i in range(3)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


@pytest.mark.parametrize("kind", ["hybrid", "experts"])
def test_vmap_over_caches_equals_a_loop(kind):
    params = params_of(kind)
    tokens = jnp.stack([jnp.asarray(some_tokens(seed)[1]) for seed in range(3)])
    lengths = jnp.asarray([REAL, (1, 2, 3), (0, 0, 5)], jnp.int32)
    ubatches = jax.vmap(everything)(tokens, lengths)
    empty = jh.create_cache(params.hparams, 16, ROWS, cell_multiple=16)
    caches = jax.tree.map(lambda a: jnp.stack([a] * 3), empty)
    # from empty caches, and from three that hold different things
    for _ in range(2):
        out, after = three_steps(params, caches, ubatches, together=True)
        looped, looped_after = three_steps(params, caches, ubatches, together=False)
        real = (jnp.arange(TOKENS) < lengths[:, :, None]).reshape(3, -1, 1)
        chex.assert_trees_all_equal(out.status, looped.status)
        np.testing.assert_allclose(out.logits * real, looped.logits * real, rtol=1e-5, atol=1e-5)
        chex.assert_trees_all_close(after, looped_after, rtol=1e-5, atol=1e-5)
        caches = after


def test_jit_equals_eager():
    params, tokens = params_of("hybrid"), some_tokens()
    logits, status = jax.jit(two_step_logits)(params, tokens)
    eager, eager_status = two_step_logits(params, jnp.asarray(tokens))
    real = np.stack([weights_of([TOKENS] * ROWS), weights_of(REAL)])[..., None]
    np.testing.assert_allclose(logits * real, eager * real, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(status, eager_status)
    assert not np.any(status)
