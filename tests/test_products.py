"""The CPU kernel for few rows against XLA's products; without a compiler only what replaces it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.kernels import products
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.quantized import quantize_array

needs_kernel = pytest.mark.skipif(not products.registered(), reason="no C++ compiler on this machine")
KINDS = ["float32", "bfloat16", "int8", "int8_block", "int4"]


def arrays(n_rows: int, n_out: int, n_in: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n_rows, n_in), np.float32), rng.standard_normal((n_out, n_in), np.float32)


def operands(kind: str, n_rows: int, n_out: int, n_in: int) -> tuple[list, np.ndarray]:
    """Arguments of the kernel, and the product of the numbers they stand for in float64."""
    x, w = arrays(n_rows, n_out, n_in)
    if kind == "int8":
        a, b = (np.clip(m * 50, -127, 127).astype(np.int8) for m in (x, w))
        return [jnp.asarray(a), jnp.asarray(b)], a.astype(np.float64) @ b.astype(np.float64).T
    if kind in ("float32", "bfloat16"):
        a, b = jnp.asarray(x, kind), jnp.asarray(w, kind)
        return [a, b], np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    matrix = quantize_array(jnp.asarray(w), kind, jnp.float32)
    exact = x.astype(np.float64) @ np.asarray(matrix.dequantize(), np.float64).T
    return [jnp.asarray(x), matrix.values, matrix.scales], exact


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_out, n_in", [(1, 32), (7, 64), (130, 96), (517, 1024)])
def test_every_format_and_number_of_rows(kind: str, n_out: int, n_in: int) -> None:
    for n_rows in (1, 2, 3, 5, 8, 9, 21):
        given, exact = operands(kind, n_rows, n_out, n_in)
        got = np.asarray(jax.jit(products.product)(*given))
        assert got.shape == (n_rows, n_out)
        if kind == "int8":
            assert (got == exact).all()
        else:  # a sum of n_in products of size 1 in float32: the error grows with its square root
            np.testing.assert_allclose(got, exact, atol=2e-6 * n_in**0.5 * 4, rtol=1e-5)


@needs_kernel
def test_leading_axes_broadcast_under_vmap() -> None:
    (x, w), _ = operands("float32", 3, 40, 64)
    rows, weights = jnp.stack([x, 2 * x, 3 * x, -x]), jnp.stack([w, -w, w + 1, 0.5 * w])
    one_weight = jax.vmap(products.product, (0, None))(rows, w)
    one_x = jax.vmap(products.product, (None, 0))(x, weights)
    both = jax.vmap(products.product)(rows, weights)
    crossed = jax.vmap(jax.vmap(products.product, (0, None)), (None, 0))(rows, weights)
    for got, spec in (
        (one_weight, jnp.einsum("brd,od->bro", rows, w)),
        (one_x, jnp.einsum("rd,bod->bro", x, weights)),
        (both, jnp.einsum("brd,bod->bro", rows, weights)),
        (crossed, jnp.einsum("brd,cod->cbro", rows, weights)),
    ):
        np.testing.assert_allclose(got, spec, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_derivatives_are_those_of_the_plain_product(dtype: str) -> None:
    x, w = (jnp.asarray(a, dtype) for a in arrays(4, 96, 128))
    assert products.fits(x, w)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (linear(x, w, dtype=jnp.float32) ** 2).sum()

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.einsum("rd,od->ro", x, w, preferred_element_type=jnp.float32, precision="highest")
        return (y**2).sum()

    tolerance = 1e-4 if dtype == "float32" else 2e-2  # bfloat16 has 8 bits
    for got, wanted in zip(jax.grad(loss, (0, 1))(x, w), jax.grad(plain, (0, 1))(x, w), strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(wanted, np.float32), atol=tolerance * scale
        )


@needs_kernel
def test_not_finite_values_stay_where_they_are() -> None:
    x, w = arrays(2, 64, 64)
    x[1, 3] = np.nan
    y = np.asarray(products.product(jnp.asarray(x), jnp.asarray(w)))
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


@needs_kernel
def test_products_at_once_from_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    given, exact = operands("float32", 4, 4096, 256)
    run = jax.jit(products.product)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: np.asarray(run(*given)), range(64)):
            np.testing.assert_allclose(got, exact, atol=1e-3)


@needs_kernel
def test_what_it_does_not_know_is_one_error() -> None:
    call = jax.ffi.ffi_call("jaxhybrid_products_of_few_rows", jax.ShapeDtypeStruct((2, 8), jnp.float32))
    with pytest.raises(Exception, match="no such rows and weights"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 32)), jnp.ones((8, 32), jnp.float16)))
    with pytest.raises(Exception, match="no such rows and weights"):
        jax.block_until_ready(jax.jit(call)(jnp.ones((2, 31)), jnp.ones((8, 31))))


def test_too_many_rows_odd_widths_and_small_weights_are_left_to_xla() -> None:
    def fits(n_rows: int, n_out: int, n_in: int, dtype: str = "float32") -> bool:
        return products.fits(jnp.ones((n_rows, n_in), dtype), jnp.ones((n_out, n_in), dtype))

    assert fits(4, 256, 256) == products.registered()
    assert not fits(9, 256, 256) and not fits(0, 256, 256) and not fits(4, 256, 250) and not fits(4, 8, 32)
    assert not fits(4, 256, 256, "float16")


@pytest.mark.parametrize(
    "change, warns",
    [({"JAXHYBRID_CPU_KERNEL": "off"}, False), ({"CXX": "no-such"}, False), ({"CXX": "false"}, True)],
)
def test_without_the_kernel_all_works(change: dict[str, str], warns: bool, tmp_path) -> None:
    code = (
        "import jax.numpy as jnp; from jaxhybrid.kernels import products\n"
        "from jaxhybrid.ops.linear import linear\n"
        "assert not products.registered(); print(linear(jnp.ones((2, 64)), jnp.ones((256, 64))).sum())"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | change
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "32768.0", done.stderr
    assert ("the CPU kernel was not built" in done.stderr) == warns
    assert not list(tmp_path.rglob("*.so"))
