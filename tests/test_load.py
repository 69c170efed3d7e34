"""Hugging Face folders in every form they come in, and folders that do not fit."""

import json
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import jaxhybrid as jh
from jaxhybrid.errors import CheckpointError, HparamsError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.model import init_params
from jaxhybrid.params import flatten

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(tmp_path):
    return tiny.write_folder(tmp_path)


def rewrite(folder, change):
    """Apply `change` to the dict of stored tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def equal(a, b):
    a, b = flatten(a.tensors), flatten(b.tensors)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


def test_saving_and_loading_returns_the_same_bits(folder, tmp_path):
    params = jh.load_params(folder)
    equal(params, init_params(hparams_from_config(tiny.CONFIG), jax.random.key(5)))
    jh.save_params(params, tmp_path / "again", tiny.CONFIG)
    equal(params, jh.load_params(tmp_path / "again"))
    names = {p.name for p in (tmp_path / "again").iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_shards_give_the_same_as_one_file(folder):
    whole = jh.load_params(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({n: tensors[n] for n in some}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, some in parts.items() for n in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    equal(jh.load_params(folder), whole)


@pytest.mark.parametrize(
    ("stored", "weights"),
    [(np.float16, jnp.bfloat16), (ml_dtypes.bfloat16, jnp.bfloat16), (np.float32, jnp.float32)],
)
def test_dtypes_of_files(folder, stored, weights):
    exact = jh.load_params(folder)
    rewrite(folder, lambda t: t.update({n: a.astype(stored) for n, a in t.items()}))
    kept = jh.load_params(folder)
    assert kept.dtype == weights
    assert kept["norm"]["weight"].dtype == jnp.float32  # norms stay float32 always
    wide = jh.load_params(folder, jnp.float32)
    for name, leaf in flatten(wide.tensors).items():
        assert leaf.dtype == jnp.float32
        rounded = np.asarray(flatten(exact.tensors)[name]).astype(stored).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(leaf), rounded)


def test_both_spellings_of_infinity(folder):
    hp = jh.load_params(folder).hparams
    for limit in ('{"__float__": "Infinity"}', "Infinity"):
        text = json.dumps(tiny.CONFIG)[:-1] + f', "time_step_limit": [0.0, {limit}]}}'
        (folder / "config.json").write_text(text)
        assert jh.load_params(folder).hparams == hp


def test_a_tied_head_may_be_stored_or_not(folder):
    tied = jh.load_params(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal(jh.load_params(folder), tied)
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | {"tie_word_embeddings": False}))
    untied = jh.load_params(folder)
    np.testing.assert_array_equal(untied["head"]["weight"], tied["embed"]["weight"])


def test_progress_ends_at_the_total(folder):
    seen = []
    jh.load_params(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def refused(folder, *words, error=CheckpointError):
    with pytest.raises(error) as caught:
        jh.load_params(folder)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_a_missing_tensor_is_named_with_its_shape(folder):
    rewrite(folder, lambda t: t.pop("model.layers.0.mamba.D"))
    refused(folder, "model.layers.0.mamba.D", "shape (4,)", "is missing")


def test_a_wrong_shape_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(15, np.float32)}))
    refused(folder, "model.norm.weight", "(15,)", "(16,)", "model.safetensors")


def test_a_wrong_dtype_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(16, np.int32)}))
    refused(folder, "model.norm.weight", "I32", "only F32")


def test_unused_tensors_warn(folder):
    rewrite(folder, lambda t: t.update({"model.extra": np.ones(1, np.float32)}))
    with pytest.warns(UserWarning, match="model.extra not used"):
        jh.load_params(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_warn(folder, value):
    def spoil(tensors):
        tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = value

    rewrite(folder, spoil)
    with pytest.warns(UserWarning, match="self_attn.q_proj.weight holds NaN or infinity"):
        jh.load_params(folder)


def test_a_configuration_of_another_model(folder):
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | {"hidden_size": 32}))
    refused(folder, "mamba_n_heads", "mamba_expand * hidden_size", error=HparamsError)
    (folder / "config.json").write_text('{"model_type": "elephant"}')
    refused(folder, "elephant", "granitemoehybrid", error=HparamsError)


def test_saving_under_a_wrong_configuration_writes_nothing(folder, tmp_path):
    params = jh.load_params(folder)
    with pytest.raises(CheckpointError, match="nothing was written"):
        jh.save_params(params, tmp_path / "new", tiny.CONFIG | {"rms_norm_eps": 0.5})
    assert not (tmp_path / "new").exists()
