"""Make the GGUF files of tests/gguf from the folders of tests/golden, with llama.cpp's own conversion script.

    python scripts/make_gguf.py LLAMA_CPP_CHECKOUT

Needs torch, transformers and a checkout of llama.cpp (its conversion package and gguf-py). The models have no
tokenizers, so none is written. Where the script asks for what a small configuration lacks, it is added here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
MODELS = (
    "bamba", "falcon_h1", "falcon_h1_rms", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2_moe", "llama3_rope", "mamba2", "nemotron_h_latent", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
)  # fmt: skip


def adapted(config: dict[str, Any]) -> dict[str, Any]:
    """In the words that the script knows."""
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    match config["model_type"]:
        case "granitemoehybrid":
            config["layer_types"] = [words.get(word, word) for word in config["layer_types"]]
        case "bamba":
            config["attn_rotary_emb"] = config["hidden_size"] // config["num_attention_heads"] // 2
        case "nemotron_h":
            config["d_head"] = config["mamba_head_dim"]
    return config


def convert(name: str, folder: Path, out: Path) -> None:
    import conversion  # pyright: ignore[reportMissingImports]
    import gguf
    import torch  # pyright: ignore[reportMissingImports]

    shutil.copytree(TESTS / "golden" / name, folder)
    config = adapted(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    kind = conversion.get_model_class(config["architectures"][0])
    kind.set_vocab = lambda self: self._set_vocab_none()
    kind.no_mtp = True
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.ALL_F32, out, eager=True).write()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", default=MODELS)
    args = parser.parse_args()
    sys.path[:0] = [str(args.checkout), str(args.checkout / "gguf-py")]
    (TESTS / "gguf").mkdir(exist_ok=True)
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            convert(name, Path(folder) / name, TESTS / "gguf" / f"{name}.gguf")
        print(name)


if __name__ == "__main__":
    main()
