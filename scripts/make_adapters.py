"""LoRA adapters as PEFT writes them, for models of tests/golden, with the logits that they give.

    python scripts/make_adapters.py

Needs torch, transformers and peft. The folders hold what `save_pretrained` wrote, and ref.npz: tokens and
logits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

TESTS = Path(__file__).resolve().parent.parent / "tests"
ADAPTERS = {
    "llama": LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules="all-linear"),
    "granitemoehybrid": LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "o_proj", "in_proj", "input_linear", "layer"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"o_proj": 4, r"layers\.0\.mamba\.in_proj": 2},
    ),
}
"""By model; together they have every way of saying a scale, a router, and tensors that are one parameter."""


@torch.no_grad()
def make(name: str, config: LoraConfig) -> None:
    golden, folder = TESTS / "golden" / name, TESTS / "adapters" / name
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(golden, dtype=torch.float32).eval()
    adapted = get_peft_model(model, config)
    for parameter, tensor in adapted.named_parameters():
        if "lora_" in parameter:
            tensor.copy_(0.2 * torch.randn(tensor.shape))
    with np.load(golden / "ref.npz") as reference:
        ids = reference["input_ids"][:1]
    logits = adapted(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
    with tempfile.TemporaryDirectory() as scratch:
        adapted.save_pretrained(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            text = (Path(scratch) / file).read_bytes().replace(str(golden).encode(), name.encode())
            (folder / file).write_bytes(text)
    np.savez_compressed(folder / "ref.npz", input_ids=ids, logits=logits)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name, config in ADAPTERS.items():
        make(name, config)
