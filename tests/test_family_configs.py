"""Configurations of families: the spellings that files on the hub have, and what is refused."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxhybrid as jh
from jaxhybrid.errors import HparamsError
from jaxhybrid.families import FAMILIES, TEXT_OF, hparams_from_config
from jaxhybrid.files.config import read_config
from jaxhybrid.hparams import AttentionHparams, Mamba2Hparams

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"
MODELS = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())
OLD_WORDS = {"linear_attention": "mamba", "full_attention": "attention"}


def config(name: str) -> dict[str, Any]:
    return copy.deepcopy(read_config(GOLDEN / name))


def test_every_family_has_a_reference():
    assert {config(name)["model_type"] for name in MODELS} == set(FAMILIES)


def flat_rope(c: dict[str, Any]) -> None:
    """`rope_theta` beside the other fields, as before transformers 5."""
    c |= c.pop("rope_parameters")
    c.pop("rope_type")


def old_words(field: str) -> Any:
    def change(c: dict[str, Any]) -> None:
        words = c.pop("layers_block_type", None) or c.pop("layer_types")
        c[field] = [OLD_WORDS.get(word, word) for word in words]

    return change


def nemotron_pattern(c: dict[str, Any]) -> None:
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    c["hybrid_override_pattern"] = "".join(letters[w] for w in c.pop("layers_block_type"))


def kimi_lists(c: dict[str, Any]) -> None:
    words = c.pop("layer_types")
    c["linear_attn_config"] = {
        "kda_layers": [i + 1 for i, w in enumerate(words) if w == "linear_attention"],
        "full_attn_layers": [i + 1 for i, w in enumerate(words) if w == "full_attention"],
        "head_dim": c.pop("linear_head_dim"),
        "num_heads": c.pop("linear_num_heads"),
        "short_conv_kernel_size": c.pop("linear_conv_kernel_dim"),
    }


def minimax_numbers(c: dict[str, Any]) -> None:
    c["attn_type_list"] = [int(w == "full_attention") for w in c.pop("layer_types")]
    for new, old in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for factor in ("alpha", "beta"):
            c[f"layernorm_{old}_{factor}_factor"] = c.pop(f"{new}_{factor}_factor")


def conv_indices(c: dict[str, Any]) -> None:
    c["full_attn_idxs"] = [i for i, w in enumerate(c.pop("layer_types")) if w == "full_attention"]
    c["block_ff_dim"] = c.pop("intermediate_size")
    c["tie_embedding"] = c.pop("tie_word_embeddings")


SPELLINGS = {
    "bamba": [flat_rope],
    "falcon_h1": [flat_rope],
    "granitemoehybrid": [old_words("layer_types"), old_words("layers_block_type")],
    "kimi_linear": [kimi_lists],
    "lfm2": [conv_indices, flat_rope],
    "minimax": [minimax_numbers, flat_rope],
    "nemotron_h": [nemotron_pattern, old_words("layers_block_type")],
    "nemotron_h_moe": [nemotron_pattern],
    "qwen3": [flat_rope],
    "zamba": [old_words("layers_block_type")],
    "zamba2": [old_words("layers_block_type")],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(n, f, id=f"{n}-{f.__name__}") for n, fs in SPELLINGS.items() for f in fs],
)
def test_other_spellings_mean_the_same(name, change):
    c = config(name)
    expected = hparams_from_config(config(name))
    change(c)
    assert c != config(name)
    assert hparams_from_config(c) == expected


REFUSED = [
    ("bamba", {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
    ("bamba", {"attn_layer_indices": [9]}, "attn_layer_indices: 9 is out of range"),
    ("bamba", {"mamba_n_heads": 7}, "mamba_n_heads: 7 heads"),
    ("bamba", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_scaling: kind 'dynamic'"),
    ("bamba", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.1}}, "partial_rotary"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers: .* must be 5 numbers"),
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported by recurrent mixers"),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "what"]}, "layers_block_type: unknown.*'what'"),
    ("nemotron_h_moe", {"num_experts_per_tok": 99}, "num_experts_per_tok: 99 exceeds n_routed_experts"),
    ("nemotron_h", {"sliding_window": 8}, "sliding_window: 8 is not supported"),
    ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types: must be a list of"),
    ("qwen3_next", {"mlp_only_layers": "all"}, "mlp_only_layers: 'all' must be a list of whole numbers"),
    ("qwen3_5_text", {"rms_norm_eps": "small"}, "rms_norm_eps: 'small' must be a number"),
    ("lfm2", {"layer_types": None}, "layer_types: missing"),
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": [0], "full_attn_layers": [1]}},
        "linear_attn_config",
    ),
    ("bailing_hybrid", {"kda_safe_gate": False}, "kda_safe_gate: false is not supported"),
    ("jamba", {"attn_layer_offset": 99}, "attn_layer_offset: 99 is out of range"),
    ("zamba2", {"add_bias_linear": True}, "add_bias_linear: true is not supported"),
    ("minimax", {"hidden_size": None}, "hidden_size: missing"),
    ("recurrent_gemma", {"block_types": ["attention", "nothing"], "layers_block_type": None}, "block_types"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(name, change, message):
    with pytest.raises(HparamsError, match=message):
        hparams_from_config(config(name) | change)


def test_longrope_chooses_its_factors_by_the_context():
    hp = hparams_from_config(config("longrope_rope"))

    def rope(hparams: Any) -> Any:
        attention = hparams.layers[0].attention
        assert isinstance(attention, AttentionHparams) and attention.rope is not None
        return attention.rope

    assert rope(hp).scaling == "longrope" and not rope(hp).long
    original = rope(hp).original_context
    assert not rope(hp.for_context(original)).long
    assert rope(hp.for_context(original + 1)).long
    assert hparams_from_config(config("llama")).for_context(10**6) == hparams_from_config(config("llama"))


def test_a_dt_floor_is_of_mamba_2_layers():
    hp = hparams_from_config(config("nemotron_h"))
    recurrent = next(layer.recurrent for layer in hp.with_dt_floor(0.1).layers if layer.recurrent)
    assert isinstance(recurrent, Mamba2Hparams) and recurrent.dt_floor == 0.1
    assert hp.with_dt_floor(0.1).with_dt_floor(None) == hp


INSIDE = [
    ("qwen3_5_text", "qwen3_5", "model.language_model.", "model.visual.blocks.0.norm1.weight"),
    ("qwen3_5_moe_text", "qwen3_5_moe", "model.language_model.", "model.visual.patch_embed.proj.weight"),
    ("gemma3_text", "gemma3", "language_model.model.", "vision_tower.vision_model.post_layernorm.weight"),
    ("lfm2", "lfm2_vl", "model.language_model.", "model.vision_tower.vision_model.post_layernorm.weight"),
]


def test_every_vision_language_model_is_tried():
    assert {kind for _, kind, _, _ in INSIDE} == set(TEXT_OF)


@pytest.mark.parametrize(("name", "kind", "prefix", "other"), INSIDE)
@pytest.mark.filterwarnings("error")
def test_the_text_part_of_a_vision_language_model(name, kind, prefix, other, tmp_path):
    text = config(name)
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / name, folder)
    whole = {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 4}}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(GOLDEN / name / "model.safetensors")
    renamed = {k.replace("model.", prefix, 1) if k.startswith("model.") else k: v for k, v in tensors.items()}
    save_file(renamed | {other: np.zeros(3, np.float32)}, folder / "model.safetensors", {"format": "pt"})
    loaded, expected = jh.load_params(folder), jh.load_params(GOLDEN / name)
    assert loaded.hparams == expected.hparams
    jax.tree.map(np.testing.assert_array_equal, loaded.tensors, expected.tensors)


@pytest.mark.parametrize("name", MODELS)
def test_written_and_read_again_nothing_changes(name, tmp_path):
    params = jh.load_params(GOLDEN / name)
    jh.save_params(params, tmp_path / "copy", config(name))
    again = jh.load_params(tmp_path / "copy")
    assert again.hparams == params.hparams
    jax.tree.map(np.testing.assert_array_equal, again.tensors, params.tensors)
    written, original = (load_file(f / "model.safetensors") for f in (tmp_path / "copy", GOLDEN / name))
    assert {k: v.shape for k, v in written.items()}.items() <= {
        k: v.shape for k, v in original.items()
    }.items()
