"""Models from one form on disk to another: nothing lost, nothing half written."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from gguf import GGUFReader
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

import jaxhybrid as jh
import jaxhybrid.convert as command
from jaxhybrid.conversion import convert
from jaxhybrid.convert import main
from jaxhybrid.engine import embedded_folder
from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.files import store, writing
from jaxhybrid.files.config import read_config
from jaxhybrid.files.tensors import TensorFiles
from jaxhybrid.ops.quantized import QuantizedMatrix
from jaxhybrid.params import flatten

GOLDEN = Path(__file__).parent / "golden"
WIDE = tiny.CONFIG | {"hidden_size": 64, "mamba_n_heads": 16, "shared_intermediate_size": 96}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("made")
    tiny.write_folder(base / "model")
    tiny.write_folder(base / "wide", WIDE)
    keep = ("A_log", ".D")
    rewrite(base / "wide", lambda name, a: a if name.endswith(keep) else a.astype(jnp.bfloat16))
    return base


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made / "model", tmp_path / "model")


@pytest.fixture
def wide(made, tmp_path):
    """Matrices large enough to be quantized, in bfloat16 but for the decays."""
    return shutil.copytree(made / "wide", tmp_path / "wide")


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file({n: change(n, a) for n, a in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def contents(folder):
    files = TensorFiles(folder)
    return {
        name: (files.dtype(name), files.shape(name), files.read(name).tobytes()) for name in files.names()
    }


def equal(a, b):
    assert a.hparams == b.hparams
    assert jax.tree.structure(a.tensors) == jax.tree.structure(b.tensors)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


MODELS = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())
ROUND = ["granitemoehybrid", "kimi_linear", "qwen3_next", "zamba", "zamba2"]
"""Of those with fused, reordered, shared and listed tensors, which take orbax on their way."""


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_gives_the_same_bytes(tmp_path, name):
    """Also what mixes dtypes inside a parameter: every third tensor is float16."""
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / name, source)
    narrow = sorted(load_file(source / "model.safetensors"))[::3]
    rewrite(source, lambda n, a: a.astype(np.float16) if n in narrow else a)
    last = source
    for step in ("a.orbax", "back") if name in ROUND else ("back",):
        convert(last, tmp_path / step)
        last = tmp_path / step
    assert contents(last) == contents(source)
    assert read_config(last) == read_config(source)


def test_an_orbax_folder_is_a_model(folder, tmp_path, capsys):
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "LICENSE").write_text("free")
    convert(folder, tmp_path / "m", to="orbax")
    model, source = jh.load(tmp_path / "m"), jh.load(folder)
    equal(model.params, source.params)
    assert model.tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == source.tokenizer.encode_chat(
        [{"role": "user", "content": "hi"}]
    )
    copied = {p.name for p in (tmp_path / "m").iterdir()}
    own = {p.name for p in folder.iterdir()} - {"model.safetensors"}
    assert copied == own | {"weights"} and {"LICENSE", "generation_config.json"} <= own
    found = jh.inspect(tmp_path / "m")
    assert not found.errors and found.stored_bytes == jh.inspect(folder).stored_bytes
    equal(jh.load_params(tmp_path / "m", jnp.bfloat16), jh.load_params(folder, jnp.bfloat16))


def test_parameters_are_placed_as_asked(folder, tmp_path):
    convert(folder, tmp_path / "m.orbax")
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    for path in (folder, tmp_path / "m.orbax"):
        for shardings in (split, jax.tree.map(lambda _: split, jh.load_params(folder).tensors)):
            placed = jh.load_params(path, jnp.bfloat16, shardings=shardings)
            equal(placed, jh.load_params(folder, jnp.bfloat16))
            assert {leaf.sharding for leaf in jax.tree.leaves(placed)} == {split}
        with pytest.raises(UsageError, match="embed.weight is missing"):
            jh.load_params(path, shardings={"norm": {"weight": SingleDeviceSharding(jax.devices()[0])}})


def test_dtype_of_the_weights(wide, tmp_path):
    convert(wide, tmp_path / "half", dtype="float16")
    kinds = {name: dtype for name, (dtype, _, _) in contents(tmp_path / "half").items()}
    before = {name: dtype for name, (dtype, _, _) in contents(wide).items()}
    assert kinds["model.embed_tokens.weight"] == "F16" and kinds["model.layers.0.mamba.A_log"] == "F32"
    assert kinds["model.norm.weight"] == before["model.norm.weight"] == "BF16"
    assert read_config(tmp_path / "half")["dtype"] == "float16"
    convert(wide, tmp_path / "w.orbax", dtype="float32")
    convert(tmp_path / "w.orbax", tmp_path / "back")
    assert {dtype for dtype, _, _ in contents(tmp_path / "back").values()} == {"F32"}
    equal(jh.load_params(tmp_path / "back"), jh.load_params(wide, jnp.float32))


def test_what_float16_cannot_hold_is_refused(folder, tmp_path):
    rewrite(folder, lambda n, a: a * 1e6 if "q_proj" in n else a)
    with pytest.raises(CheckpointError, match="q_proj.weight holds values beyond float16"):
        convert(folder, tmp_path / "x", dtype="float16")
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized(wide, tmp_path, form):
    wanted = jh.load_params(wide, quantize=form)
    convert(wide, tmp_path / "q", quantize=form)
    convert(tmp_path / "q", tmp_path / "q.orbax")
    convert(tmp_path / "q.orbax", tmp_path / "back")
    assert contents(tmp_path / "q") == contents(tmp_path / "back")
    for path in ("q", "q.orbax"):
        equal(jh.load_params(tmp_path / path), wanted)
    assert sum(isinstance(leaf, QuantizedMatrix) for leaf in flatten(wanted.tensors).values()) > 5
    with pytest.raises(CheckpointError, match=f"are {form} already"):
        convert(tmp_path / "q", tmp_path / "again", quantize="int8_block")


def test_shards(folder, tmp_path):
    whole = contents(folder)
    params, target = jh.load_params(folder), tmp_path / "shards"
    jh.save_params(params, target, tiny.CONFIG, like=folder, shard_bytes=9_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 2 and {p.name for p in shards} == set(index["weight_map"].values())
    assert all(len(load_file(p)) == 1 or p.stat().st_size < 10_000 for p in shards)
    assert index["metadata"]["total_size"] == TensorFiles(target).total_bytes
    assert contents(target) == whole and (target / "tokenizer.json").exists()
    # over each other, in both directions
    jh.save_params(params, target, tiny.CONFIG)
    assert contents(target) == whole and not list(target.glob("model-*"))
    jh.save_params(params, folder, tiny.CONFIG, shard_bytes=9_000)
    assert contents(folder) == whole and not (folder / "model.safetensors").exists()
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_saving_like_the_source(made, wide, tmp_path):
    rewrite(wide, lambda n, a: a)
    before = contents(wide)
    config = read_config(wide)
    jh.save_params(jh.load_params(wide), tmp_path / "same", config, like=wide)
    assert contents(tmp_path / "same") == before
    other = shutil.copytree(made / "model", tmp_path / "other")
    with pytest.raises(CheckpointError, match="like: .* nothing was written"):
        jh.save_params(jh.load_params(wide), tmp_path / "new", config, like=other)
    assert not (tmp_path / "new").exists()


def test_tensors_that_nothing_uses(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"visual.x": np.arange(3), "lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    convert(folder, tmp_path / "a.orbax")
    convert(tmp_path / "a.orbax", tmp_path / "b", dtype="bfloat16")
    kept = contents(tmp_path / "b")
    assert kept["visual.x"] == contents(folder)["visual.x"]
    assert "lm_head.weight" not in kept  # a copy of the embeddings


# ------------------------------------------------------------------------------------------- GGUF

FILES = sorted((GOLDEN.parent / "gguf").glob("*.gguf"))
"""Made by llama.cpp's conversion script: scripts/make_gguf.py."""


def near(a, b):
    """Equal but for what the format stores in another form: exponentials, norms plus one."""
    assert dataclasses.replace(a.hparams, context_length=None) == dataclasses.replace(
        b.hparams, context_length=None
    )
    b = flatten(b.tensors)
    for path, x in flatten(a.tensors).items():
        rounded = 1e-6 if path.endswith(("a_log", "norm", "norm.weight")) else 0
        np.testing.assert_allclose(np.asarray(x), np.asarray(b[path]), rtol=0, atol=rounded, err_msg=path)


@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron_h_moe", "qwen3_5_moe_text", "linear_rope"])
def test_through_gguf_and_back(name, tmp_path):
    """Also with files of mixed dtypes, which float32 holds all."""
    source = shutil.copytree(GOLDEN / name, tmp_path / "source")
    narrow = sorted(load_file(source / "model.safetensors"))[::3]
    rewrite(source, lambda n, a: a.astype(np.float16) if n in narrow else a)
    convert(source, tmp_path / "m.gguf", dtype="float32")
    convert(tmp_path / "m.gguf", tmp_path / "m.orbax")
    convert(tmp_path / "m.orbax", tmp_path / "back")
    near(jh.load_params(tmp_path / "back"), jh.load_params(source, jnp.float32))
    same = {n: shape for n, (_, shape, _) in contents(source).items()}
    assert {n: (k, shape) for n, (k, shape, _) in contents(tmp_path / "back").items()} == {
        n: ("F32", shape) for n, shape in same.items()
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_of_llama_cpp_become_folders(file, tmp_path):
    convert(file, tmp_path / "folder")
    assert read_config(tmp_path / "folder")["dtype"] == "float32"
    equal(jh.load_params(tmp_path / "folder"), jh.load_params(file))


@pytest.mark.parametrize("form", ["int8_block", "int4"])
def test_blocks_stay_as_they_are_everywhere(wide, tmp_path, form):
    convert(wide, tmp_path / "a.gguf", quantize=form, tokenizer=False)
    convert(tmp_path / "a.gguf", tmp_path / "b.orbax", quantize=form)
    convert(tmp_path / "b.orbax", tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "d.gguf")
    wanted = jh.load_params(tmp_path / "a.gguf", quantize=form)
    kinds = [leaf.packed for leaf in flatten(wanted.tensors).values() if isinstance(leaf, QuantizedMatrix)]
    assert len(kinds) > 5 and set(kinds) == {form == "int4"}
    for path in ("b.orbax", "c"):
        equal(jh.load_params(tmp_path / path), wanted)
    equal(jh.load_params(tmp_path / "d.gguf", quantize=form), wanted)
    convert(tmp_path / "a.gguf", tmp_path / "plain", dtype="bfloat16")
    equal(jh.load_params(tmp_path / "plain"), jh.load_params(tmp_path / "a.gguf", jnp.bfloat16))
    with pytest.raises(CheckpointError, match=f"are {form} already"):
        convert(tmp_path / "c", tmp_path / "e.gguf", quantize="int8_block" if form == "int4" else "int4")


def test_dtypes_of_gguf_files(wide, tmp_path):
    for file in wide.glob("tokenizer*"):
        file.unlink()
    convert(wide, tmp_path / "own.gguf")
    convert(wide, tmp_path / "half.gguf", dtype="float16")
    kinds = [
        {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / name).tensors}
        for name in ("own.gguf", "half.gguf")
    ]
    assert [found["token_embd.weight"] for found in kinds] == ["BF16", "F16"]
    assert all(found["output_norm.weight"] == found["blk.0.ssm_a"] == "F32" for found in kinds)
    rewrite(wide, lambda n, a: a.astype(np.float32) * 1e6 if "q_proj" in n else a)
    before = (tmp_path / "half.gguf").read_bytes()
    for options, error, words in (
        ({"dtype": "float16"}, CheckpointError, "attn_q.weight holds values beyond F16"),
        ({"quantize": "int8"}, UsageError, "give int8_block"),
        ({"quantize": "int4", "dtype": "bfloat16"}, UsageError, "leave dtype out"),
    ):
        with pytest.raises(error, match=words):
            convert(wide, tmp_path / "half.gguf", force=True, **options)
    with pytest.raises(KeyboardInterrupt):
        convert(wide, tmp_path / "half.gguf", force=True, progress=interrupt_at(0.5))
    with pytest.raises(CheckpointError, match="exists already"):
        convert(wide, tmp_path / "half.gguf")
    (tmp_path / "other.gguf").write_text("a diary")
    with pytest.raises(UsageError, match="holds no model"):
        convert(wide, tmp_path / "other.gguf", force=True)
    with pytest.raises(UsageError, match="is a folder, and a GGUF model one file"):
        convert(tmp_path / "half.gguf", wide, to="gguf", force=True)
    assert (tmp_path / "half.gguf").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"wide", "own.gguf", "half.gguf", "other.gguf"}


def test_the_tokenizer_goes_into_a_gguf_file_and_back(tmp_path):
    convert(embedded_folder(), tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "again.gguf")
    model, source = jh.load(tmp_path / "back"), jh.load()
    equal(model.params, jh.load_params(tmp_path / "m.gguf"))
    text, chat = " In the beginning\n\n1611 é 漢", [{"role": "user", "content": "hi"}]
    assert model.tokenizer.encode(text) == source.tokenizer.encode(text)
    assert model.tokenizer.encode_chat(chat) == source.tokenizer.encode_chat(chat)
    assert model.tokenizer.decode(source.tokenizer.encode(text)) == text
    assert (model.tokenizer.bos_id, model.tokenizer.eos_ids) == (
        source.tokenizer.bos_id,
        source.tokenizer.eos_ids,
    )
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    for path in ("m.gguf", "back"):
        convert(tmp_path / path, tmp_path / f"bare-{path}", to="safetensors", tokenizer=False)
        assert not list((tmp_path / f"bare-{path}").glob("tokenizer*"))


def test_a_tokenizer_that_gguf_has_no_words_for(folder, tmp_path):
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    with pytest.raises(CheckpointError, match="no place for a tokenizer without merges"):
        convert(folder, tmp_path / "m.gguf")
    (folder / "tokenizer.json").write_text(json.dumps(described | {"added_tokens": []}))
    with pytest.raises(CheckpointError, match="no place for .*WordLevel.* tokenizers"):
        convert(folder, tmp_path / "m.gguf")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(CheckpointError, match="has no tokenizer.json: .*--no-tokenizer"):
        convert(folder, tmp_path / "m.gguf")
    assert {p.name for p in tmp_path.iterdir()} == {"model"}
    assert main([str(folder), str(tmp_path / "m.gguf"), "--no-tokenizer"]) == 0
    near(jh.load_params(tmp_path / "m.gguf"), jh.load_params(folder))


def test_tensors_that_have_no_place_in_a_gguf_file_are_named(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors") | {"visual.x": np.arange(3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="visual.x not used by this model; left out"):
        convert(folder, tmp_path / "m.gguf", tokenizer=False)


def interrupt_at(half):
    def progress(done, total):
        if done > total * half:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("name", ["new", "new.orbax", "new.gguf"])
def test_an_interrupted_conversion_leaves_nothing(folder, tmp_path, monkeypatch, name):
    convert_model = partial(convert, folder, tmp_path / name, tokenizer=False)
    with pytest.raises(KeyboardInterrupt):
        convert_model(progress=interrupt_at(0.5))
    assert {p.name for p in tmp_path.iterdir()} == {"model"}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.store, "sync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        convert_model()
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_what_a_killed_process_left_goes(folder, tmp_path):
    script = (
        "import os, sys; from jaxhybrid.conversion import convert; "
        "convert(sys.argv[1], sys.argv[2], progress=lambda *_: os._exit(9))"
    )
    command = [sys.executable, "-c", script, folder, tmp_path / "new"]
    assert (
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(Path(jh.__file__).parents[1])}).returncode
        == 9
    )
    assert not (tmp_path / "new").exists() and list(tmp_path.glob(".new.unfinished-*"))
    convert(folder, tmp_path / "new")
    assert {p.name for p in tmp_path.iterdir()} == {"model", "new"}


def test_a_full_disk_is_one_line_and_nothing_is_left(folder, tmp_path, monkeypatch):
    """Really refused by the system, but for orbax, which is not begun."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        for name in ("new", "new.gguf"):
            with pytest.raises(CheckpointError, match="cannot be written .*choose a") as error:
                convert(folder, tmp_path / name, tokenizer=False)
            assert str(error.value).startswith(str(tmp_path / name)) and "\n" not in str(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(CheckpointError, match="new.orbax/weights: cannot be written .No space left") as error:
        convert(folder, tmp_path / "new.orbax")
    assert str(error.value).startswith(str(tmp_path / "new.orbax"))
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_a_command_that_is_told_to_end_cleans_up(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "main", lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as end:
            command.entry()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == 128 + signal.SIGTERM


def test_only_a_model_is_replaced(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    rewrite(other, lambda n, a: a + 1)
    before = contents(other)
    with pytest.raises(CheckpointError, match="exists already"):
        convert(folder, other)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, other, force=True, progress=interrupt_at(0.5))
    assert contents(other) == before
    convert(folder, other, force=True, to="orbax")
    equal(jh.load_params(other), jh.load_params(folder))
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("dear")
    for taken in (home, home / "letter"):
        with pytest.raises(UsageError, match="holds no model"):
            convert(folder, taken, force=True)
    for around in (folder, tmp_path):
        with pytest.raises(UsageError, match="where the source lies"):
            convert(folder, around, force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"model", "other", "home"}


def test_damaged_orbax_folders(folder, tmp_path):
    target = tmp_path / "m.orbax"
    convert(folder, target)

    def refused(words):
        with pytest.raises(CheckpointError) as error:
            jh.load_params(target)
        assert words in str(error.value) and "\n" not in str(error.value)

    largest = max((p for p in target.rglob("*") if p.is_file() and "arrays" in str(p)), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    refused("is damaged or missing")
    largest.unlink()
    refused("is damaged or missing")
    shutil.rmtree(target / "weights")
    refused("no .safetensors file")
    shutil.rmtree(target)
    convert(folder, target)
    (target / "config.json").write_text(json.dumps(tiny.CONFIG | {"shared_intermediate_size": 25}))
    refused("config.json is of another model")
    (target / "config.json").write_text(json.dumps(tiny.CONFIG))
    arrays, about = store.read(target / "weights", "weights")
    store.write(target / "weights", "weights", arrays, {"embed.weight": 3})
    refused("description of the tensors cannot be used")


def test_the_command(folder, tmp_path, capsys):
    assert main([str(folder), str(tmp_path / "b.orbax"), "--dtype", "bfloat16"]) == 0
    assert "b.orbax: " in capsys.readouterr().err
    assert jh.load_params(tmp_path / "b.orbax").dtype == jnp.bfloat16
    assert main([str(folder), str(tmp_path / "b.orbax")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert main([str(folder), str(folder), "--force"]) == 2
    assert main([str(tmp_path / "none"), str(tmp_path / "c")]) == 1
    assert main([str(folder), str(tmp_path / "c"), "--dtype", "float16", "--quantize", "int8"]) == 2
    assert not (tmp_path / "c").exists()
