"""Embeddings: the hidden states they come from, pooling, company, the command."""

import importlib
import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.errors import UsageError
from jaxhybrid.model import encode

command = importlib.import_module("jaxhybrid.embed")
NEAR = {"rtol": 0, "atol": 1e-5}  # float32 sums over other shapes
TEXTS = ["hello there", "a", "héllo wörld, a longer text", "a"]


def by_hand(model, text):
    """Hidden states [T, D], token by token in a cache of its own."""
    ids = model.tokenizer.encode(text)
    cache = jh.create_cache(model.params.hparams, len(ids), 1, cell_multiple=64)
    rows = []
    for token in ids:
        hidden, status, cache = encode(model.params, cache, jh.make_ubatch([[token]]))
        assert not np.any(status)
        rows.append(np.asarray(hidden[0]))
    return np.stack(rows)


def test_every_token_is_the_state_before_the_head(model):
    states = jh.embed(model, TEXTS[2], pooling="none", normalize=False, n_ubatch=8)
    np.testing.assert_allclose(states, by_hand(model, TEXTS[2]), **NEAR)
    ids = jnp.asarray([model.tokenizer.encode(TEXTS[2])])
    head = np.asarray(model.params["embed"]["weight"])  # tied
    np.testing.assert_allclose(states @ head.T, jh.forward(model.params, ids)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooling_in_company_and_alone(model, pooling):
    together = jh.embed(model, TEXTS, pooling=pooling, normalize=False)
    assert together.shape == (4, 16) and together.dtype == np.float32
    for text, vector in zip(TEXTS, together, strict=True):
        states = by_hand(model, text)
        expected = states.mean(axis=0) if pooling == "mean" else states[-1]
        np.testing.assert_allclose(vector, expected, **NEAR)
        np.testing.assert_allclose(jh.embed(model, text, pooling=pooling, normalize=False), vector, **NEAR)
    np.testing.assert_array_equal(together[1], together[3])
    in_batches = jh.embed(model, TEXTS, pooling=pooling, normalize=False, batch_size=2, n_ubatch=4)
    np.testing.assert_allclose(in_batches, together, **NEAR)


def test_lengths_are_one_unless_kept(model):
    vectors = jh.embed(model, TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    plain = jh.embed(model, TEXTS, normalize=False)
    np.testing.assert_allclose(plain / np.linalg.norm(plain, axis=1, keepdims=True), vectors, atol=1e-6)
    assert jh.embed(model, []).shape == (0, 16)
    lists = jh.embed(model, TEXTS, pooling="none")
    assert [len(v) for v in lists] == [len(model.tokenizer.encode(t)) for t in TEXTS]


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ("", {}, "prompt 1 is empty"),
        (["a", ""], {}, "prompt 2 is empty"),
        ([[1, 999]], {}, "token 999"),
        ("a", {"pooling": "max"}, "pooling: 'max' is not one of mean, last, none"),
        ("a", {"batch_size": 0}, "batch_size: 0"),
    ],
)
def test_wrong_use_is_named(model, texts, settings, message):
    with pytest.raises(UsageError, match=message):
        jh.embed(model, texts, **settings)


@pytest.fixture
def run(run_command):
    return partial(run_command, command)


def test_the_command_writes_json_lines_or_an_array(model, run, folder, tmp_path):
    expected = jh.embed(model, TEXTS[:3])
    code, out, err = run("--model", folder, *TEXTS[:3])
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(TEXTS[:3]))
    np.testing.assert_allclose([line["embedding"] for line in lines], expected, **NEAR)
    (tmp_path / "texts").write_text("\n".join(TEXTS[:3]))
    assert run("--model", folder, "--file", tmp_path / "texts", "--output", tmp_path / "v.npz") == (0, "", "")
    with np.load(tmp_path / "v.npz") as stored:
        np.testing.assert_allclose(stored["embeddings"], expected, **NEAR)
    code, out, _ = run("--model", folder, "--pooling", "last", "--no-normalize", stdin=TEXTS[0].encode())
    vector = jh.embed(model, TEXTS[0], pooling="last", normalize=False)
    np.testing.assert_allclose(json.loads(out)["embedding"], vector, **NEAR)


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], b"", "standard input: no texts, it is empty"),
        ([], b"\xff", "standard input: byte 0 (0xff) is not UTF-8"),
        (["--file", "nowhere.txt"], b"", "nowhere.txt: No such file"),
        (["a", "--file", "x"], b"", "choose one"),
        (["a", "--output", "x.json"], b"", "must end in .npz"),
        (["a", "--output", "x.npz", "--pooling", "none"], b"", "make no array"),
        (["a", "--output", "/no/such/folder/x.npz"], b"", "cannot be written"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, folder, arguments, stdin, message):
    code, out, err = run("--model", folder, *arguments, stdin=stdin)
    assert code in (1, 2) and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_the_module_is_a_function_too(model):
    np.testing.assert_array_equal(command(model, "a"), jh.embed(model, "a"))
