"""The experiments in examples/, in a small setting: their pictures, and what they claim."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import recall  # noqa: E402
import states  # noqa: E402
import time_travel  # noqa: E402

PNG = b"\x89PNG"


def test_a_row_of_recall_asks_for_every_pair_once():
    sizes = jnp.array([2, 16, 5])
    tokens, answers, lengths = map(np.asarray, recall.rows(jax.random.key(3), sizes))
    for row, n in enumerate(np.asarray(sizes)):
        listed = dict(tokens[row, : 2 * n].reshape(n, 2).tolist())
        asked = tokens[row, 2 * n : 3 * n].tolist()
        assert len(listed) == n and sorted(asked) == sorted(listed)
        assert answers[row, 2 * n : 3 * n].tolist() == [listed[key] for key in asked]
        assert (answers[row, : 2 * n] == -1).all() and (answers[row, 3 * n :] == -1).all()
        assert lengths[row] == 3 * n
        assert max(listed) < recall.N_KEYS <= min(listed.values())


def test_recall_trains_and_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "PLACES", ((0, 1),))
    monkeypatch.setattr(recall, "N_LAYERS", 2)
    monkeypatch.setattr(recall, "SIZES", (1, 2))
    (untrained,) = recall.measure(recall.PLACES, steps=0, batch=8, seeds=1)
    (record,) = recall.main(["--out", str(tmp_path), "--steps", "150", "--batch", "64"])
    # two layers of attention and one pair: one of 32 values by chance
    assert untrained["accuracy"][1] < 0.15 < 0.3 < record["accuracy"][1]
    assert (tmp_path / "recall.png").read_bytes().startswith(PNG)
    assert json.loads((tmp_path / "recall.json").read_text())[0]["attention"] == [0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.write_folder(tmp_path_factory.mktemp("model")))


def test_time_travel_agrees_with_computing_again_and_shares_memory(folder, tmp_path):
    options = ["--branches", "4", "--lengths", "100", "--repeats", "1"]
    (record,) = time_travel.main(["--out", str(tmp_path), "--model", folder, *options])
    assert record["difference"] < 1e-4
    # three copies of the prompt's K/V less
    assert record["bytes shared"] < record["bytes apart"]
    assert record["bytes of a checkpoint"] < record["bytes shared"] / 4
    assert (tmp_path / "time_travel.png").read_bytes().startswith(PNG)


@pytest.fixture(scope="module")
def constant():
    """A small hybrid whose dt does not depend on the token, so that its decays are known."""
    params = tiny.params("hybrid")
    layer = params["layers"]["0"]["mamba2"]
    layer = layer | {"in_proj": layer["in_proj"].at[-tiny.MAMBA2.n_heads :].set(0)}
    layers = params["layers"] | {"0": params["layers"]["0"] | {"mamba2": layer}}
    return params.replace(tensors=params.tensors | {"layers": layers}), layer


def test_decays_are_those_of_the_parameters(constant):
    params, layer = constant
    found = states.decays(params, np.array([3, 1, 4, 1, 5]))
    expected = np.exp(-np.exp(layer["a_log"]) * jax.nn.softplus(layer["dt_bias"]))
    np.testing.assert_allclose(found, np.broadcast_to(expected, (4, 1, 4)), rtol=1e-4, atol=1e-6)
    halves = expected ** states.half_lives(found)[0]
    np.testing.assert_allclose(halves, 0.5, rtol=1e-3)


def test_editing_changes_one_sequence_alone(constant):
    params, _ = constant
    cache = jh.create_cache(params.hparams, 128, 2)
    _, cache = jh.decode(params, cache, jh.Batch([1, 2, 3, 4], seq_ids=[(0,), (0,), (1,), (1,)]))
    after = states.edited(cache, 1, lambda s: jax.tree.map(jnp.zeros_like, s))
    assert float(jnp.abs(states.ssm(cache, 1)).max()) > 0 == float(jnp.abs(states.ssm(after, 1)).max())
    np.testing.assert_array_equal(states.ssm(after, 0), states.ssm(cache, 0))
    assert jh.seq_pos_max(after, 1) == jh.seq_pos_max(cache, 1) == 1


def test_a_state_is_worth_something_and_that_of_the_same_text_as_much(constant):
    params, _ = constant
    tokens = np.tile(np.random.default_rng(0).integers(0, tiny.VOCAB, 12), (2, 1))
    found = states.damage(params, tokens, 6)
    assert found["swap"] == pytest.approx(0, abs=1e-6)
    assert abs(found["zero"][0]) > 1e-3


def test_a_probe_finds_the_token_that_is_in_a_state_and_no_other(constant, monkeypatch):
    params, _ = constant
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, tiny.VOCAB, (64, 24))
    features = draw.normal(size=(64, 24, 1, states.WIDTH)).astype(np.float32)
    features[:, 2:, 0, : tiny.D_MODEL] = np.asarray(params["embed"]["weight"])[tokens[:, :-2]]
    monkeypatch.setattr(states, "states_of_texts", lambda *_: features)
    monkeypatch.setattr(states, "PENALTY", 0.3)
    (scores,) = states.probe(params, tokens, [0, 2, 4])
    assert scores[1] > 0.5 and max(scores[0], scores[2]) < 0.05


def test_states_are_probed_and_drawn(folder, tmp_path, monkeypatch):
    # these have tests of their own
    monkeypatch.setattr(states, "decays", lambda *_: np.full((3, 1, 4), 0.5))
    monkeypatch.setattr(states, "damage", lambda *_: {"zero": np.ones(1), "swap": np.ones(1)})
    found = states.main(["--out", str(tmp_path), "--model", folder, "--rows", "8", "--length", "12"])
    assert found["layers"] == [0] and found["half-lives"] == [pytest.approx([1, 1, 1, 1])]
    assert np.shape(found["probe"]) == (1, len(found["distances"])) and np.isfinite(found["probe"]).all()
    assert (tmp_path / "states.png").read_bytes().startswith(PNG)
