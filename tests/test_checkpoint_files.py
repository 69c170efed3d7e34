"""config.json and safetensors folders: what is read, what is written, what is refused."""

import json
import math
import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files import config as config_module
from jaxhybrid.files.config import read_config, write_json
from jaxhybrid.files.tensors import TensorFiles, write_safetensors

KINDS = [
    np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2, np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32,
    np.uint16, np.uint8, np.bool_,
]  # fmt: skip


def line(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 1000
    return text


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def arrays() -> dict[str, np.ndarray]:
    made = {np.dtype(kind).name: (np.arange(6) % 2).reshape(2, 3).astype(kind) for kind in KINDS}
    return made | {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.float16)}


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


# config.json


def test_both_spellings_of_infinity_at_any_depth(tmp_path: Path) -> None:
    text = """{"model_type": "mamba2", "a": Infinity, "b": [0.0, -Infinity],
      "c": {"d": [{"__float__": "Infinity"}, {"__float__": "-Infinity"}]},
      "e": {"__float__": "NaN"}, "f": NaN, "g": {"__float__": "other"},
      "h": {"__float__": "NaN", "i": 1}}"""
    (tmp_path / "config.json").write_text(text)
    config = read_config(tmp_path)
    assert config["a"] == math.inf and config["b"] == [0.0, -math.inf]
    assert config["c"] == {"d": [math.inf, -math.inf]}
    assert math.isnan(config["e"]) and math.isnan(config["f"])
    assert config["g"] == {"__float__": "other"} and config["h"] == {"__float__": "NaN", "i": 1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"model_type": "llama",\n "x": }', ["line 2, column 7", "download"]),
        (b'{"model_type": "ll\xff"}', ["not UTF-8 (byte 18)", "download"]),
        (b"", ["not valid JSON (line 1, column 1", "download"]),
        (b"[1]", ["top level is an array", "expected an object"]),
        (b"null", ["top level is null"]),
        (b'{"__float__": "NaN"}', ["top level is a number"]),
        (b'{"hidden_size": 1}', ["model_type is missing", "expected a string"]),
        (b'{"model_type": ["llama"]}', ["model_type is an array", "expected a string"]),
        (b'{"model_type": null}', ["model_type is null"]),
        (b'{"model_type": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["deeply"]),
        (b'{"model_type": "x", "a": ' + b"9" * 5000 + b"}", ["digits"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_config(tmp_path: Path, data: bytes, words: list[str]) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        read_config(tmp_path)
    text = line(error)
    path = str(tmp_path / "config.json")
    assert text.startswith(path)
    assert all(word in text.removeprefix(path) for word in words), text


def test_missing_config_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folder not found"):
        read_config(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds nothing"):
        read_config(tmp_path)
    for name in ("q4.gguf", "a\nb", "c", "d", "e"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as error:
        read_config(tmp_path)
    assert "'a\\nb', 'c', 'd', 'e' and 1 others" in line(error)
    for name in ("a\nb", "c", "d", "e"):
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="holds 'q4.gguf'"):
        read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="file not found"):
        read_config(tmp_path)


def test_written_config_is_strict_json_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    made = {"model_type": "é", "limit": (0.0, math.inf), "deep": {"x": [-math.inf, 1e-5]}}
    write_json(path, made)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = json.loads(path.read_text(), parse_constant=refuse)
    assert text["limit"] == [0.0, {"__float__": "Infinity"}]
    assert read_config(tmp_path) == made | {"limit": [0.0, math.inf]}


def test_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"model_type": "old"})
    with pytest.raises(TypeError):
        write_json(path, {"model_type": object()})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(config_module.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_json(path, {"model_type": "new"})
    with pytest.raises(CheckpointError, match="No space left"):
        write_safetensors(path, {"w": np.zeros(2)})
    assert os.listdir(tmp_path) == ["config.json"]
    assert read_config(tmp_path)["model_type"] == "old"
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_json(tmp_path / "none" / "x.json", {})


# reading and writing tensors


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    made = arrays()
    safetensors.numpy.save_file(made, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert sorted(files.names()) == sorted(made) and "scalar" in files and "x" not in files
    assert files.total_bytes == sum(array.nbytes for array in made.values())
    assert files.dtype("bfloat16") == "BF16" and files.shape("bfloat16") == (2, 3)
    assert files.file_of("scalar") == tmp_path / "model.safetensors"
    found = {name: files.read(name) for name in files.names()}
    for name, array in made.items():
        same(found[name], array)
        # a CPU device of jax takes such memory over
        assert not array.size or found[name].ctypes.data % 64 == 0


def test_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    made = arrays()
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(path, made | {"turned": turned, "big": turned.astype(">f4")})
    assert os.listdir(tmp_path) == ["model.safetensors"]
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        for name, array in (made | {"turned": turned, "big": turned}).items():
            if not name.startswith("float8"):  # the library's numpy side may not read these
                same(file.get_tensor(name), np.asarray(array, order="C"))
    files = TensorFiles(tmp_path)
    for name, array in (made | {"turned": turned, "big": turned}).items():
        same(files.read(name), np.asarray(array, order="C"))


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    header = {"a": entry("U8", [1], 0, 1), "b": entry("BF16", [2], 1, 5)}
    values = np.array([1.5, -2], ml_dtypes.bfloat16)
    for pad in range(8):
        text = json.dumps(header).encode() + b" " * pad
        (tmp_path / "x.safetensors").write_bytes(raw(text, b"\x07" + values.tobytes()))
        files = TensorFiles(tmp_path)
        same(files.read("b"), values)


def test_write_refuses_what_the_format_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(CheckpointError, match="'w' has dtype complex128"):
        write_safetensors(path, {"w": np.zeros(2, np.complex128)})
    with pytest.raises(CheckpointError, match="'w' has dtype int4"):
        write_safetensors(path, {"w": np.zeros(2, ml_dtypes.int4)})
    with pytest.raises(CheckpointError, match="reserved name"):
        write_safetensors(path, {"__metadata__": np.zeros(2)})
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_safetensors(tmp_path / "none" / "m.safetensors", {"w": np.zeros(2)})
    assert os.listdir(tmp_path) == []


def test_read_errors_name_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw({"a": entry("F4", [2], 0, 1), "b": entry("U8", [1], 1, 2)}, b"12"))
    files = TensorFiles(tmp_path)
    assert files.dtype("a") == "F4"
    with pytest.raises(CheckpointError, match="'a' has dtype F4"):
        files.read("a")
    with pytest.raises(CheckpointError, match="'c' is not in"):
        files.shape("c")
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="changed from .* to 0 bytes"):
        files.read("b")


def test_parameters_take_memory_once(tmp_path: Path) -> None:
    """What was read is what the device holds: no second copy of it is made."""
    given = np.ones((64, 64), np.float32)
    write_safetensors(tmp_path / "m.safetensors", {"w": given})
    stored = TensorFiles(tmp_path).read("w")
    (cpu, *_) = jax.devices("cpu")
    assert jax.device_put(stored, cpu, may_alias=True).unsafe_buffer_pointer() == stored.ctypes.data


# layouts


def shards(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        write_safetensors(folder / name, {f"t{number}": np.full(2, number, np.float32)})


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("with_index", [True, False])
def test_shards(tmp_path: Path, with_index: bool) -> None:
    shards(tmp_path, ONE, TWO, "consolidated.safetensors", "adapter_model.safetensors")
    if with_index:
        index(tmp_path, {"t0": ONE, "t1": TWO})
    files = TensorFiles(tmp_path)
    assert files.names() == ["t0", "t1"] and files.total_bytes == 16
    assert files.file_of("t1").name == TWO
    same(files.read("t1"), np.full(2, 1, np.float32))


def test_one_file_of_any_name(tmp_path: Path) -> None:
    shards(tmp_path, "consolidated.safetensors")
    assert TensorFiles(tmp_path).names() == ["t0"]
    shards(tmp_path, "consolidated.safetensors", "other.safetensors")
    assert TensorFiles(tmp_path).names() == ["t1"]
    shards(tmp_path, "a.safetensors", "other.safetensors", "model.safetensors")
    assert TensorFiles(tmp_path).names() == ["t2"]


@pytest.mark.parametrize(
    ("names", "weight_map", "words"),
    [
        ([], None, ["no .safetensors", "holds nothing"]),
        (["pytorch_model.bin"], None, ["pytorch_model.bin", "convert"]),
        (["model-q4.gguf"], None, ["holds 'model-q4.gguf'", ".safetensors"]),
        (["a.safetensors", "b.safetensors"], None, ["cannot tell", "keep one"]),
        ([ONE, "b.safetensors"], None, ["cannot tell"]),
        ([ONE, "model-00002-of-00003.safetensors"], None, ["cannot tell"]),
        ([TWO], None, [f"{ONE} is missing", "download"]),
        ([ONE], None, [f"{TWO} is missing", "download"]),
        (["x-00000001-of-99999999.safetensors"], None, ["x-00000002-of-99999999"]),
        ([TWO, "model-00003-of-00002.safetensors"], None, [ONE, "missing"]),
        ([ONE], {"t0": ONE, "t1": TWO}, [TWO, "'t1'", "not in the folder"]),
        ([ONE, TWO], {"t0": ONE, "t9": TWO}, [TWO, "'t9'", "missing although"]),
        ([ONE, TWO], {"t0": TWO, "t1": TWO}, [TWO, "'t0'", "missing although"]),
        ([ONE, TWO], {"t0": TWO, "t1": ONE}, [TWO, "'t0'", "missing although"]),
        ([ONE], {"t0": "../" + ONE}, ["'t0'", "'../", "plain"]),
        ([ONE], {"t0": "/etc/x.safetensors"}, ["'/etc/", "plain"]),
        ([ONE], {"t0": "..\\x.safetensors"}, ["plain"]),
        ([ONE], {"t0": "x\0.safetensors"}, ["plain"]),
        ([ONE], {"t0": ".."}, ["plain"]),
        ([ONE], {"t0": 7}, ["plain"]),
        ([ONE], {}, ["weight_map", "empty"]),
        ([ONE], [ONE], ["weight_map", "not an object"]),
    ],
)
def test_bad_folder(tmp_path: Path, names: list[str], weight_map: Any, words: list[str]) -> None:
    shards(tmp_path, *names)
    if weight_map is not None:
        index(tmp_path, weight_map)
    with pytest.raises(CheckpointError) as error:
        TensorFiles(tmp_path)
    text = line(error).replace(str(tmp_path), "")
    assert all(word in text for word in words), text


def test_bad_folder_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: cannot be read"):
        TensorFiles(tmp_path / "none")
    shards(tmp_path, ONE)
    (tmp_path / TWO).write_bytes((tmp_path / ONE).read_bytes())
    with pytest.raises(CheckpointError, match=f"{TWO}: tensor 't0' is also in {ONE}"):
        TensorFiles(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    for data in (b"[]", b"{", b"\xff", b'{"weight_map": {"a": 1, "a": 1}}', b"[" * 100_000):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            TensorFiles(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        TensorFiles(tmp_path)


# hostile headers

HUGE = 2**62
GOOD = entry("U8", [4], 0, 4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["expected at least 8 bytes, found 0", "download"]),
        (b"1234567", ["expected at least 8 bytes, found 7"]),
        (raw({}, length=2**64 - 1), ["found 10"]),
        (raw({}, length=3), ["expected at least 11 bytes, found 10"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["git-lfs pointer", "git lfs pull"]),
        (raw(b"\xff{}"), ["no JSON header"]),
        (raw(b" {}"), ["no JSON header"]),
        (raw(b'{"\xff": 1}'), ["not UTF-8"]),
        (raw(b'{"a": '), ["not valid JSON"]),
        (raw(b'{"a":' * 100_000), ["deeply"]),
        (raw(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}"), ["digits"]),
        (raw(b'{"a":{"dtype":"U8","dtype":"U8"}}'), ["'dtype' appears twice"]),
        (raw({"__metadata__": {"x": 1}}), ["__metadata__"]),
        (raw({"__metadata__": [1]}), ["__metadata__"]),
        (raw(b'{"__metadata__": {"x": "\\ud800"}}'), ["broken Unicode"]),
        (raw({"\ud800": GOOD}, b"1234"), ["broken Unicode"]),
        (raw({"a": [1]}), ["'a'", "not an object"]),
        (raw({"a": GOOD | {"x": 1}}, b"1234"), ["'a'", "not an object of"]),
        (raw({"a": entry("F128", [4], 0, 4)}, b"1234"), ["'a'", "unknown dtype 'F128'"]),
        (raw({"a": entry([], [4], 0, 4)}, b"1234"), ["'a'", "unknown dtype"]),
        (raw({"a\n": entry("U8", [True], 0, 1)}, b"1"), [r"'a\n'", "shape"]),
        (raw({"a": entry("U8", [-4], 0, 4)}, b"1234"), ["'a'", "shape"]),
        (raw({"a": entry("U8", [4.0], 0, 4)}, b"1234"), ["'a'", "shape"]),
        (raw({"a": entry("U8", 4, 0, 4)}, b"1234"), ["'a'", "shape"]),
        (raw({"a": entry("U8", [1] * 33, 0, 1)}, b"1"), ["'a'", "shape"]),
        (raw({"a": entry("U8", [2**64, 0], 0, 0)}), ["'a'", "shape"]),
        (raw({"a": entry("F32", [0, HUGE, HUGE], 0, 0)}), ["'a'", "too large"]),
        (raw({"a": entry("U8", [4], 0, 4, 4)}, b"1234"), ["'a'", "data_offsets"]),
        (raw({"a": entry("U8", [4], 4, 0)}, b"1234"), ["'a'", "data_offsets"]),
        (raw({"a": entry("U8", [4], -4, 0)}, b"1234"), ["'a'", "data_offsets"]),
        (raw({"a": entry("U8", [4], False, 4)}, b"1234"), ["'a'", "data_offsets"]),
        (raw({"a": {"dtype": "U8", "shape": [4]}}, b"1234"), ["'a'", "data_offsets"]),
        (raw({"a": entry("F32", [4], 0, 4)}, b"1234"), ["'a'", "needs 16 bytes, found 4"]),
        (raw({"a": entry("F4", [3], 0, 2)}, b"12"), ["'a'", "needs 1.5 bytes, found 2"]),
        (raw({"a": entry("F32", [2**32, 2**32], 0, 0)}), ["'a'", "too large"]),
        (raw({"a": entry("U8", [2**59], 0, 2**59)}, b"1"), ["'a'", "cut short", "found"]),
        (raw({"a": GOOD, "b": entry("U8", [4], 2, 6)}, b"123456"), ["'b'", "overlaps"]),
        (raw({"a": GOOD, "b": GOOD}, b"1234"), ["'b'", "overlaps"]),
        (raw({"a": GOOD, "b": entry("U8", [0], 2, 2)}, b"1234"), ["'b'", "overlaps"]),
        (raw({"a": GOOD, "b": entry("U8", [1], 5, 6)}, b"123456"), ["'b'", "unused bytes"]),
        (raw({"a": entry("U8", [3], 1, 4)}, b"1234"), ["'a'", "unused bytes"]),
        (raw({"a": GOOD}, b"12345"), ["expected 72 bytes", "found 73"]),
        (raw({"a": GOOD}, b"123"), ["expected 72 bytes, found 71", "'a'", "download"]),
        (raw({"x" * 5000: GOOD}, b"123"), ["..."]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_file(tmp_path: Path, data: bytes, words: list[str]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        TensorFiles(tmp_path)
    text = line(error)
    assert text.startswith(str(path))
    assert all(word in text.removeprefix(str(path)) for word in words), text


def test_repeated_tensor_name(tmp_path: Path) -> None:
    twice = json.dumps({"a": GOOD})[:-1] + ", " + json.dumps({"a": entry("U8", [4], 4, 8)})[1:]
    (tmp_path / "model.safetensors").write_bytes(raw(twice.encode(), b"12345678"))
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        TensorFiles(tmp_path)


def test_size_of_the_header_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    def file_of(length: int, size: int) -> None:
        with open(tmp_path / "model.safetensors", "wb") as file:
            file.write(raw({"a": entry("U8", [size - length - 8], 0, size - length - 8)}, b"", length))
            file.write(b" " * (length - file.tell() + 8) if length < 10**7 else b"")
            file.truncate(size)  # sparse: takes no space

    for length, size in (4_000_000, 5_000_000), (4_100_000, 4_100_000 * 32):
        file_of(length, size)
        assert TensorFiles(tmp_path).total_bytes == size - length - 8
    for length, size in (4_000_001, 5_000_000), (4_100_000, 4_100_000 * 31), (10**8 + 1, 10**10):
        file_of(length, size)
        with pytest.raises(CheckpointError, match="out of proportion"):
            TensorFiles(tmp_path)


# fuzz

FUZZ = int(os.environ.get("JAXHYBRID_FUZZ_EXAMPLES", "400"))
VALID = safetensors.numpy.save(
    {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(3, ml_dtypes.bfloat16),
        "f": np.ones(2, np.bool_),
    },
    {"format": "pt"},
)
WORDS = [
    b"0", b"9", b"-", b".5", b"e9", b"[", b"]", b"{", b"}", b",", b'"', b"null", b"true", b"NaN",
    b"F64", b"F4", b"BOOL", b"C64", b"\\ud800", b'"w":', b'"shape":[', b"18446744073709551616",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["put", "word", "cut", "drop", "repeat", "length"])):
            case "put":
                new = draw(st.binary(min_size=1, max_size=3))
                data[at : at + len(new)] = new
            case "word":
                new = draw(st.sampled_from(WORDS))
                data[at : at + draw(st.sampled_from([0, len(new)]))] = new
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 40))]
            case "repeat":
                piece = data[at : at + draw(st.integers(1, 40))]
                data[at:at] = piece
            case "length":
                data[:8] = struct.pack("<Q", draw(st.integers(0, len(data) + 9)))
        if draw(st.booleans()) and len(data) > 8:  # mend the length, to reach the later checks
            end = bytes(data).rfind(b"}", 8, len(VALID) + 60)
            data[:8] = struct.pack("<Q", max(end - 7, 0))
    return bytes(data)


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """Well-formed JSON that lies: about offsets, lengths, sizes and names."""
    data = draw(st.binary(max_size=24))
    number = st.integers(0, 32) | st.sampled_from(
        [-1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, True]
    )
    made = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["U8", "BF16", "F32", "F4", "C64", "X", ""]),
            "shape": st.lists(number, max_size=3),
            "data_offsets": st.lists(number, min_size=2, max_size=2),
        }
    )
    names = st.sampled_from(["a", "b", "__metadata__", "\ud800", "\0", "../x", "é" * 300])
    entries = draw(st.lists(st.tuples(names, made | st.none() | st.lists(number, max_size=2)), max_size=4))
    body = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in entries)  # names may repeat
    text = ("{" + body + "}").encode()
    if draw(st.integers(0, 3)) == 0:
        text = text.decode().encode(draw(st.sampled_from(["utf-16", "utf-8-sig", "cp500"])))
    length = draw(st.just(len(text)) | st.just(len(text)) | st.integers(0, 2**64 - 1))
    return raw(text, data, length)


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tracemalloc.start()
    yield tmp_path_factory.mktemp("fuzz")
    tracemalloc.stop()


@settings(max_examples=FUZZ, deadline=None, database=None)
@given(data=damaged() | hostile() | st.binary(max_size=64).map(lambda tail: VALID[:8] + tail))
def test_damaged_files_are_read_or_refused(fuzz_folder: Path, data: bytes) -> None:
    (fuzz_folder / "model.safetensors").write_bytes(data)
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            files = TensorFiles(fuzz_folder)
        finally:
            # what a header says must not decide how much memory is taken
            assert tracemalloc.get_traced_memory()[1] - before < 400_000 + 40 * len(data)
        total = 0
        for name in files.names():
            try:
                array = files.read(name)
            except CheckpointError as error:
                assert "which cannot be read" in str(error)
                continue
            total += array.nbytes
            assert array.shape == files.shape(name)
        assert total <= files.total_bytes <= len(data)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    # What is accepted here is a file that the library accepts too.
    safetensors.deserialize(data)


@settings(max_examples=60, deadline=None, database=None)
@given(
    made=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 3), max_size=4)),
        max_size=5,
    )
)
def test_round_trip_of_any_names_and_shapes(fuzz_folder: Path, made: dict[str, Any]) -> None:
    tensors = {
        name: np.arange(math.prod(shape)).reshape(shape).astype(kind) for name, (kind, shape) in made.items()
    }
    write_safetensors(fuzz_folder / "model.safetensors", tensors)
    files = TensorFiles(fuzz_folder)
    assert sorted(files.names()) == sorted(tensors)
    for name, array in tensors.items():
        same(files.read(name), array)
