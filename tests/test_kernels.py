"""Every kernel against its plain form in Pallas' interpreter, and compiled for the hardware."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.kernels import attention
from jaxhybrid.kernels.sight import Sight
from jaxhybrid.mixers.attention import attend

ON = {"tpu": attention.on_tpu, "cuda": attention.on_cuda}
platforms = pytest.mark.parametrize("on", ON.values(), ids=list(ON))


def problem(
    rows=2, n_tokens=1, heads=(4, 2), sizes=(64, 64), cells=256, room=0, shared=False, dtype="float32"
):
    """q, keys, values and the positions of cells: -1 in holes and behind; row b ends where b says."""
    rng = np.random.default_rng(0)
    streams, total = 1 if shared else rows, cells + room
    q = rng.normal(size=(rows, n_tokens, heads[0], sizes[0]))
    k, v = (rng.normal(size=(streams, heads[1], total, size)) for size in sizes)
    position = np.argsort(rng.random((rows, cells)), axis=1)  # cells are not in order
    position[:, rng.random(cells) < 0.3] = -1
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(position, jnp.int32)


@platforms
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"rows": 3, "heads": (6, 2), "cells": 640},  # no multiple of a block
        {"shared": True, "rows": 3},
        {"n_tokens": 70, "heads": (6, 2), "cells": 128},
        {"n_tokens": 5, "shared": True},
        {"sizes": (128, 64), "room": 128, "heads": (2, 2)},  # a bucket of a larger buffer
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_attention_is_the_plain_one(on, case):
    q, k, v, cells = problem(**case)
    sight = Sight(cells, jnp.arange(len(q), dtype=jnp.int32) * 30 + 20, q.shape[1], 90)
    n = sight.n_cells
    expected = attend(q, k[:, :, :n], v[:, :, :n], sight.mask, 0.2)
    y = on(q, k, v, sight, 0.2, interpret=True)
    # both accumulate in float32; bfloat16 weights are rounded before they are normalised, or after
    tolerance = 2e-2 if q.dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(np.float32(y), np.float32(expected), rtol=0, atol=tolerance)
