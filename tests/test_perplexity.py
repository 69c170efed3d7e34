"""Perplexity: windows and the state that runs on, against the plain forward pass; the command."""

import importlib
import json
import math
from functools import partial

import jax
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import rolling, scoring
from jaxhybrid.errors import UsageError

command = importlib.import_module("jaxhybrid.perplexity")
FORWARD = jax.jit(jh.forward)
TEXT = "Nothing here is random: the quick brown fox — naïve, as ever — jumps over the lazy dog." * 2
FEW = {"batch_size": 2, "n_ubatch": 16}  # few shapes to compile
LAYERS = {"hybrid": ["mamba", "attention"], "recurrent": ["mamba", "mamba"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, layers in LAYERS.items():
        made[name] = tiny.write_folder(tmp_path_factory.mktemp(name), tiny.CONFIG | {"layer_types": layers})
    return made


@pytest.fixture(scope="module")
def models(folders):
    return {name: jh.load(folder) for name, folder in folders.items()}


def nll_of(model, window, first):
    """-log of the probability of window[first:], from the plain forward pass, padded to one shape."""
    ids = np.zeros(256, np.int32)
    ids[: len(window)] = window
    logprobs = np.asarray(jax.nn.log_softmax(FORWARD(model.params, ids[None])[0]))
    return -sum(float(logprobs[p - 1, window[p]]) for p in range(first, len(window)))


def by_hand(model, ids, ctx, stride, bos=()):
    """Window by window, as the definition says."""
    width, scored, total, n = ctx - len(bos), 0 if bos else 1, 0.0, 0
    while scored < len(ids):
        end = min(len(ids), width if n == 0 else scored + stride)
        window = [*bos, *ids[max(end - width, 0) : end]]
        total += nll_of(model, window, len(window) - (end - scored))
        scored, n = end, n + 1
    return total, n


@pytest.mark.parametrize(("ctx", "stride"), [(64, 32), (64, 63), (17, 5), (128, 100)])
def test_windows_begin_afresh_and_every_token_is_predicted_once(models, ctx, stride):
    model = models["hybrid"]
    ids = model.tokenizer.encode(TEXT)
    expected, n = by_hand(model, ids, ctx, stride)
    found = jh.perplexity(model, TEXT, ctx=ctx, stride=stride, **FEW)
    assert found.nll == pytest.approx(expected, rel=2e-6)
    assert (found.windows, found.n_tokens, found.n_scored) == (n, len(ids), len(ids) - 1)


def test_figures_follow_from_the_likelihood(models):
    found = jh.perplexity(models["hybrid"], TEXT, ctx=64, **FEW)
    assert found.n_bytes == len(TEXT.encode()) - 1 == found.n_scored  # tokens are bytes here
    assert found.perplexity == pytest.approx(math.exp(found.nll / found.n_scored))
    assert found.bits_per_token == pytest.approx(math.log2(found.perplexity)) == found.bits_per_byte
    ids = models["hybrid"].tokenizer.encode(TEXT)
    of_ids = jh.perplexity(models["hybrid"], ids, ctx=64, **FEW)
    assert of_ids.nll == found.nll and of_ids.bits_per_byte is None
    broken = rolling.Perplexity(nll=1e9, n_tokens=2, n_scored=1, n_bytes=0, windows=1, seconds=0.0)
    assert broken.perplexity == math.inf


def test_the_state_of_a_recurrent_model_runs_on(models):
    model = models["recurrent"]
    ids = model.tokenizer.encode(TEXT)
    found = jh.perplexity(model, TEXT, continuous=True, n_ubatch=16)
    assert found.windows == 1 and found.n_scored == len(ids) - 1
    assert found.nll == pytest.approx(nll_of(model, ids, 1), rel=2e-6)
    windows = jh.perplexity(model, TEXT, ctx=20, stride=10, n_ubatch=16)
    assert abs(windows.nll - found.nll) > 1e-4 * found.nll  # what is far away does matter
    with pytest.raises(UsageError, match="attends to everything before it"):
        jh.perplexity(models["hybrid"], TEXT, continuous=True)


def test_windows_of_attention_run_on_too(tmp_path):
    """Layers that see only a window of cells need no others, however long the text is."""
    config = {
        **{"model_type": "gemma3_text", "vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24},
        **{"sliding_window": 7, "layer_types": ["sliding_attention"] * 2, "max_position_embeddings": 512},
    }
    model = jh.load(tiny.write_folder(tmp_path, config))
    ids = model.tokenizer.encode(TEXT)
    found = jh.perplexity(model, TEXT, continuous=True, n_ubatch=16)
    assert found.nll == pytest.approx(nll_of(model, ids, 1), rel=2e-6)


def test_every_window_begins_with_bos_where_texts_do(models, folders, tmp_path):
    folder = tiny.write_folder(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<|user|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = jh.load(folder)
    ids = model.tokenizer.encode(TEXT)
    assert ids[0] == model.tokenizer.bos_id == 1
    found = jh.perplexity(model, TEXT, ctx=64, stride=32, **FEW)
    expected, n = by_hand(model, ids[1:], 64, 32, bos=(1,))
    assert found.nll == pytest.approx(expected, rel=2e-6) and found.windows == n
    assert found.n_scored == found.n_tokens == found.n_bytes == len(TEXT.encode())


def test_one_shape_is_compiled(models):
    model = models["hybrid"]
    programs = (scoring.advance, scoring._block_scores)
    before = [f._cache_size() for f in programs]  # type: ignore[attr-defined]
    for n in (150, 170, 91):
        jh.perplexity(model, TEXT[:n], ctx=40, stride=13, batch_size=2, n_ubatch=8)
    assert [f._cache_size() for f in programs] == [before[0] + 1, max(before[1], 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "too short, two are needed: tokens in it: 0"),
        ("a", {}, "too short, two are needed: tokens in it: 1"),
        ("abc", {"ctx": 1}, "ctx: 1 must be at least 2"),
        ("abc", {"ctx": 8, "stride": 8}, "stride: 8 must be from 1 to ctx - 1, which is 7"),
        ("abc", {"stride": 0}, "stride: 0"),
        ("abc", {"n_ubatch": 0}, "n_ubatch: 0 must be at least 1"),
        ("abc", {"continuous": True, "ctx": 4}, "leave ctx and stride"),
        ([1, 999], {}, "token 999 is outside"),
    ],
)
def test_wrong_use_is_named(models, text, options, message):
    with pytest.raises(UsageError, match=message):
        jh.perplexity(models["hybrid"], text, **options)


# ------------------------------------------------------------------------------------ the command


@pytest.fixture
def run(run_command):
    return partial(run_command, command)


def test_a_file_or_standard_input_one_line_or_json(run, models, folders, tmp_path):
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    options = ["--model", folders["hybrid"], "--ctx", 64, "--stride", 32, "--batch-size", 2, "--ubatch", 16]
    expected = jh.perplexity(models["hybrid"], TEXT, ctx=64, stride=32, **FEW)
    code, out, err = run(tmp_path / "text", *options)
    assert (code, err) == (0, "") and out.count("\n") == 1
    assert f"perplexity {expected.perplexity:.4f} | {expected.bits_per_token:.4f} bits per token" in out
    code, out, err = run(*options, "--json", stdin=TEXT.encode())
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["perplexity"] == pytest.approx(expected.perplexity)
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert (found["tokens"], found["windows"]) == (expected.n_tokens, expected.windows)


def test_an_adapter_changes_the_figures(run, folders, models, tmp_path):
    lora = jh.init_lora(models["hybrid"].params, jax.random.key(0))
    jh.save_adapter(tmp_path / "adapter", jax.tree.map(lambda x: x + 0.1, lora))
    adapted = jh.load(folders["hybrid"], adapter=tmp_path / "adapter")
    options = ["--ctx", 64, "--stride", 32, "--batch-size", 2, "--ubatch", 16, "--json"]
    _, out, _ = run(
        "--model", folders["hybrid"], "--adapter", tmp_path / "adapter", *options, stdin=TEXT.encode()
    )
    found, without = (jh.perplexity(m, TEXT, ctx=64, stride=32, **FEW) for m in (adapted, models["hybrid"]))
    assert json.loads(out)["nll"] == pytest.approx(found.nll, rel=1e-6) != pytest.approx(without.nll)


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], b"", "too short, two are needed: tokens in it: 0"),
        ([], b"caf\xe9", "standard input: byte 3 (0xe9) is not UTF-8"),
        (["nowhere.txt"], b"", "nowhere.txt: No such file"),
        (["/"], b"", "/: Is a directory"),
        (["--continuous"], b"some text", "attends to everything before it"),
        (["--ctx", "0"], b"some text", "ctx"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, folders, arguments, stdin, message):
    code, out, err = run("--model", folders["hybrid"], *arguments, stdin=stdin)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_weights_that_are_not_finite_give_null(run, folders, tmp_path, models):
    params = models["recurrent"].params
    spoilt = jax.tree.map(lambda a: a, params)
    spoilt["layers"]["0"]["mlp"] = jax.tree.map(lambda a: a * np.nan, spoilt["layers"]["0"]["mlp"])
    model = jh.Model(spoilt, folders["recurrent"], 0.0)
    with pytest.warns(UserWarning, match="not finite"):
        found = jh.perplexity(model, TEXT, ctx=64, **FEW)
    assert json.loads(json.dumps(command._as_json(found)))["perplexity"] is None
