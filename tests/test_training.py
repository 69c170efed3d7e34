"""Every family trains from scratch: `init_params`, then gradient steps through `forward`."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.families import FAMILIES, hparams_from_config
from jaxhybrid.files.config import read_config
from jaxhybrid.params import flatten

GOLDEN = Path(__file__).parent / "golden"
NAMES = {family.hparams.__module__: name for name, family in sorted(FAMILIES.items())}.values()
"""One family of each file; JAXHYBRID_NIGHTLY takes all."""
if os.environ.get("JAXHYBRID_NIGHTLY"):
    NAMES = FAMILIES


@jax.jit
def update(params: jh.Params, tokens: jax.Array) -> tuple[jh.Params, jax.Array, jh.Params]:
    """One step of gradient descent: the new parameters, the loss before, and the gradient."""

    def loss(params: jh.Params) -> jax.Array:
        scores = jax.nn.log_softmax(jh.forward(params, tokens[:, :-1]))
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), value, gradient


@pytest.mark.parametrize("name", NAMES)
def test_a_family_trains_from_scratch(name):
    hp = hparams_from_config(read_config(GOLDEN / name))
    params = jh.init_params(hp, jax.random.key(0, impl="rbg"))  # this generator compiles quickly
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, hp.vocab_size, (2, 8)), jnp.int32)
    params, first, gradient = update(params, tokens)
    _, second, _ = update(params, tokens)
    assert second < first - 0.01
    for path, leaf in flatten(gradient.tensors).items():
        assert np.isfinite(leaf).all(), path
        # which experts a token goes to has no slope
        assert path.endswith(".selection_bias") != bool(np.any(leaf)), path
