"""LoRA beside and inside the weights, and folders that PEFT wrote and reads."""

import json
import math
import runpy
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import jaxhybrid as jh
from jaxhybrid.adapters import CONFIG, TENSORS, add_lora, modules
from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.generate import main
from jaxhybrid.ops.adapted import AdaptedMatrix
from jaxhybrid.params import flatten

HERE = Path(__file__).parent
ADAPTERS = sorted(p.name for p in (HERE / "adapters").iterdir())
TOLERANCE = 1e-4  # of logits, whose spread is 1 to 2; float32 here and in torch
forward = jax.jit(jh.forward)
load = cache(jh.load_params)


def golden(name):
    return load(HERE / "golden" / name)


def tokens(name):
    with np.load(HERE / "golden" / name / "ref.npz") as reference:
        return jnp.asarray(reference["input_ids"][:, :9], jnp.int32)


def noisy(lora, seed=0):
    """With a b that is not zero."""
    leaves, tree = jax.tree.flatten(lora)
    random = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [jnp.asarray(0.2 * random.normal(size=x.shape), x.dtype) for x in leaves])


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_peft_wrote_gives_its_logits(name):
    folder, params = HERE / "adapters" / name, golden(name)
    lora = jh.load_adapter(folder, params)
    with np.load(folder / "ref.npz") as reference:
        ids, wanted = jnp.asarray(reference["input_ids"], jnp.int32), reference["logits"]
    assert len(set(dict(lora.scales).values())) > (1 if name == "granitemoehybrid" else 0)
    assert np.abs(wanted - forward(params, ids)).max() > 1
    for adapted in (jh.apply_lora(params, lora), jh.merge_lora(params, lora)):
        np.testing.assert_allclose(forward(adapted, ids), wanted, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_next"])
def test_beside_and_inside_are_the_same(name):
    """Reordered rows, and several modules in one parameter of which not all are adapted."""
    params, ids = golden(name), tokens(name)
    lora = jh.init_lora(params, jax.random.key(0), rank=3, alpha=5.0)
    assert all(len(f.a) == 3 for f in lora.factors.values())
    np.testing.assert_array_equal(forward(jh.apply_lora(params, lora), ids), forward(params, ids))
    some = noisy(lora)
    odd = sorted(some.factors)[::2]
    some = some.replace(factors={n: some.factors[n] for n in odd})
    inside = forward(jh.merge_lora(params, some), ids)
    assert np.abs(inside - forward(params, ids)).max() > 0.5
    np.testing.assert_allclose(forward(jh.apply_lora(params, some), ids), inside, atol=TOLERANCE)


def test_a_saved_adapter_is_the_same(tmp_path):
    params = golden("granitemoehybrid")
    lora = noisy(jh.load_adapter(HERE / "adapters" / "granitemoehybrid", params))
    jh.save_adapter(tmp_path / "mine", lora, base="a/model")
    again = jh.load_adapter(tmp_path / "mine", params)
    assert dict(again.scales) == pytest.approx(dict(lora.scales))
    jax.tree.map(np.testing.assert_array_equal, again.factors, lora.factors)
    theirs = load_file(HERE / "adapters" / "granitemoehybrid" / TENSORS)
    mine = load_file(tmp_path / "mine" / TENSORS)
    assert {k: a.shape for k, a in mine.items()} == {k: a.shape for k, a in theirs.items()}
    config = json.loads((tmp_path / "mine" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == "a/model" and len(config["target_modules"]) == len(mine) // 2
    with pytest.raises(CheckpointError, match="exists already"):
        jh.save_adapter(tmp_path / "mine", lora)
    jh.save_adapter(tmp_path / "mine", noisy(lora, 1), force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"mine"}
    (tmp_path / "home").mkdir()
    with pytest.raises(CheckpointError, match="holds no adapter"):
        jh.save_adapter(tmp_path / "home", lora, force=True)


def test_targets():
    params = golden("granitemoehybrid")
    key = jax.random.key(0)
    some = jh.init_lora(params, key, targets=("q_proj", "mamba.in_proj"))
    assert {n.rsplit(".", 1)[1] for n in some.factors} == {"q_proj", "in_proj"}
    every = jh.init_lora(params, key)
    assert some.factors.keys() < every.factors.keys() < modules(params.hparams).keys()
    assert not any("router" in name or "block_sparse" in name for name in every.factors)
    for family, left_out in (("qwen3_next", "mlp.gate_proj"), ("lara_mini", "linear_attn.in_proj")):
        assert any(name.endswith(left_out) for name in modules(golden(family).hparams))
        assert not any(name.endswith(left_out) for name in jh.init_lora(golden(family), key).factors)
    # PEFT refuses to adapt what kernels read past its module
    assert {n.rsplit(".", 1)[1] for n in jh.init_lora(golden("mamba2"), key).factors} == {"in_proj"}
    for bad, words in (
        ({"targets": "nothing"}, "no module is called 'nothing'; there are"),
        ({"targets": "proj"}, "no module is called 'proj'"),
        ({"targets": ()}, "no module is called ''; there are"),
        ({"rank": 0}, "rank: 0 must be at least 1"),
        ({"alpha": math.nan}, "alpha: nan must be"),
    ):
        with pytest.raises(UsageError, match=words):
            jh.init_lora(params, key, **bad)


def test_only_the_adapter_is_trained_also_beside_quantized_weights(tmp_path):
    wide = tiny.CONFIG | {"hidden_size": 64, "mamba_n_heads": 16, "shared_intermediate_size": 96}
    params = jh.load_params(tiny.write_folder(tmp_path / "m", wide))
    ids = jnp.asarray(np.random.default_rng(0).integers(3, 250, (2, 8)), jnp.int32)
    lora = noisy(jh.init_lora(params, jax.random.key(0), rank=2, alpha=2.0))

    def loss(lora, params):
        return jnp.mean(jh.forward(jh.apply_lora(params, lora), ids) ** 2)

    gradients = {}
    for form in (None, "int8_block"):
        base = params if form is None else jh.quantize(params, form)
        gradients[form] = jax.jit(jax.grad(loss))(lora, base)
        assert jax.tree.structure(gradients[form]) == jax.tree.structure(lora)
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients[form]))
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(a).max(), *gradients.values())
    assert 0 < max(jax.tree.leaves(difference)) < 0.5  # integers are not the weights
    # as the gradient of merged weights says
    other = jax.jit(jax.grad(lambda lora: jnp.mean(jh.forward(jh.merge_lora(params, lora), ids) ** 2)))(lora)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), gradients[None], other)
    with pytest.raises(UsageError, match="is quantized, so nothing can be added"):
        jh.merge_lora(base, lora)
    adapted = add_lora(base, lora)
    assert sum(isinstance(leaf, AdaptedMatrix) for leaf in flatten(adapted.tensors).values()) > 5
    assert not any(isinstance(x, AdaptedMatrix) for x in flatten(add_lora(params, lora).tensors).values())
    for refused in (
        lambda: jh.quantize(adapted, "int8"),
        lambda: jh.save_params(adapted, tmp_path / "no", wide),
    ):
        with pytest.raises(UsageError, match="carry an adapter; merge it first"):
            refused()
    assert not (tmp_path / "no").exists()


def damaged(tmp_path, change_config=None, change_tensors=None):
    folder = shutil.copytree(HERE / "adapters" / "llama", tmp_path / "bad", dirs_exist_ok=True)
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / TENSORS)
    config |= change_config or {}
    tensors = tensors if change_tensors is None else change_tensors(tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / TENSORS)
    return folder


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
SECOND = FIRST.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"use_dora": True}, None, ["use_dora is 'True'", "only plain LoRA"]),
        ({"use_what_comes_next": True}, None, ["use_what_comes_next is 'True'"]),
        ({"bias": "all"}, None, ["bias is 'all'"]),
        ({"modules_to_save": ["lm_head"]}, None, ["modules_to_save"]),
        ({"peft_type": "IA3"}, None, ["peft_type is 'IA3'"]),
        ({"lora_alpha": "much"}, None, ["lora_alpha or alpha_pattern"]),
        ({"lora_alpha": None}, None, ["lora_alpha or alpha_pattern", "0.mlp.down_proj"]),
        ({"lora_alpha": math.inf}, None, ["lora_alpha or alpha_pattern"]),
        ({"lora_alpha": 10**400}, None, ["lora_alpha or alpha_pattern"]),
        ({"alpha_pattern": {"(": 1}}, None, ["lora_alpha or alpha_pattern"]),
        ({}, lambda t: {}, ["holds no tensors"]),
        ({}, lambda t: t | {"x": t[FIRST]}, ["'x' is no part of a plain LoRA"]),
        ({}, lambda t: {k: t[k] for k in t if k != FIRST}, ["0.mlp.down_proj", "lora_A and lora_B"]),
        ({}, lambda t: t | {FIRST: t[FIRST][:, :5].copy()}, ["shape (2, 5)", "maps 56 to 32"]),
        ({}, lambda t: t | {FIRST: t[FIRST].astype(np.int32)}, ["dtype I32"]),
        ({}, lambda t: t | {FIRST: t[FIRST] * np.nan}, ["lora_A", "not finite"]),
        ({}, lambda t: t | {FIRST: t[FIRST][:0], SECOND: t[SECOND][:, :0].copy()}, ["of one rank"]),
        ({}, lambda t: t | {FIRST.replace("mlp", "moe"): t[FIRST]}, ["this model (llama) has not"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_adapters_that_do_not_fit(tmp_path, config, tensors, words):
    with pytest.raises(CheckpointError) as error:
        jh.load_adapter(damaged(tmp_path, config, tensors), golden("llama"))
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_module_under_two_names_is_refused(tmp_path):
    params = golden("qwen3_next")
    jh.save_adapter(tmp_path / "a", jh.init_lora(params, jax.random.key(0), targets="o_proj"))
    tensors = load_file(tmp_path / "a" / TENSORS)
    name = next(iter(tensors))
    again = name.replace("model.model.", "model.model.language_model.")
    save_file(tensors | {again: tensors[name]}, tmp_path / "a" / TENSORS)
    with pytest.raises(CheckpointError, match="under another spelling"):
        jh.load_adapter(tmp_path / "a", params)


def test_folders_that_are_no_adapters(tmp_path):
    params = golden("llama")
    with pytest.raises(CheckpointError, match="an adapter without modules"):
        jh.save_adapter(tmp_path / "none", jh.Lora({}, ()))
    with pytest.raises(CheckpointError, match="has no adapter_config.json"):
        jh.load_adapter(tmp_path, params)
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(CheckpointError, match="has no adapter_model.safetensors"):
        jh.load_adapter(tmp_path, params)
    with pytest.raises(UsageError, match="for another model"):
        jh.apply_lora(golden("mamba2"), jh.load_adapter(HERE / "adapters" / "llama", params))


def test_an_example_run_is_an_adapter_for_the_command(tmp_path, capsys):
    """examples/lora.py learns a text by heart, and what it saved says it."""
    model = tiny.write_folder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 60)
    example = runpy.run_path(str(HERE.parent / "examples" / "lora.py"))
    options = ["--model", str(model), "--text", str(text), "--steps", "25", "--batch", "2", "--length", "24"]
    options += ["--rank", "4", "--learning-rate", "0.05", "--plot", str(tmp_path / "loss.png")]
    losses = example["main"]([*options, "--out", str(tmp_path / "adapter")])
    assert np.mean(losses[-5:]) < 0.5 * losses[0] and len(losses) == 25
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    command = ["--model", str(model), "--prompt", "abcd", "--max-tokens", "4", "--quiet"]
    capsys.readouterr()
    assert main(command) == 0
    before = capsys.readouterr().out
    assert main([*command, "--adapter", str(tmp_path / "adapter")]) == 0
    assert capsys.readouterr().out == "efgh\n" != before
    assert main([*command, "--adapter", str(HERE / "adapters" / "llama")]) == 1
    assert "use it with its own model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example["main"]([*options, "--out", str(tmp_path / "adapter")])
