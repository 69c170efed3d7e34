"""GGUF files: llama.cpp's are read as the folders they came from, ours are read back; refusals."""

import dataclasses
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter, quants
from gguf.constants import GGMLQuantizationType as Type

import jaxhybrid as jh
from jaxhybrid.errors import CheckpointError, TokenizerError, UsageError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.files import write_gguf
from jaxhybrid.files.config import read_config
from jaxhybrid.files.gguf.container import open_container
from jaxhybrid.files.gguf.metadata import config_of
from jaxhybrid.model import spec
from jaxhybrid.ops.quantized import QuantizedMatrix
from jaxhybrid.ops.rope import inverse_frequencies
from jaxhybrid.params import Params, flatten, unflatten

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
CONVERTED = sorted(path.stem for path in (HERE / "gguf").glob("*.gguf"))
"""Made by llama.cpp's conversion script: scripts/make_gguf.py."""
ROUNDED = ("a_log", "norm")
"""Stored as the exponential, or plus one."""
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip


def assert_same(found, expected, rounded=1e-6):
    """Parameter by parameter: exactly, but for those whose stored form is rounded."""
    found, expected = flatten(found.tensors), flatten(expected.tensors)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        tolerance = rounded if path.endswith(ROUNDED) or path.endswith("norm.weight") else 0
        np.testing.assert_allclose(
            np.asarray(found[path]), np.asarray(array), rtol=0, atol=tolerance, err_msg=path
        )


def random(config):
    """Drawn by numpy: nothing is compiled."""
    hp, rng = hparams_from_config(config), np.random.default_rng(1)
    tensors = {
        path: jnp.asarray(rng.standard_normal(tensor.shape), jnp.float32)
        for path, tensor in flatten(spec(hp)).items()
    }
    return Params(unflatten(tensors), hp)


def llama(**fields):
    return random(LLAMA | fields)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 700
    return text


# ------------------------------------------------------------------------------ llama.cpp's files


@pytest.mark.parametrize("name", [n for n in CONVERTED if not n.startswith("falcon_h1")])
def test_a_converted_file_holds_what_its_folder_holds(name):
    found, expected = jh.load_params(HERE / "gguf" / f"{name}.gguf"), jh.load_params(GOLDEN / name)
    assert_same(found, expected)
    mine, theirs = (dataclasses.replace(p.hparams, context_length=None) for p in (found, expected))
    if name == "llama3_rope":  # a file has factors of the frequencies, not the rule they came from
        ropes = [p.attention.rope for p in (mine, theirs)]
        factors = [inverse_frequencies(rope) for rope in ropes]
        np.testing.assert_allclose(*factors, rtol=1e-6)
        mine = dataclasses.replace(mine, attention=theirs.attention)
    if name == "lfm2_moe":  # llama.cpp knows no factor of the experts
        mine = dataclasses.replace(mine, moe=theirs.moe)
    if name == "falcon_mamba":  # the inner norms have no epsilon in a file, the released models' is taken
        assert mine.recurrent.norm_eps == 1e-6
        mine = dataclasses.replace(mine, recurrent=theirs.recurrent)
    assert mine == theirs


@pytest.mark.parametrize("name", ["falcon_h1", "falcon_h1_rms"])
def test_multipliers_that_a_file_has_folded_into_its_weights(name):
    tokens = np.load(GOLDEN / name / "ref.npz")["input_ids"]
    logits = [
        jax.jit(jh.forward)(jh.load_params(path), jnp.asarray(tokens))
        for path in (HERE / "gguf" / f"{name}.gguf", GOLDEN / name)
    ]
    # the script gives a head that is tied to the embeddings the embeddings' multiplier
    config = read_config(GOLDEN / name)
    ratio = (
        config["lm_head_multiplier"] / config["embedding_multiplier"] if config["tie_word_embeddings"] else 1
    )
    np.testing.assert_allclose(np.asarray(logits[0]) * ratio, np.asarray(logits[1]), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "name, kinds", [("granitemoehybrid", "mamba attention"), ("qwen3_5_text", "linear full")]
)
def test_layer_kinds_in_every_encoding(name, kinds):
    """A file may say by any of these which layers attend, whatever its architecture."""
    recurrent, attention = (k if name.startswith("granite") else f"{k}_attention" for k in kinds.split())
    found = open_container(HERE / "gguf" / f"{name}.gguf")
    arch = found.metadata["general.architecture"]
    n = found.metadata[f"{arch}.block_count"]
    bare = {k: v for k, v in found.metadata.items() if not k.endswith(("recurrent_layers", "_interval"))}

    def config(key, value):
        metadata = bare | {f"{arch}.attention.head_count_kv": 2, f"{arch}.{key}": value}
        return config_of(dataclasses.replace(found, metadata=metadata))[1]

    for key, value in (
        ("attention.head_count_kv", np.array([2 * (i % 2) for i in range(n)], np.uint32)),
        ("attention.recurrent_layers", np.array([i % 2 == 0 for i in range(n)])),
        ("attention.layer_indices", np.arange(1, n, 2, dtype=np.int32)),
        ("full_attention_interval", 2),
    ):
        expected = [attention if i % 2 else recurrent for i in range(n)]
        assert config(key, value)["layer_types"] == expected, key
    with pytest.raises(CheckpointError, match="layer_indices is 'all', expected is a list"):
        config("attention.layer_indices", "all")


# ------------------------------------------------------------------------------------- our files

WRITTEN = [
    "bamba", "falcon_mamba", "gemma3_text", "granite", "granitemoehybrid", "granitemoehybrid_dense", "jamba",
    "kimi_linear", "lfm2", "lfm2_moe", "linear_rope", "llama", "llama3_rope", "longrope_rope", "mamba",
    "mamba2", "nemotron_h", "nemotron_h_latent", "nemotron_h_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
]  # fmt: skip

NOT_RUN = ("bamba", "jamba", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Of sizes that llama.cpp was seen to end on."""


def fitted(name):
    """The model of a golden folder, without what llama.cpp knows nothing of."""
    params = jh.load_params(GOLDEN / name)
    hp = params.hparams
    match name:
        case "gemma3_text":
            attention = tuple(dataclasses.replace(a, scale=a.head_dim**-0.5) for a in hp.attention)
            return params.replace(hparams=dataclasses.replace(hp, attention=attention))
        case "falcon_mamba":
            return params.replace(
                hparams=dataclasses.replace(hp, recurrent=dataclasses.replace(hp.recurrent, norm_eps=1e-6))
            )
        case "kimi_linear":
            config = read_config(GOLDEN / name)
            config["linear_attn_config"]["num_heads"] = config["num_attention_heads"]
            return random(config)
        case "lfm2_moe":
            moe = tuple(m and dataclasses.replace(m, multiplier=1.0) for m in hp.moe)
            return params.replace(hparams=dataclasses.replace(hp, moe=moe))
        case "mamba" | "mamba2" | "lfm2":
            config = read_config(GOLDEN / name) | {"use_bias": False, "conv_bias": False}
            return random(config)
        case "qwen3_next":
            config = read_config(GOLDEN / name) | {"mlp_only_layers": []}
            return random(config)
    return params


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_file_is_read_back(name, tmp_path):
    params = fitted(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write_gguf(params, tmp_path / "model.gguf")
    assert bool(caught) == (name in NOT_RUN)
    assert_same(jh.load_params(tmp_path / "model.gguf"), params)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    "name, field",
    [
        ("mistral", "attention.window"),
        ("bamba_dt_limit", "recurrent.dt_min"),
        ("falcon_h1_rms_before", "recurrent.gated_norm"),
        ("granitemoehybrid_rope", "recurrent.bias"),
        ("mamba2_tied", "recurrent.conv_bias"),
        ("mamba2", "recurrent.bias"),
        ("lfm2_moe", "moe.multiplier"),
        ("kimi_linear", "heads of its two mixers"),
        ("yarn_rope", "attention.rope.beta_fast"),
        ("zamba2", "zamba2"),
    ],
)
def test_what_the_format_has_no_place_for_is_refused_and_nothing_is_left(name, field, tmp_path):
    with pytest.raises(CheckpointError) as error:
        write_gguf(jh.load_params(GOLDEN / name), tmp_path / "model.gguf")
    assert field in one_line(error)
    assert not list(tmp_path.iterdir())


def test_a_refused_file_leaves_the_one_before(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"before")
    with pytest.raises(CheckpointError):
        write_gguf(jh.load_params(GOLDEN / "mistral"), path)
    with pytest.raises(UsageError, match="Q5_9"):
        write_gguf(llama(), path, dtype="Q5_9")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_gguf(llama(), path / "model.gguf")
    with pytest.raises(CheckpointError, match="llama.context_length = 5000000000 does not fit"):
        write_gguf(llama(max_position_embeddings=5 * 10**9), path)
    assert path.read_bytes() == b"before"


# -------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("dtype, kind", [("F16", jnp.float16), ("BF16", jnp.bfloat16)])
def test_short_floats_round_as_casts_do(dtype, kind, tmp_path):
    params = llama()
    write_gguf(params, tmp_path / "model.gguf", dtype=dtype)
    found = jh.load_params(tmp_path / "model.gguf", jnp.float32)
    rounded = jax.tree.map(lambda x: x.astype(kind).astype(x.dtype) if x.ndim > 1 else x, params)
    assert_same(found, rounded, rounded=0)
    assert jh.load_params(tmp_path / "model.gguf").dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype, form", [("Q8_0", "int8_block"), ("Q4_0", "int4")])
def test_blocks_are_kept_bit_for_bit(dtype, form, tmp_path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write_gguf(llama(num_hidden_layers=1), first, dtype=dtype)
    kept = jh.load_params(first, quantize=form)
    numbers = flatten(jh.load_params(first, jnp.float32).tensors)
    matrices = {p: leaf for p, leaf in flatten(kept.tensors).items() if isinstance(leaf, QuantizedMatrix)}
    assert set(matrices) == {path for path, array in numbers.items() if array.ndim > 1}
    for path, leaf in matrices.items():
        np.testing.assert_array_equal(np.asarray(leaf.dequantize()), np.asarray(numbers[path]), err_msg=path)
    write_gguf(kept, second)  # of its own dtype
    before, after = ({t.name: np.array(t.data) for t in GGUFReader(path).tensors} for path in (first, second))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_other_types_are_quantized_as_asked(tmp_path):
    write_gguf(llama(), tmp_path / "model.gguf", dtype="Q8_0")
    found = flatten(jh.load_params(tmp_path / "model.gguf", quantize="int4").tensors)
    assert found["layers.0.mlp.down"].packed
    # rows of 80 are no blocks, so that these are F16 in the file and int8 by channel in memory
    write_gguf(llama(intermediate_size=80), tmp_path / "odd.gguf", dtype="Q8_0")
    found = flatten(jh.load_params(tmp_path / "odd.gguf", quantize="int8_block").tensors)
    assert found["layers.0.mlp.down"].by_channel and not found["layers.0.mlp.gate_up"].by_channel


KINDS = [
    Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K,
    Type.Q6_K, Type.IQ4_NL,
]  # fmt: skip


def test_every_type_is_read_by_the_rows_of_its_blocks(tmp_path):
    """Random blocks with sane scales, in a model whose q and k rows are reordered; and the file in parts."""
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 32, "num_hidden_layers": 2}
    write_gguf(random(config), tmp_path / "plain.gguf")
    reader, rng = GGUFReader(tmp_path / "plain.gguf"), np.random.default_rng(0)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=7)
    for field in reader.fields.values():
        if field.name.startswith(("llama.", "jaxhybrid.", "tokenizer.")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    expected = {}
    for i, tensor in enumerate(reader.tensors):
        if tensor.data.ndim == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        kind = KINDS[i % len(KINDS)]
        block, size = quants.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 60, (tensor.data.shape[0], 256 // block * size), np.uint8)  # small exponents
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
        expected[tensor.name] = quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3
    found = flatten(jh.load_params(parts[1]).tensors)
    for name, ours in {
        "attn_v": "attention.v",
        "attn_output": "attention.out",
        "ffn_down": "mlp.down",
    }.items():
        for i in range(2):
            stored = expected[f"blk.{i}.{name}.weight"]
            np.testing.assert_array_equal(np.asarray(found[f"layers.{i}.{ours}"]), stored)
    q = expected["blk.1.attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_array_equal(np.asarray(found["layers.1.attention.q"]), q)
    parts[2].unlink()
    with pytest.raises(CheckpointError, match="part 3 of 3 is missing"):
        jh.load_params(parts[0])
    shutil.copy(parts[0], parts[2])
    with pytest.raises(CheckpointError, match="of another file"):
        jh.load_params(parts[0])


# ------------------------------------------------------------------------------------ everywhere


def test_inspect_and_load_take_a_file(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(llama(), path)
    found = jh.inspect(path)
    assert not found.errors and found.mapping is not None and not found.mapping.unexpected
    assert found.hparams.family == "llama" and str(path) in next(found.lines())
    model = jh.load(path)
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        jh.generate(model, "text")


def test_unused_tensors_are_named(tmp_path):
    config = LLAMA | {"num_hidden_layers": 3}
    write_gguf(random(config), tmp_path / "plain.gguf")
    data = bytearray((tmp_path / "plain.gguf").read_bytes())
    extra = data.replace(b"llama.block_count\x04\0\0\0\x03", b"llama.block_count\x04\0\0\0\x02")
    assert extra != data
    (tmp_path / "fewer.gguf").write_bytes(extra)
    assert jh.load_params(tmp_path / "fewer.gguf").hparams.n_layers == 2  # such layers predict further tokens
    extra = data.replace(b"output_norm.weight", b"output_nohm.weight")
    (tmp_path / "renamed.gguf").write_bytes(extra)
    with pytest.raises(CheckpointError, match=r"output_norm\.weight of shape \(64,\) is missing"):
        jh.load_params(tmp_path / "renamed.gguf")
