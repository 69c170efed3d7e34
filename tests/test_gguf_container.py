"""GGUF files from strangers: one clear line, whatever the bytes are, and memory in proportion to the file."""

import os
import struct
import time
import tracemalloc
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import jaxhybrid as jh
from jaxhybrid.errors import CheckpointError, TokenizerError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.files import write_gguf
from jaxhybrid.files.gguf.container import open_container
from jaxhybrid.files.gguf.tensors import GgufFiles
from jaxhybrid.files.gguf.tokenizer import load_tokenizer
from jaxhybrid.model import init_params
from jaxhybrid.text import Tokenizer

LLAMA = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 2048, "tie_word_embeddings": True,
}  # fmt: skip
EMBEDDED = Path(jh.__file__).parent / "models" / "tiny"


@cache
def whole(folder: Path) -> bytes:
    """A file with a tokenizer, about 150 kB."""
    params = init_params(hparams_from_config(LLAMA), jax.random.key(0))
    write_gguf(params, folder / "whole.gguf", tokenizer=Tokenizer.load(EMBEDDED))
    return (folder / "whole.gguf").read_bytes()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def header(*entries: bytes, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(entries)) + b"".join(entries) + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape, kind=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


ARRAY, STRING, U32 = 9, 8, 4
HUGE = 1 << 62
FAULTS = {
    "empty": (b"", "needs 4 bytes"),
    "magic": (b"GGML" + bytes(60), "is not a GGUF file"),
    "lfs": (b"version https://git-lfs", "git-lfs pointer"),
    "version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "has version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensors do not fit"),
    "many entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata entries do not fit"),
    "long key": (header(struct.pack("<Q", HUGE) + bytes(9)), "a metadata key of"),
    "long text": (header(text("a") + struct.pack("<IQ", STRING, HUGE)), "needs 4611686018427387904 bytes"),
    "long array": (header(text("a") + struct.pack("<IIQ", ARRAY, U32, HUGE)), "bytes, the file has"),
    "many texts": (header(text("a") + struct.pack("<IIQ", ARRAY, STRING, HUGE)), "do not fit"),
    "nested": (header(text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)), "array of type 9"),
    "type": (header(text("a") + struct.pack("<I", 77)), "unknown type 77"),
    "twice": (header(*[text("a") + struct.pack("<IB", 7, 1)] * 2), "appears twice"),
    "alignment": (
        header(text("general.alignment") + struct.pack("<II", U32, 12)), "power of two",
    ),
    "dimensions": (header(tensors=tensor("t", (1,) * 9), n_tensors=1), "9 dimensions"),
    "no elements": (header(tensors=tensor("t", (4, 0)), n_tensors=1), "impossible shape"),
    "no block": (header(tensors=tensor("t", (4, 33), kind=8), n_tensors=1), "impossible shape"),
    "tensor type": (header(tensors=tensor("t", (4,), kind=250), n_tensors=1), "unknown type 250"),
    "beyond": (header(tensors=tensor("t", (1 << 40, 1 << 20)), n_tensors=1), "cut short"),
    "far away": (header(tensors=tensor("t", (4,), offset=HUGE), n_tensors=1), "cut short"),
    "overlap": (
        header(tensors=tensor("t", (4,)) + tensor("u", (4,)), n_tensors=2) + bytes(99), "overlaps",
    ),
    "no architecture": (header(), "general.architecture is missing"),
    "architecture": (
        header(text("general.architecture") + struct.pack("<I", STRING) + text("rwkv\n" * 99)),
        "is not supported",
    ),
    "no model": (
        header(text("general.architecture") + struct.pack("<I", STRING) + text("llama")), "token_embd.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_header_is_one_clear_line(name, tmp_path):
    data, expected = FAULTS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        jh.load_params(path)
    assert expected in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_every_cut_is_noticed(folder, tmp_path):
    data, path = whole(folder), tmp_path / "model.gguf"
    for n in [*range(0, 400, 7), *range(400, len(data), 9973), len(data) - 33]:
        path.write_bytes(data[:n])
        with pytest.raises(CheckpointError):
            open_container(path)


def test_a_file_that_changes_while_it_is_read_is_refused(folder, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole(folder))
    files = GgufFiles(path).checked()
    os.truncate(path, len(whole(folder)) - 64)
    with pytest.raises(CheckpointError, match="changed from"):
        files.read("model.embed_tokens.weight")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.read("model.embed_tokens.weight")


def test_a_missing_package_is_named(folder, monkeypatch, tmp_path):
    import jaxhybrid.files.source as source

    def missing(name):
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf.constants")

    monkeypatch.setattr(source.importlib, "import_module", missing)
    with pytest.raises(CheckpointError, match=r'pip install "jaxhybrid\[gguf\]"'):
        source.gguf_part("tensors")


def attempt(path: Path) -> None:
    """Everything that reads a file."""
    files = GgufFiles(path, "int8_block").checked()
    for name in files.names()[:4]:
        if name not in files.container.tensors:
            files.read(name)
    load_tokenizer(path)


INTERESTING = [bytes(8), b"\xff" * 8, struct.pack("<Q", 1 << 31), struct.pack("<Q", HUGE), b"\x01" + bytes(7)]


def mutations():
    """Places, and bytes that replace those there; most in the header."""
    place = st.one_of(st.integers(0, 3000), st.integers(0, 200_000))
    return st.lists(
        st.tuples(place, st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from(INTERESTING))),
        min_size=1,
        max_size=4,
    )


def examples() -> int:
    """JAXHYBRID_NIGHTLY asks for many."""
    return 20_000 if os.environ.get("JAXHYBRID_NIGHTLY") else 80


@given(mutations(), st.one_of(st.none(), st.integers(0, 200_000)))
@example([(0, b"GGUF")], None)
@settings(max_examples=examples(), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_of_strangers_give_a_model_or_one_line(folder, changes, length):
    data = bytearray(whole(folder))
    for place, value in changes:
        data[place : place + len(value)] = value[: max(0, len(data) - place)]
    path = folder / "mutated.gguf"
    path.write_bytes(data[:length])
    began = time.process_time()  # a deadline of hypothesis counts the time in which others run
    tracemalloc.start()
    try:
        attempt(path)
    except (CheckpointError, TokenizerError) as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - began < 2
    assert peak < 50 * len(data) + (1 << 23)  # Python's objects for short texts; a buffer of 4 MiB at most


def test_numbers_of_layers_and_experts_are_bounded_by_the_file(folder, tmp_path):
    data = whole(folder)
    for key, expected in (
        (b"llama.block_count", "block_count makes"),
        (b"llama.attention.head_count", "larger than the whole file|num_key_value_heads|of no use"),
    ):
        at = data.index(key) + len(key) + 4
        changed = data[:at] + struct.pack("<I", 0x7FFFFFFF) + data[at + 4 :]
        (tmp_path / "model.gguf").write_bytes(changed)
        with pytest.raises(CheckpointError, match=expected):
            GgufFiles(tmp_path / "model.gguf").checked()


def test_names_are_not_made_for_more_layers_and_experts_than_there_can_be(tmp_path):
    """Small files whose counts would be multiplied: layers by names or experts, lengths by lengths."""
    sizes = {
        "embedding_length": 8, "context_length": 8, "attention.head_count": 2, "attention.head_count_kv": 1,
        "feed_forward_length": 8, "expert_feed_forward_length": 1, "expert_used_count": 1,
        "ssm.conv_kernel": 2, "ssm.state_size": 1, "ssm.group_count": 1, "ssm.time_step_rank": 1,
        "ssm.inner_size": 1, "expert_shared_feed_forward_length": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for arch, layers, experts, words in (
        ("llama", 5000, 0, "block_count makes 5000 layers"),
        ("qwen35moe", 500, 500, "asks for 250000 experts, the tensors hold 500"),
    ):
        writer = GGUFWriter(tmp_path / "model.gguf", arch)
        for key, value in (sizes | {"block_count": layers, "expert_count": experts}).items():
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
        writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
        writer.add_tensor("experts", np.zeros((max(1, experts), 1, 2), np.float32))
        for i in range(layers):
            writer.add_tensor(f"blk.{i}.x", np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=words):
            GgufFiles(tmp_path / "model.gguf").checked()
    writer = GGUFWriter(tmp_path / "words.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b", "a" * 400_000])
    writer.add_token_scores([0.0, 0.0, 0.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    began = time.process_time()
    load_tokenizer(tmp_path / "words.gguf")
    assert time.process_time() - began < 10  # cutting it in two at every place takes a minute


def test_metadata_is_typed(folder, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole(folder))
    found = open_container(path).metadata
    assert found["llama.embedding_length"] == 8 and type(found["llama.embedding_length"]) is int
    assert isinstance(found["tokenizer.ggml.tokens"], list)
    assert isinstance(found["tokenizer.ggml.token_type"], np.ndarray)
