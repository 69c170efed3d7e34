"""Layer kinds from every encoding, predicates and shapes, before any weight exists."""

import dataclasses
import math

import pytest
import tiny

from jaxhybrid.errors import HparamsError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.hparams import Hparams, resolve_layers

pytestmark = pytest.mark.quick

ENCODINGS = {
    "attention_layer_indices": [2, 5],
    "layer_types": ["mamba", "mamba", "attention", "linear_attention", "recurrent", "full_attention"],
    "kv_heads": [0, 0, 4, 0, 0, 2],
    "recurrent_layers": [True, True, False, True, True, False],
    "interval": 3,
    "pattern": "MM*MM*",
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_gives_the_same_layers(encoding):
    assert resolve_layers(6, **{encoding: ENCODINGS[encoding]}) == ((2, 5), (0, 1, 3, 4))


def test_period_and_offset_and_all_encodings_together_agree():
    assert resolve_layers(6, period=3, offset=2, **ENCODINGS) == ((2, 5), (0, 1, 3, 4))


def test_layers_can_hold_both_or_neither():
    assert resolve_layers(3, layer_types=["hybrid", "mlp", "mamba"]) == ((0,), (0, 2))
    assert resolve_layers(4, pattern="M-E*") == ((3,), (0,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "layer_types: missing"),
        ({"attention_layer_indices": [6]}, "attention_layer_indices: 6 is out of range"),
        ({"attention_layer_indices": [-1]}, "attention_layer_indices: -1 is out of range"),
        ({"attention_layer_indices": [1, 1]}, "attention_layer_indices: a layer index occurs twice"),
        ({"attention_layer_indices": [True]}, "attention_layer_indices: True is not a layer index"),
        ({"layer_types": ["mamba"]}, "layer_types: 1 entries, but the model has 6 layers"),
        ({"layer_types": ["mamba"] * 5 + ["magic"]}, "layer_types: unknown layer kind 'magic' at layer 5"),
        ({"kv_heads": [0] * 5 + [-1]}, "kv_heads: -1 at layer 5"),
        ({"recurrent_layers": [True]}, "recurrent_layers: 1 entries"),
        ({"interval": 0}, "interval: 0 must be a whole number of at least 1"),
        ({"period": 3}, "period: needs offset beside it"),
        ({"offset": 3}, "offset: needs period beside it"),
        ({"period": 3, "offset": 3}, "offset: 3 is out of range for period=3"),
        ({"pattern": "MM*MMx"}, "pattern: unknown layer kind 'x'"),
        (ENCODINGS | {"interval": 2}, "interval: contradicts attention_layer_indices at layer 1"),
        (ENCODINGS | {"pattern": "MM*M-*"}, "pattern: contradicts attention_layer_indices at layer 4"),
    ],
)
def test_errors_name_the_field(given, message):
    with pytest.raises(HparamsError, match=message):
        resolve_layers(6, **given)


def test_errors_use_the_file_s_own_names():
    with pytest.raises(HparamsError, match="attn_layer_offset: 9 is out of range for attn_layer_period=8"):
        names = {"period": "attn_layer_period", "offset": "attn_layer_offset"}
        resolve_layers(8, period=8, offset=9, field_names=names)


def test_hparams_are_frozen_hashable_values():
    hp, same = tiny.hparams("hybrid"), tiny.hparams("hybrid")
    assert hp == same and hash(hp) == hash(same) and hp != tiny.hparams("recurrent")
    with pytest.raises(dataclasses.FrozenInstanceError):
        hp.d_model = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "recurrent", "hybrid"),
    [("attention", False, False), ("recurrent", True, False), ("hybrid", False, True)],
)
def test_predicates(kind, recurrent, hybrid):
    hp = tiny.hparams(kind)
    assert (hp.is_recurrent, hp.is_hybrid) == (recurrent, hybrid)
    for i in range(hp.n_layers):
        assert hp.is_attention_layer(i) == (i in tiny.KINDS[kind])
        assert hp.is_recurrent_layer(i) != hp.is_attention_layer(i)
        assert (hp.layers[i].attention is not None) == hp.is_attention_layer(i)


def test_state_shapes_are_known_without_weights_and_per_layer():
    wide = dataclasses.replace(tiny.MAMBA2, state_size=9)
    hp = dataclasses.replace(
        tiny.hparams("hybrid"), recurrent=(wide, tiny.MAMBA2), recurrent_layer_indices=(0, 1)
    )
    assert hp.is_recurrent_layer(1) and hp.is_attention_layer(1)
    assert hp.state_shapes(0) == {"conv": (3, 32 + 2 * 2 * 9), "ssm": (4, 8, 9)}
    assert hp.state_shapes(1) == {"conv": (3, 32 + 2 * 2 * 6), "ssm": (4, 8, 6)}
    assert hp.cell_shapes(1) == ((2, 4), (2, 4))
    with pytest.raises(HparamsError, match="layer 0 holds no K/V"):
        hp.cell_shapes(0)
    neither = dataclasses.replace(hp, attention_layer_indices=(), recurrent_layer_indices=(0,))
    assert neither.layers[1].attention is None and neither.layers[1].recurrent is None
    with pytest.raises(HparamsError, match="layer 1 holds no recurrent state"):
        neither.state_shapes(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 0}, "n_layers: 0 must be at least 1"),
        ({"attention": None}, "attention: missing for layer 1"),
        ({"recurrent": None}, "recurrent: missing for layer 0"),
        ({"recurrent": (tiny.MAMBA2,)}, "recurrent: 1 entries for n_layers=2"),
        ({"recurrent_layer_indices": (0, 7)}, "recurrent_layer_indices: 7 is out of range"),
    ],
)
def test_contradictory_hparams_are_refused(change, message):
    with pytest.raises(HparamsError, match=message):
        Hparams(**(dataclasses.asdict(tiny.hparams("hybrid")) | typed() | change))


def typed():
    """What asdict flattens, as the values they were."""
    hp = tiny.hparams("hybrid")
    return {name: getattr(hp, name) for name in ("attention", "recurrent", "mlp", "moe")}


# ------------------------------------------------------------------------------------- config.json


def without(config, name):
    return {k: v for k, v in config.items() if k != name}


def test_both_spellings_of_a_configuration_give_the_same_hparams():
    old = without(tiny.CONFIG, "layer_types") | {"layers_block_type": ["mamba", "attention"]}
    new = tiny.CONFIG | {"layer_types": ["linear_attention", "full_attention"]}
    assert hparams_from_config(old) == hparams_from_config(tiny.CONFIG) == hparams_from_config(new)
    rope = {"position_embedding_type": "rope"}
    old_rope = hparams_from_config(tiny.CONFIG | rope | {"rope_theta": 5e5})
    parameters = {"rope_theta": 5e5, "rope_type": "default"}
    assert old_rope == hparams_from_config(tiny.CONFIG | rope | {"rope_parameters": parameters})
    assert old_rope.layers[1].attention.rope.theta == 5e5


def test_dt_limits():
    assert hparams_from_config(tiny.CONFIG).layers[0].recurrent.dt_max == math.inf
    limited = hparams_from_config(tiny.CONFIG | {"time_step_limit": [0.01, 0.2]})
    assert limited.layers[0].recurrent.dt_min == 0.01 and limited.layers[0].recurrent.dt_max == 0.2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "elephant"}, "elephant"),
        (without(tiny.CONFIG, "hidden_size"), "hidden_size"),
        (tiny.CONFIG | {"hidden_size": "wide"}, "hidden_size"),
        (tiny.CONFIG | {"num_hidden_layers": 3}, "layer_types: 2 entries"),
        (tiny.CONFIG | {"mamba_n_heads": 5}, "mamba_n_heads: 5 heads"),
        (tiny.CONFIG | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (tiny.CONFIG | {"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi'"),
        (tiny.CONFIG | {"hidden_act": "nothing"}, "nothing"),
        (tiny.CONFIG | {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok: 3"),
    ],
)
def test_configurations_that_cannot_be_read_name_the_field(config, message):
    with pytest.raises(HparamsError, match=message) as caught:
        hparams_from_config(config)
    assert "\n" not in str(caught.value)
