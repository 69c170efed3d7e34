"""Quantized weights: what their products may be off by, and that they are saved and loaded bit for bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid.families import hparams_from_config
from jaxhybrid.hparams import MoeHparams
from jaxhybrid.model import init_params
from jaxhybrid.ops import moe
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.quantized import FORMATS, QuantizedMatrix, quantize_array, quantized_product
from jaxhybrid.params import flatten, initialise

CONFIG = tiny.CONFIG | {
    "hidden_size": 64,
    "shared_intermediate_size": 100,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
}
"""Wide enough that every format occurs; 100 inputs are no blocks of 32, so int8 takes their place."""


KEPT = {"conv", "conv_bias", "a_log", "dt_bias", "d", "norm", "mlp_norm", "weight"}
MATRICES = {"weight", "in_proj", "out", "q", "k", "v", "gate_up", "down"}
"""`weight` is the embedding, and the last norm's."""


def split(params):
    """({path: quantized}, {path: array})"""
    flat = flatten(params.tensors)
    quantized = {path: leaf for path, leaf in flat.items() if isinstance(leaf, QuantizedMatrix)}
    return quantized, {path: leaf for path, leaf in flat.items() if path not in quantized}


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def params():
    hp = hparams_from_config(CONFIG)
    return init_params(hp, jax.random.key(3))


def prefill_and_steps(params, rows):
    """Logits [T, V] of row 0, token by token, with `rows` rows in each step."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 259, (3, 6)), jnp.int32)[:rows]
    cache = jh.create_cache(params.hparams, 8, rows)
    logits = []
    for t in range(6):
        output, cache = jax.jit(jh.step)(params, cache, jh.make_ubatch(tokens[:, t : t + 1]))
        logits.append(output.logits[0])
    return tokens, jnp.stack(logits)


@pytest.mark.parametrize("form", FORMATS)
def test_product_is_within_the_bound_of_its_format(form):
    x, w = random(5, 128), random(1100, 128, seed=1)  # more rows than a tile, and not a multiple
    q = quantize_array(w, form, jnp.float32)
    scales = np.repeat(np.abs(np.asarray(q.scales)), 128 // q.scales.shape[-1], axis=1)
    # int4: 8 does not exist, so the opposite of the largest weight is off by a whole scale
    weight_error = np.abs(np.asarray(x)) @ scales.T * (1 if form == "int4" else 0.5)
    step = np.max(np.abs(np.asarray(x)), axis=1, keepdims=True) / 127
    row_error = step / 2 * np.abs(np.asarray(q.dequantize())).sum(1) if form == "int8" else 0
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.abs(np.asarray(linear(x, q)) - exact)
    assert np.all(error <= weight_error + row_error + 1e-4)  # 1e-4: float32 sums of 128 products
    assert error.max() > 1e-3  # it is quantized


@pytest.mark.parametrize("form", FORMATS)
def test_a_lone_row_is_as_one_of_many_and_bfloat16_rows_work(form):
    x, q = random(9, 64), quantize_array(random(40, 64, seed=1), form, jnp.float32)
    many = linear(x, q)
    for i in (0, 8):  # the order of 64 float32 products, or of an integer and its scales
        np.testing.assert_allclose(linear(x[i], q), many[i], atol=1e-5, rtol=1e-6)
    half = linear(x.astype(jnp.bfloat16), q)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half, many, atol=0.02 * float(jnp.abs(many).max()))  # 8 bits of x, and of y


def test_int4_packing_is_exact_and_leading_axes_can_be_reshaped():
    integers = np.random.default_rng(0).integers(-8, 8, (2, 6, 128)).astype(np.float32)
    integers[..., 5::32] = -8  # so that every scale is 1 (or -1)
    q = quantize_array(jnp.asarray(integers), "int4", jnp.float32)
    assert q.values.shape == (2, 6, 64) and q.values.dtype == jnp.uint8 and q.shape == (2, 6, 128)
    np.testing.assert_array_equal(q.dequantize(), integers)
    np.testing.assert_array_equal(q.reshape(12, -1).dequantize(), integers.reshape(12, 128))
    np.testing.assert_array_equal(q[jnp.asarray([1, 0, 1])].dequantize(), integers[[1, 0, 1]])
    with pytest.raises(ValueError, match="keeps its last axis"):
        q.reshape(6, 256)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_moe_forms_agree(form):
    hp = MoeHparams(n_experts=4, top_k=2, d_ff=64)
    spec = moe.moe_spec(hp, 64)
    p = initialise(spec, jax.random.key(0), jnp.dtype(jnp.float32))
    real = {name: quantize_array(p[name], form, jnp.float32) for name in ("gate_up", "down")}
    tokens = random(5, 64)
    experts, _ = moe.route(p, tokens, hp)
    by_form = [
        f(real, tokens, experts, hp) for f in (moe.gathered_experts, moe.sorted_experts, moe.every_expert)
    ]
    exact = moe.gathered_experts({n: w.dequantize() for n, w in real.items()}, tokens, experts, hp)
    for y in by_form[:2]:
        np.testing.assert_allclose(y, exact, atol=1e-5)  # the same float32 products in another order
    # int8 rounds rows twice, each to 1/254 of their largest element, about 3 standard deviations
    tolerance = 0.05 if form == "int8" else 1e-5
    np.testing.assert_allclose(by_form[2], exact, atol=tolerance * float(jnp.abs(exact).max()))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_steps_equal_forward_alone_and_in_a_batch(params, form):
    quantized = jh.quantize(params, form)
    tokens, alone = prefill_and_steps(quantized, 1)
    _, beside = prefill_and_steps(quantized, 3)
    whole = jh.forward(quantized, tokens)[0]
    # float32 sums in another order; with int8 such a difference can move a row's element to the next integer
    tolerance = 2e-2 if form == "int8" else 2e-5
    size = float(jnp.abs(whole).max())
    np.testing.assert_allclose(alone, whole, atol=tolerance * size)
    np.testing.assert_allclose(beside, alone, atol=tolerance * size)


@pytest.mark.parametrize("form", FORMATS)
def test_saved_and_loaded_bit_for_bit(params, form, tmp_path):
    quantized = jh.quantize(params, form)
    kinds = {str(leaf.values.dtype) for leaf in split(quantized)[0].values()}
    assert kinds == ({"uint8", "int8"} if form == "int4" else {"int8"})
    jh.save_params(quantized, tmp_path / "q", CONFIG)
    again = jh.load_params(tmp_path / "q")
    assert again.hparams == params.hparams and again.dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, again.tensors, quantized.tensors)
    jh.save_params(params, tmp_path / "f", CONFIG)
    jax.tree.map(np.testing.assert_array_equal, jh.load_params(tmp_path / "f", quantize=form), quantized)
    found = jh.inspect(tmp_path / "q")
    assert not found.errors and found.quantization == form and not found.mapping.unexpected


def test_files_that_do_not_belong_together_are_refused(params, tmp_path):
    folder = tmp_path / "q"
    jh.save_params(jh.quantize(params, "int8"), folder, CONFIG)
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(jh.CheckpointError, match="int8 already"):
        jh.load_params(folder, quantize="int4")
    for entry, message in (
        (None, "are quantized, config.json says otherwise"),
        ({"format": "int4", "dtype": "float32"}, "says int4, the weights are int8"),
        ({"format": "int3", "dtype": "float32"}, "format none of"),
        ("int8", "format none of"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"jaxhybrid_quantization": entry}))
        with pytest.raises(jh.CheckpointError, match=message):
            jh.load_params(folder)
    from safetensors.numpy import load_file, save_file

    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    scales = next(name for name in tensors if name.endswith("in_proj.weight.scales"))
    for change, message in (
        ({}, "scales.* is missing"),
        ({scales: tensors[scales][:-1]}, "has shape"),
        ({scales: tensors[scales].astype(np.float16)}, "has dtype F16"),
    ):
        save_file({n: t for n, t in tensors.items() if n != scales} | change, folder / "model.safetensors")
        with pytest.raises(jh.CheckpointError, match=message):
            jh.load_params(folder)
        assert jh.inspect(folder).errors


def test_gradients_pass_through(params):
    x, q = random(3, 64), quantize_array(random(40, 64, seed=1), "int8", jnp.float32)
    pulled = jax.grad(lambda x: jnp.sum(jnp.sin(quantized_product(x, q))))(x)
    expected = jnp.cos(quantized_product(x, q)) @ q.dequantize()
    np.testing.assert_allclose(pulled, expected, rtol=1e-5, atol=1e-5)
    quantized = jh.quantize(params, "int8")
    tokens = jnp.arange(5, dtype=jnp.int32)[None]

    def loss(norm, params):
        return jnp.mean(jh.forward(params.replace(tensors=params.tensors | {"norm": norm}), tokens) ** 2)

    slope = jax.grad(loss)(quantized["norm"], quantized)["weight"]
    exact = jax.grad(loss)(params["norm"], params)["weight"]
    assert float(jnp.linalg.norm(slope - exact)) < 0.1 * float(jnp.linalg.norm(exact))


def test_what_stays_and_what_is_refused(params):
    quantized = jh.quantize(params, "int8")
    matrices, kept = split(quantized)
    assert {path.rsplit(".", 1)[-1] for path in kept} == KEPT
    assert {path.rsplit(".", 1)[-1] for path in matrices} == MATRICES
    with pytest.raises(jh.errors.UsageError, match="int8 already"):
        jh.quantize(quantized, "int8")
    with pytest.raises(jh.errors.UsageError, match="not one of"):
        jh.quantize(params, "int3")
