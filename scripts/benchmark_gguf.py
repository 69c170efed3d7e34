"""A Granite 4 hybrid folder as a GGUF file, for llama.cpp to run the same weights.

    python scripts/benchmark_gguf.py FOLDER FILE --type f32

Needs `gguf` and `safetensors` only. There is no tokenizer in the file: llama.cpp takes token ids then. Only
what the benchmark's models have is written: no experts, no rotary positions, no biases but the convolution's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"f32": "F32", "bf16": "BF16", "q8_0": "Q8_0"}
KEPT_FLOAT32 = ("norm", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt")
"""Names in GGUF of small tensors that are float32 in every file."""
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "shared_mlp.output_linear.weight": "ffn_down.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm.weight": "ssm_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
}
END_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def renamed(name: str, tensor: np.ndarray, n_groups: int) -> Iterator[tuple[str, np.ndarray]]:
    """The GGUF tensors that one tensor of the folder becomes."""
    if name in END_NAMES:
        yield END_NAMES[name], tensor
        return
    _, _, layer, rest = name.split(".", 3)
    if rest == "shared_mlp.input_linear.weight":
        gate, up = np.split(tensor, 2)
        yield f"blk.{layer}.ffn_gate.weight", gate
        yield f"blk.{layer}.ffn_up.weight", up
        return
    if rest == "mamba.A_log":  # llama.cpp stores the decay itself
        tensor = -np.exp(tensor.astype(np.float32))
    if rest in ("mamba.A_log", "mamba.D"):
        tensor = tensor[:, None]
    elif rest == "mamba.conv1d.weight":
        tensor = tensor[:, 0]
    elif rest == "mamba.norm.weight":
        tensor = tensor.reshape(n_groups, -1)
    yield f"blk.{layer}.{LAYER_NAMES[rest]}", tensor


def write_metadata(writer: Any, config: dict[str, Any]) -> None:
    n_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    attends = [kind == "attention" for kind in config["layer_types"]]
    writer.add_block_count(n_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["shared_intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv([config["num_key_value_heads"] if attention else 0 for attention in attends])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_scaling_finetuned(False)  # the sign for no rotary positions
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_attention_scale(config.get("attention_multiplier", 1.0))
    writer.add_embedding_scale(config.get("embedding_multiplier", 1.0))
    writer.add_residual_scale(config.get("residual_multiplier", 1.0))
    writer.add_logit_scale(config.get("logits_scaling", 1.0))
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv", 4))
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])  # the field llama.cpp reads heads from
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def convert(folder: Path, file: Path, kind: str) -> None:
    """kind: one of TYPES, of all matrices; the embeddings, which are the head too, among them."""
    import gguf  # pyright: ignore[reportMissingImports]
    from gguf.quants import quantize  # pyright: ignore[reportMissingImports]
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    float32 = gguf.GGMLQuantizationType.F32
    matrices = gguf.GGMLQuantizationType[TYPES[kind]]
    writer = gguf.GGUFWriter(file, "granitehybrid")
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{TYPES[kind]}"])
    write_metadata(writer, config)
    with safe_open(folder / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            for theirs, tensor in renamed(name, tensors.get_tensor(name), config["mamba_n_groups"]):
                kept = any(part in theirs for part in KEPT_FLOAT32)
                stored = float32 if kept else matrices
                data = quantize(np.ascontiguousarray(tensor, np.float32), stored)
                writer.add_tensor(theirs, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark_gguf", description="A GGUF file of a hybrid folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=list(TYPES), default="f32")
    args = parser.parse_args(argv)
    convert(args.folder, args.file, args.type)
    return 0


if __name__ == "__main__":
    sys.exit(main())
