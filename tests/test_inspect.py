"""What `inspect` says of whole and of broken checkpoints."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxhybrid as jh
from jaxhybrid.inspection import cache_bytes, count_parameters

command = importlib.import_module("jaxhybrid.inspect")
GOLDEN = Path(__file__).parent / "golden"
MODELS = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())


def changed(folder, target, change):
    """A copy of a model's folder whose tensors went through `change`."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    tensors = dict(load_file(file))
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return target


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_loaded_model(name):
    found = jh.inspect(GOLDEN / name)
    assert found.errors == ()
    assert found.mapping is not None and found.mapping.unexpected == ()
    params = jh.load_params(GOLDEN / name)
    assert sum(found.parameters.values()) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 0 < found.active <= sum(found.parameters.values())
    assert len([line for line in found.lines() if line]) > 8


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_a_cache(name):
    found = jh.inspect(GOLDEN / name)
    hp = found.hparams
    one, two = (jh.create_cache(hp, 64, n, cell_multiple=1, n_ubatch=1) for n in (1, 2))
    sizes = jh.state_bytes(two)
    states = sum(sizes.get("recurrent", {}).values()) - sum(jh.state_bytes(one).get("recurrent", {}).values())
    assert found.cache.state == states
    cells = sizes.get("attention", {})
    full = sum(n for i, n in cells.items() if not hp.is_windowed_layer(i))
    assert found.cache.per_token * 64 * 2 == full
    if hp.window is not None:
        windowed = sum(n for i, n in cells.items() if hp.is_windowed_layer(i))
        assert found.cache.windowed * 2 * (hp.window + 1) == windowed * hp.window


def test_half_as_many_bytes_in_bfloat16():
    hp = jh.load().params.hparams
    assert cache_bytes(hp, "bfloat16").per_token * 2 == cache_bytes(hp).per_token
    assert cache_bytes(hp, "bfloat16").state < cache_bytes(hp).state


def test_a_token_meets_the_chosen_experts_only():
    hp = jh.inspect(GOLDEN / "granitemoehybrid").hparams
    parts, active = count_parameters(hp)
    moe = hp.layers[0].moe
    assert active == sum(parts.values()) - parts["experts"] * (moe.n_experts - moe.top_k) // moe.n_experts


def test_everything_wrong_is_listed(folder, tmp_path):
    def spoil(tensors):
        del tensors["model.layers.0.mamba.D"], tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.norm.weight"] = np.zeros(5, np.float32)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.int32)
        tensors["something.else"] = np.zeros(2, np.float32)

    broken = changed(folder, tmp_path / "broken", spoil)
    found = jh.inspect(broken)
    assert found.mapping is not None
    assert [e.split()[1] for e in found.mapping.missing] == [
        "model.layers.0.mamba.D",
        "model.layers.1.self_attn.k_proj.weight",
    ]
    (misshaped,) = found.mapping.misshaped
    assert "model.norm.weight has shape (5,), config.json asks for (16,)" in misshaped
    (unreadable,) = found.mapping.unreadable
    assert "model.embed_tokens.weight has dtype I32" in unreadable
    assert found.mapping.unexpected == ("something.else",)
    with pytest.raises(jh.CheckpointError, match="4 errors\n") as error:
        found.raise_for_errors()
    assert len(str(error.value).splitlines()) == 5
    with pytest.raises(jh.CheckpointError, match=r"and 3 more; python -m jaxhybrid.inspect lists all"):
        jh.load_params(broken)


def test_the_command(folder, tmp_path, capsys):
    assert command.main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "mamba-2 (4 heads of 8, state 8), mlp of 24" in out and err == ""
    assert command.main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["attention_layer_indices"] == [1] and found["errors"] == []
    broken = changed(folder, tmp_path / "broken", lambda tensors: tensors.pop("model.layers.0.mamba.D"))
    assert command.main([str(broken)]) == 1
    out, err = capsys.readouterr()
    assert "mamba-2" in out and err.startswith(
        "error: tensor model.layers.0.mamba.D of shape (4,) is missing"
    )
    (broken / "model.safetensors").unlink()
    assert command.main([str(broken)]) == 1
    assert "no .safetensors files" in capsys.readouterr().err
    assert command.main([str(tmp_path / "nowhere")]) == 1


def test_as_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "jaxhybrid.inspect"], capture_output=True, text=True, check=True
    )
    assert "family      granitemoehybrid" in done.stdout and done.stderr == ""
