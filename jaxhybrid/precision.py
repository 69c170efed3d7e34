"""How exactly products are computed."""

import jax.numpy as jnp
from jax import lax


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """float32 means float32 on every platform: TPUs would otherwise multiply in bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
