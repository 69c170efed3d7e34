"""Where each tensor of a Hugging Face folder lies in a GGUF file, and how it was changed on the way.

Names are those of the gguf package's tables; here is what differs from a renaming. Facts: llama.cpp's
conversion scripts. A GGUF tensor is seen as rows of its innermost axis, which quantized blocks never cross.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from gguf import get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES

from jaxhybrid.errors import CheckpointError
from jaxhybrid.families import tensors_of
from jaxhybrid.files.gguf.container import StoredTensor
from jaxhybrid.files.header import AGAIN
from jaxhybrid.hparams import AttentionHparams, GatedDeltaHparams, Hparams, Mamba2Hparams, MlaHparams

Order = np.ndarray


@dataclass(frozen=True)
class Part:
    """Rows [first, first + count) of GGUF tensor `name`, whose whole shape is `shape`.

    swapped: the rows belong to the tensor with its last two axes exchanged.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    count: int
    swapped: bool = False


@dataclass(frozen=True)
class Change:
    """What was done to our values: stored is `by` times their exp ("exp"), `by` more ("plus"), or `by` times
    them ("times"; a number, or one for each row)."""

    kind: str
    by: float | np.ndarray = 1.0

    def undo(self, stored: np.ndarray) -> np.ndarray:
        match self.kind:
            case "exp":
                return np.log(np.float64(stored) * self.by)
            case "plus":
                return stored - self.by
            case _:
                return stored / self.by

    def apply(self, ours: np.ndarray) -> np.ndarray:
        match self.kind:
            case "exp":
                return self.by * np.exp(np.float64(ours))
            case "plus":
                return ours + self.by
            case _:
                return ours * self.by


@dataclass(frozen=True)
class Place:
    """One of our tensors of `shape`: the rows of its parts one after the other, rows and columns taken in an
    order (ours = stored[rows][:, columns]), the change undone."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rows: Order | None = None
    columns: Order | None = None
    change: Change | None = None

    @property
    def n_columns(self) -> int:
        """Of the rows that move as wholes: the last axis, 1 in a vector."""
        return 1 if len(self.shape) == 1 else self.shape[-1]

    @cached_property
    def is_whole_rows(self) -> bool:
        """Whether blocks of quantized weights survive: rows move, their contents do not change."""
        return self.columns is None and self.change is None and not any(part.swapped for part in self.parts)


def places(
    arch: str, hp: Hparams, stored: Mapping[str, StoredTensor] | None = None, whole_heads: bool = False
) -> dict[str, Place]:
    """The place of every tensor that the family of `hp` reads; `stored`: names in the file, where one exists.

    whole_heads: pairs were made neighbours over the whole head even where only a part of it is rotated.
    llama.cpp's script does that (Bamba), and its program then rotates other pairs than the model did.
    """
    number = next((key for key, name in MODEL_ARCH_NAMES.items() if name == arch), None)
    if number is None:
        raise CheckpointError(f"architecture {arch} is unknown to the installed gguf package; update it")
    names = get_tensor_name_map(number, hp.n_layers)
    found: dict[str, Place] = {}
    if stored is not None:
        _check_experts(hp, stored)
    most = None if stored is None else sum(math.prod(tensor.shape) for tensor in stored.values())
    for source in tensors_of(hp).values():
        for name, shape in zip(source.names, source.shapes, strict=True):
            if most is not None and math.prod(shape) > most:
                raise CheckpointError(
                    f"tensor {name} of shape {shape} is larger than the whole file; {AGAIN}"
                )
            found[name] = _Rules(arch, hp, stored or {}, whole_heads).place(name, shape, names)
    return found


def _check_experts(hp: Hparams, stored: Mapping[str, StoredTensor]) -> None:
    """Names are made for each expert, so that there must be as many as matrices in the files."""
    counts = [layer.moe.n_experts for layer in hp.layers if layer.moe is not None]
    most = sum(tensor.shape[0] for tensor in stored.values() if len(tensor.shape) == 3)
    if (n := sum(n for n in counts if n > 1)) > most:
        raise CheckpointError(f"the metadata asks for {n} experts, the tensors hold {most}; {AGAIN}")


_EXPERT = re.compile(r".*\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
_EXPERTS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
ROTATED = "jaxhybrid.neighbours"
"""An entry of this package's files, "rotated": pairs are neighbours in the rotated part of a head only."""
_PERMUTED = ("llama", "granite", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures whose rotated pairs are neighbours, not halves (also where nothing is rotated)."""
_TILED = ("qwen35", "qwen35moe")
"""Architectures whose value heads are ordered by their number in a group first."""


class _Rules:
    def __init__(self, arch: str, hp: Hparams, stored: Mapping[str, StoredTensor], whole_heads: bool) -> None:
        self.arch, self.hp, self.stored, self.whole_heads = arch, hp, stored, whole_heads

    def place(self, name: str, shape: tuple[int, ...], names: object) -> Place:
        block = re.search(r"\.layers\.(\d+)\.", name)
        layer = int(block[1]) if block else None
        parts, rows = self.parts(name, shape, layer, names)
        columns = None
        if layer is not None:
            rows = self.rows(name, layer) if rows is None else rows
            columns = self.columns(name, layer)
        return Place(shape, parts, rows, columns, self.change(name, layer))

    def parts(
        self, name: str, shape: tuple[int, ...], layer: int | None, names: object
    ) -> tuple[tuple[Part, ...], Order | None]:
        """Parts, and the order of their rows where splitting changed it."""
        blk = f"blk.{layer}"
        if expert := _EXPERT.fullmatch(name):
            return (self.expert(layer, int(expert[2]), _EXPERTS[expert[3]], shape),), None
        if name.endswith(".dt_bias"):
            return (_whole(f"{blk}.ssm_dt.bias", shape),), None
        if latent := re.search(r"\.fc(1|2)_latent_proj\.weight$", name):  # not in the tables of gguf 0.18
            return (_whole(f"{blk}.ffn_latent_{'down' if latent[1] == '1' else 'up'}.weight", shape),), None
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            return (_whole(f"{blk}.exp_probs_b.bias", shape),), None
        if name.endswith("kv_b_proj.weight") and f"{blk}.attn_kv_b.weight" not in self.stored:
            return self.latent(blk, layer)
        if name.endswith("in_proj_qkvz.weight"):
            return self.packed(blk, layer, shape)
        if name.endswith("shared_mlp.input_linear.weight"):
            shared = "_shexp" if self.moe(layer) is not None else ""
            half = (shape[0] // 2, shape[1])
            return tuple(_whole(f"{blk}.ffn_{kind}{shared}.weight", half) for kind in ("gate", "up")), None
        if name.endswith("shared_mlp.output_linear.weight") and self.moe(layer) is None:
            return (_whole(f"{blk}.ffn_down.weight", shape),), None
        if name.endswith("block_sparse_moe.input_linear.weight"):
            n, both, d = shape
            whole, half = (n, both // 2, d), both // 2
            return tuple(
                Part(f"{blk}.ffn_{kind}_exps.weight", whole, e * half, half)
                for e in range(n)
                for kind in ("gate", "up")
            ), None
        if name.endswith("block_sparse_moe.output_linear.weight"):
            return (_whole(f"{blk}.ffn_down_exps.weight", shape),), None
        if name.endswith((".conv1d.weight", "conv.conv.weight")) or re.search(r"_conv1d\.weight$", name):
            shape = (shape[0], 1, shape[-1]) if self.arch == "kimi-linear" else (shape[0], shape[-1])
        if name.endswith((".A_log", ".mixer.D", ".mamba.D")) and self.recurrent_heads(layer):
            shape = (math.prod(shape), 1)
        if re.search(r"\.(mixer|mamba)\.norm\.weight$", name) and (groups := self.groups(layer)) is not None:
            shape = (groups, shape[0] // groups)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))  # type: ignore[attr-defined]
        if found is None:
            raise CheckpointError(f"GGUF files of architecture {self.arch} have no place for tensor {name}")
        return (_whole(found, shape),), None

    def expert(self, layer: int | None, e: int, kind: str, shape: tuple[int, ...]) -> Part:
        moe = self.moe(layer)
        assert moe is not None
        both = f"blk.{layer}.ffn_gate_up_exps.weight"
        if kind != "down" and both in self.stored:
            first = (2 * e + (kind == "up")) * shape[0]
            return Part(both, (moe.n_experts, 2 * shape[0], shape[1]), first, shape[0])
        name = f"blk.{layer}.ffn_{kind}_exps.weight"
        return Part(name, (moe.n_experts, *shape), e * shape[0], shape[0])

    def latent(self, blk: str, layer: int | None) -> tuple[tuple[Part, ...], Order]:
        """Keys (each head's matrix transposed) and values apart; ours has them head by head."""
        hp = self.hp.layers[layer or 0].attention
        assert isinstance(hp, MlaHparams)
        heads, nope, value = hp.n_heads, hp.nope_dim, hp.value_dim
        keys = Part(f"{blk}.attn_k_b.weight", (heads, hp.kv_rank, nope), 0, heads * nope, swapped=True)
        values = _whole(f"{blk}.attn_v_b.weight", (heads, value, hp.kv_rank))
        first = np.arange(heads * nope).reshape(heads, nope)
        second = heads * nope + np.arange(heads * value).reshape(heads, value)
        return (keys, values), np.concatenate([first, second], axis=1).reshape(-1)

    def packed(self, blk: str, layer: int | None, shape: tuple[int, ...]) -> tuple[tuple[Part, ...], Order]:
        """[q | k | v] and the gate apart; ours has q, k, v and gate of one key head after the other."""
        hp = self.delta(layer)
        assert hp is not None
        per_key = hp.n_heads // hp.n_key_heads * hp.value_dim
        widths = (hp.key_dim, hp.key_dim, per_key, per_key)
        starts = np.cumsum([0, *(hp.n_key_heads * w for w in widths)])
        pieces = [
            first + np.arange(hp.n_key_heads * w).reshape(hp.n_key_heads, w)
            for first, w in zip(starts[:-1], widths, strict=True)
        ]
        parts = (
            _whole(f"{blk}.attn_qkv.weight", (hp.conv_channels, shape[1])),
            _whole(f"{blk}.attn_gate.weight", (hp.values, shape[1])),
        )
        return parts, np.concatenate(pieces, axis=1).reshape(-1)

    def rows(self, name: str, layer: int) -> Order | None:
        attention = self.hp.layers[layer].attention
        if self.arch in _PERMUTED and isinstance(attention, AttentionHparams):
            heads = {"q_proj": attention.n_heads, "k_proj": attention.n_kv_heads}
            for part, n in heads.items():
                if f".{part}." in name:
                    size = attention.head_dim
                    turned = size if self.whole_heads or attention.rope is None else attention.rope.dim
                    each = np.arange(size)
                    each[:turned] = each[:turned].reshape(turned // 2, 2).T.reshape(-1)
                    return (size * np.arange(n)[:, None] + each).reshape(-1)
        hp = self.tiled(name, layer)
        if hp is None:
            return None
        kind = name.rsplit("linear_attn.", 1)[1]
        if kind.startswith(("in_proj_qkv.", "conv1d.")):
            return np.concatenate([np.arange(2 * hp.keys), 2 * hp.keys + _untiled(hp, hp.value_dim)])
        if kind.startswith("in_proj_z."):
            return _untiled(hp, hp.value_dim)
        if kind.startswith(("in_proj_a.", "in_proj_b.", "A_log", "dt_bias")):
            return _untiled(hp, 1)
        return None

    def columns(self, name: str, layer: int) -> Order | None:
        hp = self.tiled(name, layer)
        return _untiled(hp, hp.value_dim) if hp is not None and ".out_proj." in name else None

    def change(self, name: str, layer: int | None) -> Change | None:
        if name.endswith(".A_log"):
            return Change("exp", -1.0)
        offset = self.arch == "gemma3" or self.arch.startswith(("qwen3next", "qwen35"))
        if offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return Change("plus", 1.0)
        return self.folded(name, layer) if self.arch == "falcon-h1" else None

    def folded(self, name: str, layer: int | None) -> Change | None:
        """Falcon-H1's multipliers are in its weights; a configuration read from a file has none left."""
        hp = self.hp
        mixer, kind = hp.layers[layer or 0], name.rsplit(".", 2)[-2]
        attention, ssm, mlp = mixer.attention, mixer.recurrent, mixer.mlp
        assert isinstance(attention, AttentionHparams) and isinstance(ssm, Mamba2Hparams) and mlp is not None
        into = attention.in_multiplier
        factors: dict[str, float | np.ndarray] = {
            "q_proj": into,
            "k_proj": into * attention.key_multiplier,
            "v_proj": into,
            "o_proj": attention.out_multiplier,
            "gate_proj": mlp.gate_multiplier,
            "down_proj": mlp.out_multiplier,
            "out_proj": ssm.out_multiplier,
            "embed_tokens": hp.embedding_multiplier,
            "lm_head": hp.logits_multiplier,
        }
        if kind == "in_proj":
            group = ssm.n_groups * ssm.state_size
            widths = (ssm.d_inner, ssm.d_inner, group, group, ssm.n_heads)
            each = np.repeat(np.asarray(ssm.multipliers or (1.0,) * 5, np.float32), widths)[:, None]
            factors["in_proj"] = ssm.in_multiplier * each
        by = factors.get(kind, 1.0)
        return None if np.all(np.asarray(by) == 1.0) else Change("times", by)

    def moe(self, layer: int | None):
        return None if layer is None else self.hp.layers[layer].moe

    def delta(self, layer: int | None) -> GatedDeltaHparams | None:
        mixer = None if layer is None else self.hp.layers[layer].recurrent
        return mixer if isinstance(mixer, GatedDeltaHparams) else None

    def tiled(self, name: str, layer: int) -> GatedDeltaHparams | None:
        return self.delta(layer) if self.arch in _TILED and ".linear_attn." in name else None

    def recurrent_heads(self, layer: int | None) -> bool:
        """Whether decays are one a head, stored as columns (the delta net of Qwen stores vectors)."""
        mixer = None if layer is None else self.hp.layers[layer].recurrent
        return isinstance(mixer, Mamba2Hparams) or self.arch == "kimi-linear"

    def groups(self, layer: int | None) -> int | None:
        mixer = None if layer is None else self.hp.layers[layer].recurrent
        return mixer.n_groups if isinstance(mixer, Mamba2Hparams) else None


def _whole(name: str, shape: tuple[int, ...]) -> Part:
    return Part(name, shape, 0, math.prod(shape[:-1]))


def _untiled(hp: GatedDeltaHparams, size: int) -> Order:
    per_key = hp.n_heads // hp.n_key_heads
    tiled = np.arange(hp.n_heads * size).reshape(per_key, hp.n_key_heads, size)
    return tiled.swapaxes(0, 1).reshape(-1)
