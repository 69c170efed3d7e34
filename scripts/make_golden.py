"""Write the reference models of tests/golden: tiny random Hugging Face folders with their answers.

    python scripts/make_golden.py [--out tests/golden] [name ...]

Needs torch and transformers (made with torch 2.13 and transformers 5.24); the tests need neither.
Each folder gets config.json, model.safetensors and ref.npz:

    input_ids  int64 [2, T]     two sequences, longer than several chunks of a small chunk size
    logits     float32 [2, T, V] of the full forward pass, without a cache
    greedy     int64 [2, 12]    argmax continuation of the first 11 tokens, by repeated full forward

Weights come from fixed seeds; no norm, bias, decay or skip is left at its trivial value. A seed is
passed over when an expert or a greedy token is chosen by a margin that rounding could bridge, or
when the continuation only repeats itself. A model is refused when one of its tensors does not
matter to the logits, or when `generate` disagrees with the full forward. `embedded` writes
embedded.npz, the answers for the model inside the package.
"""

from __future__ import annotations

import argparse
import math
import os
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

VOCAB, N_TOKENS, PROMPT, N_NEW = 96, 43, 11, 12
COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA2 = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "state_size": 12,
    "n_groups": 2, "conv_kernel": 4, "expand": 2, "chunk_size": 8, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
GRANITE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "shared_intermediate_size": 40, "intermediate_size": 24, "num_local_experts": 0,
    "num_experts_per_tok": 0, "rms_norm_eps": 1e-3, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5, "residual_multiplier": 0.7, "logits_scaling": 0.5,
    "position_embedding_type": "nope", "tie_word_embeddings": True, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "intermediate_size": 56, "rms_norm_eps": 1e-3, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3_ROPE = {  # waves of 6 to 350 tokens, so that all three parts of the rule occur
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid": (
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid_dense": ("granitemoehybrid", {**GRANITE, "mamba_conv_bias": False}),
    "granitemoehybrid_rope": (
        "granitemoehybrid",
        {
            **GRANITE,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "attention_bias": True,
            "mamba_proj_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "mamba2": ("mamba2", {**MAMBA2, "use_bias": True}),
    "mamba2_tied": (
        "mamba2",
        {
            **MAMBA2,
            "tie_word_embeddings": True,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_conv_bias": False,
        },
    ),
    "mamba2_dt_limit": ("mamba2", {**MAMBA2, "time_step_limit": [0.05, 0.2]}),
    "llama": ("llama", {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "gemma3_text": (
        "gemma3_text",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 40,
            "rms_norm_eps": 1e-3,
            "query_pre_attn_scalar": 12,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "llama3_rope": (
        "llama",
        {
            **LLAMA,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}


EMBEDDED_TEXT = "And the king spake unto Moses — “naïve” 日本 😀, saying"


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Give every tensor a random value of such a scale that the logits' spread is about 1."""

    def normal(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=generator)

    def uniform(p: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(p.shape, generator=generator)

    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            value = torch.log(uniform(p, 0.3, 4.0))
        elif leaf == "dt_bias":  # softplus of it is log-uniform
            dt = torch.exp(uniform(p, math.log(0.02), math.log(0.5)))
            value = dt + torch.log(-torch.expm1(-dt))
        elif leaf == "D" or "norm" in name:  # Gemma stores what is added to 1
            value = 0.3 * normal(p) + (not model.config.model_type.startswith("gemma"))
        elif leaf.endswith("bias"):
            value = 0.3 * normal(p)
        elif "router" in name:  # wide gaps between experts
            value = 2 * normal(p) / math.sqrt(p.shape[-1])
        elif "embed" in name:
            spread = 1 if model.config.tie_word_embeddings else 4
            value = spread * normal(p) / math.sqrt(p.shape[-1])
        else:
            value = normal(p) / math.sqrt(p.shape[-1])
        p.copy_(value)
    model.tie_weights()


@torch.no_grad()
def full(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()


def greedy(model: nn.Module, prompt: Tensor) -> tuple[Tensor, float]:
    """The continuation and the smallest lead of a chosen token."""
    ids, least = prompt, math.inf
    for _ in range(N_NEW):
        best = full(model, ids)[:, -1].topk(2)
        least = min(least, float((best.values[:, 0] - best.values[:, 1]).min()))
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, prompt.shape[1] :], least


def router_lead(model: nn.Module, ids: Tensor) -> float:
    """The smallest lead of the last chosen expert over the best of the others."""
    leads = [math.inf]

    def look(module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        scores = nn.functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), module.weight)
        best = scores.topk(module.top_k + 1).values
        leads.append(float((best[:, -2] - best[:, -1]).min()))

    routers = [m for m in model.modules() if hasattr(m, "top_k") and hasattr(m, "weight")]
    hooks = [m.register_forward_hook(look) for m in routers]
    full(model, ids)
    for hook in hooks:
        hook.remove()
    if getattr(model.config, "num_local_experts", 0) and len(leads) == 1:
        raise SystemExit("no router was seen: its module changed, adapt router_lead")
    return min(leads)


@torch.no_grad()
def least_effect(model: nn.Module, ids: Tensor, logits: Tensor) -> tuple[str, float]:
    """The tensor whose random change by a tenth of itself moves the logits least, and by how much."""
    effects, generator = {}, torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        kept = p.clone()
        p.mul_(1 + 0.1 * torch.randn(p.shape, generator=generator))
        effects[name] = float((full(model, ids) - logits).abs().max())
        p.copy_(kept)
    name = min(effects, key=effects.__getitem__)
    return name, effects[name]


def draw(name: str, seed: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, float]]:
    """A model, its answers, and the margins by which its choices were made."""
    model_type, fields = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **COMMON, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, generator)
    ids = torch.randint(3, VOCAB, (2, N_TOKENS), generator=generator)
    continuation, lead = greedy(model, ids[:, :PROMPT])
    answers = {"input_ids": ids, "logits": full(model, ids), "greedy": continuation}
    return model, answers, {"greedy lead": lead, "router lead": router_lead(model, ids)}


def make(name: str, folder: Path) -> None:
    seed = zlib.crc32(name.encode())
    model, answers, leads = draw(name, seed)
    while min(leads.values()) < 3e-3 or min(len(set(r)) for r in answers["greedy"].tolist()) < 5:
        seed += 1
        model, answers, leads = draw(name, seed)
    ids, logits = answers["input_ids"], answers["logits"]
    tensor, effect = least_effect(model, ids, logits)
    if effect < 5e-3:  # 25 times what the tests tolerate
        raise SystemExit(f"{name}: {tensor} moves the logits by {effect} only")
    if name != "mamba2_dt_limit":  # whose decode path in transformers does not clamp dt
        generated = model.generate(
            ids[:, :PROMPT],
            do_sample=False,
            min_new_tokens=N_NEW,
            max_new_tokens=N_NEW,
            eos_token_id=None,
        )[:, PROMPT:]
        if not torch.equal(generated, answers["greedy"]):
            raise SystemExit(f"{name}: generate and repeated full forward disagree")
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    arrays = {key: value.numpy() for key, value in answers.items()}
    np.savez_compressed(folder / "ref.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    margins = ", ".join(f"{key} {value:.4f}" for key, value in leads.items())
    print(
        f"{name}: {size / 1024:.0f} KiB, logits std {float(logits.std()):.2f}, {margins}, "
        f"least effect {effect:.3f} ({tensor})"
    )


@torch.no_grad()
def embedded(path: Path) -> None:
    """What transformers makes of the model inside the package: token ids, logits, greedy text."""
    folder = Path(__file__).resolve().parent.parent / "jaxhybrid" / "models" / "tiny"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(EMBEDDED_TEXT, return_tensors="pt")["input_ids"]
    messages = [{"role": "user", "content": "Hello"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    greedy = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    np.savez_compressed(
        path,
        text=EMBEDDED_TEXT,
        input_ids=ids[0].numpy(),
        last_logits=model(ids).logits[0, -4:].numpy(),
        greedy=greedy.numpy(),
        chat_ids=np.asarray(chat),
    )
    print(f"embedded: {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the reference models of tests/golden.")
    golden = Path(__file__).resolve().parent.parent / "tests" / "golden"
    parser.add_argument("--out", type=Path, default=golden, help="folder to write into")
    known = [*MODELS, "embedded"]
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(known)}; all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in options.names or known:
        if name not in known:
            parser.error(f"unknown name {name!r}; known are {', '.join(known)}")
        if name == "embedded":
            embedded(options.out / "embedded.npz")
        else:
            make(name, options.out / name)


if __name__ == "__main__":
    main()
