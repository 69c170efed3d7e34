"""Products of few rows on this CPU: the kernel of kernels/products.py against XLA's, in GB/s of the weight.

    python scripts/compare_products.py --matrices 24 --out 2048 --in 2048 --rows 1 4 8

A chain of products with different weights, which together fit no cache; the best of 15 runs of each, in
turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxhybrid.kernels import products
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.quantized import FORMATS, Weight, quantize_array


def chain(weights: list[Weight], x: jax.Array, kernel: bool) -> Callable[[], None]:
    """Compiled: every product waits for the one before."""

    def run(x: jax.Array, weights: list[Weight]) -> jax.Array:
        last = jnp.zeros((), x.dtype)
        for weight in weights:
            last = linear(x + last * 1e-20, weight, dtype=jnp.dtype(jnp.float32))[0, 0].astype(x.dtype)
        return last

    jax.clear_caches()  # a product that was traced before would be used again
    with mock.patch.object(products, "fits", products.fits if kernel else lambda *_: False):
        compiled = jax.jit(run).lower(x, weights).compile()
    return lambda: compiled(x, weights).block_until_ready() and None


def main() -> None:
    parser = argparse.ArgumentParser(description="Products of few rows: the CPU kernel against XLA.")
    parser.add_argument("--matrices", type=int, default=24)
    parser.add_argument("--out", type=int, default=2048)
    parser.add_argument("--in", dest="n_in", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    args = parser.parse_args()
    if not products.registered():
        parser.error("there is no kernel: no C++ compiler, or JAXHYBRID_CPU_KERNEL=off")
    rng = np.random.default_rng(0)
    print("| weights | rows | XLA GB/s | kernel GB/s |\n|---|---|---|---|")
    real = [jnp.asarray(rng.standard_normal((args.out, args.n_in), np.float32)) for _ in range(args.matrices)]
    for form in ("float32", "bfloat16", *FORMATS):
        dtype = jnp.bfloat16 if form == "bfloat16" else jnp.float32
        weights: list[Weight] = [
            quantize_array(w, form, jnp.float32) if form in FORMATS else w.astype(dtype) for w in real
        ]
        n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        for n_rows in args.rows:
            x = jnp.asarray(rng.standard_normal((n_rows, args.n_in)), dtype)
            ways = [chain(weights, x, kernel) for kernel in (False, True)]
            best = [float("inf")] * 2
            for _ in range(16):  # the first one warms up
                for i, way in enumerate(ways):
                    began = time.perf_counter()
                    way()
                    best[i] = min(best[i], time.perf_counter() - began)
            print(f"| {form} | {n_rows} | {n_bytes / best[0] / 1e9:.1f} | {n_bytes / best[1] / 1e9:.1f} |")


if __name__ == "__main__":
    main()
