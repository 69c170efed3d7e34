"""A GGUF file's metadata as a config.json, and hparams as metadata."""

from __future__ import annotations

from typing import Any

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import show
from jaxhybrid.files.gguf.architectures import ARCHITECTURES, Architecture
from jaxhybrid.files.gguf.container import Container
from jaxhybrid.files.gguf.fields import Config, Meta
from jaxhybrid.hparams import Hparams


def architecture(name: str, path: object) -> Architecture:
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"{path}: architecture {show(name)} is not supported; known are {known}")
    return ARCHITECTURES[name]


def config_of(container: Container) -> tuple[str, Config]:
    """The architecture, and the configuration as config.json of the family has it."""
    meta = Meta(container)
    found = architecture(meta.arch, meta.path)
    if not meta.has("token_embd.weight"):
        raise CheckpointError(
            f"{meta.path}: tensor token_embd.weight is missing; use a file that holds a model"
        )
    config: Config = {"model_type": found.family if isinstance(found.family, str) else found.family(meta)}
    for field in found.fields:
        if field.name is not None and (value := meta.get(field.key, field.kind, field.default)) is not None:
            config[field.name] = value
    config["num_hidden_layers"] = meta.n_layers
    config["vocab_size"] = meta.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = not meta.has("output.weight")
    return meta.arch, config | found.config(meta)


def metadata_of(arch: str, hp: Hparams) -> dict[str, Any]:
    """What a file says of a model, keys with the architecture's name before them."""
    table = ARCHITECTURES[arch]
    found = {field.key: field.get(hp) for field in table.fields}
    found |= table.metadata(hp)
    return {f"{arch}.{key}": value for key, value in found.items() if value is not None}
