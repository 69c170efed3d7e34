"""Models of a few thousand parameters, one for each kind of memory, with random weights."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxhybrid.families import hparams_from_config
from jaxhybrid.files import save_params
from jaxhybrid.hparams import AttentionHparams, Hparams, Mamba2Hparams, MlpHparams, RopeHparams
from jaxhybrid.model import init_params
from jaxhybrid.params import Params

VOCAB, D_MODEL = 50, 16
ATTENTION = AttentionHparams(n_heads=4, n_kv_heads=2, head_dim=4, scale=0.5, rope=RopeHparams(dim=4))
MAMBA2 = Mamba2Hparams(n_heads=4, head_dim=8, state_size=6, n_groups=2, conv_kernel=4, chunk=4)
KINDS = {"attention": (0, 1), "recurrent": (), "hybrid": (1,)}
"""Attention layers of each two-layer model."""
WINDOW = 5
WINDOWED = {"sliding_window": (0, 1), "hybrid_sliding_window": (1, 2)}
"""Attention layers of the models of which layer 1 has a sliding window."""


def hparams(kind: str) -> Hparams:
    """kind: one of KINDS or WINDOWED."""
    if kind in WINDOWED:
        return dataclasses.replace(
            hparams("hybrid"),
            n_layers=2 if kind == "sliding_window" else 3,
            attention_layer_indices=WINDOWED[kind],
            recurrent_layer_indices=() if kind == "sliding_window" else (0,),
            attention=(ATTENTION, dataclasses.replace(ATTENTION, window=WINDOW), ATTENTION)[
                : 2 if kind == "sliding_window" else 3
            ],
        )
    return Hparams(
        family="llama",
        n_layers=2,
        d_model=D_MODEL,
        vocab_size=VOCAB,
        attention_layer_indices=KINDS[kind],
        attention=ATTENTION,
        recurrent=MAMBA2,
        mlp=MlpHparams(24),
        tie_embeddings=True,
    )


@cache
def params(kind: str) -> Params:
    """Every tensor random, so that none is left at a value that hides a mistake."""
    made = init_params(hparams(kind), jax.random.key(7))
    leaves, tree = jax.tree.flatten(made)
    noise = jax.random.split(jax.random.key(8), len(leaves))
    leaves = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, noise, strict=True)
    ]
    return jax.tree.unflatten(tree, [leaf.astype(jnp.float32) for leaf in leaves])


CONFIG = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "position_embedding_type": "nope",
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 24,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}
{{ '<|' + message.role + '|>' + message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def write_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A hybrid model in Hugging Face layout whose tokens are bytes, after three special ones."""
    config = CONFIG if config is None else config
    hp = hparams_from_config(config)
    save_params(init_params(hp, jax.random.key(5)), folder, config)
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
