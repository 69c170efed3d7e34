"""Models of a few thousand parameters, one for each kind of memory, with random weights."""

from functools import cache

import jax
import jax.numpy as jnp

from jaxhybrid.hparams import AttentionHparams, Hparams, Mamba2Hparams, MlpHparams, RopeHparams
from jaxhybrid.model import init_params
from jaxhybrid.params import Params

VOCAB, D_MODEL = 50, 16
ATTENTION = AttentionHparams(n_heads=4, n_kv_heads=2, head_dim=4, scale=0.5, rope=RopeHparams(dim=4))
MAMBA2 = Mamba2Hparams(n_heads=4, head_dim=8, state_size=6, n_groups=2, conv_kernel=4, chunk=4)
KINDS = {"attention": (0, 1), "recurrent": (), "hybrid": (1,)}
"""Attention layers of each two-layer model."""


def hparams(kind: str) -> Hparams:
    """kind: attention, recurrent or hybrid."""
    return Hparams(
        family="llama",
        n_layers=2,
        d_model=D_MODEL,
        vocab_size=VOCAB,
        attention_layer_indices=KINDS[kind],
        attention=ATTENTION,
        recurrent=MAMBA2,
        mlp=MlpHparams(24),
        tie_embeddings=True,
    )


@cache
def params(kind: str) -> Params:
    """Every tensor random, so that none is left at a value that hides a mistake."""
    made = init_params(hparams(kind), jax.random.key(7))
    leaves, tree = jax.tree.flatten(made)
    noise = jax.random.split(jax.random.key(8), len(leaves))
    leaves = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, noise, strict=True)
    ]
    return jax.tree.unflatten(tree, [leaf.astype(jnp.float32) for leaf in leaves])
