"""Write the reference models of tests/golden: tiny random Hugging Face folders with their answers.

    python scripts/make_golden.py [--out tests/golden] [name ...]

Needs torch and transformers (made with torch 2.13 and transformers 5.24); the tests need neither.
Each folder of golden_models.MODELS gets config.json, model.safetensors and ref.npz:

    input_ids  int64 [2, T]     two sequences, longer than several chunks of a small chunk size
    logits     float32 [2, T, V] of the full forward pass, without a cache
    greedy     int64 [2, 12]    argmax continuation of the first 11 tokens, by repeated full forward

Weights come from fixed seeds; no norm, bias, decay or skip is left at its trivial value. A seed is
passed over when an expert or a greedy token is chosen by a margin that rounding could bridge, when
rounding moves the logits by more than tests should have to tolerate, or when the continuation only
repeats itself. A model is refused when one of its tensors does not
matter to the logits, when `generate` disagrees with the full forward, or when transformers makes
other logits of the written folder. `embedded` writes embedded.npz, the answers for the model inside
the package.
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
from golden_models import COMMON, MODELS, VOCAB
from safetensors.torch import load_file, save_file  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]

N_TOKENS, PROMPT, N_NEW = 43, 11, 12

NORMS_FROM_ONE = {
    "Gemma3RMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5MoeRMSNorm",
    "Qwen3_5RMSNorm",
    "RecurrentGemmaRMSNorm",
}
"""Their weight is added to 1."""

SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers with which experts are chosen, but not weighted."""

CLAMPED = ("nemotron_h", "zamba2")
"""Families in which transformers raises dt to `time_step_min` in a prompt, but not after it."""

NOT_GENERATED = {"mamba2_dt_limit", "bamba_dt_limit", "nemotron_h_small_dt"}
"""`generate` need not agree with the full forward: after the prompt transformers does not clamp dt."""

UNFELT = {"nemotron_h_small_dt": ("A_log", "dt_bias")}
"""Tensors that need not matter: every dt is `time_step_min`, too little for a decay to show."""

SPREAD = {
    "falcon_h1_rms_before": 1,
    "granite": 1,
    "jamba": 4,
    "lara_mini": 4,
    "minimax": 1,
    "qwen3_5_moe_text": 4,
    "qwen3_next": 4,
    "recurrent_gemma": 1,
    "zamba": 4,
    "zamba2": 4,
    "zamba2_shared": 4,
}
"""Spread of the embeddings of tied models whose last norm takes it back, with weights of both signs.

Otherwise they would say the last token again and again, or amplify rounding in the first layers.
"""

LAST_NORMS = {"model.final_layernorm.weight", "model.final_norm.weight", "model.norm.weight"}

EMBEDDED_TEXT = "And the king spake unto Moses — “naïve” 日本 😀, saying"


def dt_range(name: str, model_type: str) -> tuple[float, float]:
    """Bounds of softplus(dt_bias)."""
    if name == "nemotron_h_small_dt":
        return 2e-5, 4e-4  # below time_step_min, to which the full forward raises it
    return (0.1, 0.8) if model_type in CLAMPED else (0.02, 0.5)


@torch.no_grad()
def randomise(name: str, model: nn.Module, generator: torch.Generator) -> None:
    """Give every tensor a random value of such a scale that the logits' spread is about 1."""
    low, high = dt_range(name, model.config.model_type)

    def normal(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=generator)

    def uniform(p: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(p.shape, generator=generator)

    def value(tensor: str, p: Tensor) -> Tensor:
        path, _, leaf = tensor.rpartition(".")
        owner = type(model.get_submodule(path)).__name__
        if leaf == "A_log":
            return torch.log(uniform(p, 0.3, 4.0))
        if leaf in ("dt_bias", "dt_proj_bias") or tensor.endswith("dt_proj.bias"):
            dt = torch.exp(uniform(p, math.log(low), math.log(high)))
            return dt + torch.log(-torch.expm1(-dt))  # softplus of it is log-uniform
        if leaf == "recurrent_param":  # RG-LRU: decays of 0.5 to 0.995 where the gate is half open
            return torch.log(torch.expm1(-torch.log(uniform(p, 0.25, 0.99)) / 8))
        if name in SPREAD and tensor in LAST_NORMS:
            return normal(p) / SPREAD[name] - float(owner in NORMS_FROM_ONE)
        if leaf == "D" or "norm" in tensor:
            return 0.3 * normal(p) + (owner not in NORMS_FROM_ONE)
        if leaf.endswith("bias"):
            return 0.3 * normal(p)
        if "router" in tensor or "Router" in owner:  # wide gaps between experts
            return 2 * normal(p) / math.sqrt(p.shape[-1])
        if "embed" in tensor:
            spread = SPREAD.get(name, 1 if model.config.tie_word_embeddings else 4)
            return spread * normal(p) / math.sqrt(p.shape[-1])
        return normal(p) / math.sqrt(p.shape[-1])

    for tensor, p in model.named_parameters():
        p.copy_(value(tensor, p))
    for _, bias in selection_biases(model):
        bias.copy_(0.2 * normal(bias))
    model.tie_weights()


def selection_biases(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in model.named_buffers() if name.endswith(SELECTION_BIASES)]


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


class Choices(TorchFunctionMode):
    """Watches every `topk`: of groups, of experts in them. Routers choose by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.least = math.inf
        """The smallest lead of the last chosen over the best of the others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
            self.seen = True
            if k < scores.shape[-1]:
                self._look(scores, k)
        return func(*args, **kwargs)

    def _look(self, scores: Tensor, k: int) -> None:
        if torch.allclose(scores.sum(-1), torch.ones(())):  # a softmax, rounded relative to its values
            scores = scores.log()
        best = scores.topk(k + 1).values
        self.least = min(self.least, float((best[..., -2] - best[..., -1]).min()))


def router_lead(model: nn.Module, *sequences: Tensor) -> float:
    """The smallest lead by which an expert, or a group of experts, is chosen."""
    with Choices() as choices:
        for ids in sequences:
            full(model, ids)
    if not choices.seen and any(".experts." in name for name, _ in model.named_parameters()):
        raise SystemExit("no choice of experts was seen: routers changed, adapt Choices")
    return choices.least


@torch.no_grad()
def rounding(model: nn.Module, ids: Tensor, logits: Tensor) -> float:
    """How far the logits move, of three times, when every weight does by about a rounding of float32.

    Another order of the same sums moves them about as far.
    """
    kept = [p.clone() for p in model.parameters()]
    furthest = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.mul_(1 + 2**-24 * torch.randn(p.shape, generator=generator))
        furthest = max(furthest, float((full(model, ids) - logits).abs().max()))
        for p, value in zip(model.parameters(), kept, strict=True):
            p.copy_(value)
    return furthest


@torch.no_grad()
def least_effect(model: nn.Module, ids: Tensor, logits: Tensor, unfelt: tuple[str, ...]) -> tuple[str, float]:
    """The tensor whose random change by a tenth of itself moves the logits least, and by how much.

    A selection bias is set to zero instead. Tensors named by `unfelt` are left out.
    """
    effects, generator = {}, torch.Generator().manual_seed(0)
    biases = dict(selection_biases(model))
    for name, p in [*model.named_parameters(), *biases.items()]:
        kept = p.clone()
        p.mul_(0 if name in biases else 1 + 0.1 * torch.randn(p.shape, generator=generator))
        if not name.endswith(unfelt):
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
    randomise(name, model, generator)
    ids = torch.randint(3, VOCAB, (2, N_TOKENS), generator=generator)
    continuation, lead = greedy(model, ids[:, :PROMPT])
    answers = {"input_ids": ids, "logits": full(model, ids), "greedy": continuation}
    text = torch.cat([ids[:, :PROMPT], continuation], dim=1)
    return model, answers, {"greedy lead": lead, "router lead": router_lead(model, ids, text)}


def as_on_the_hub(name: str, tensor: Tensor, tensors: dict[str, Tensor], config: Any) -> tuple[str, Tensor]:
    """What `save_pretrained` should have written for `name`; it errs in two families.

    In OLMo Hybrid it cuts the convolution of q, k and v into thirds, whatever their widths, and gives
    the norm after attention the name of another. In Kimi Linear it writes the dense MLP of the first
    layers under the name of the experts.
    """
    layer = int(name.split(".")[2]) if ".layers." in name else -1
    if config.model_type == "olmo_hybrid":
        path, _, leaf = name.rpartition("linear_attn.")
        if leaf.endswith("_conv1d.weight"):
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            values = config.linear_num_value_heads * config.linear_value_head_dim
            whole = torch.cat([tensors[f"{path}linear_attn.{part}_conv1d.weight"] for part in "qkv"])
            tensor = whole.split([keys, keys, values])["qkv".index(leaf[0])].contiguous()
        if layer >= 0 and config.layer_types[layer] == "full_attention":
            name = name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")
    if config.model_type == "kimi_linear" and 0 <= layer and config.mlp_layer_types[layer] == "dense":
        name = name.replace(".block_sparse_moe.", ".mlp.")
    return name, tensor


def save(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    if model.config.model_type in ("olmo_hybrid", "kimi_linear"):
        tensors = load_file(path)
        right = dict(as_on_the_hub(name, tensor, tensors, model.config) for name, tensor in tensors.items())
        save_file(right, path, metadata={"format": "pt"})
    path.chmod(0o644)


def check_folder(model: nn.Module, answers: dict[str, Tensor], folder: Path) -> None:
    """That the folder has the weights and gives the logits; experts are rounded by how they lie in memory."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = loaded.state_dict()
    other = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, weights[name])]
    if other:
        raise SystemExit(f"{folder.name}: the written folder has other weights: {other}")
    difference = float((full(loaded, answers["input_ids"]) - answers["logits"]).abs().max())
    if difference > 3e-6:
        raise SystemExit(f"{folder.name}: the written folder has other logits, by {difference}")


def check_generate(name: str, model: nn.Module, answers: dict[str, Tensor]) -> None:
    ids = answers["input_ids"]
    generated = model.generate(
        ids[:, :PROMPT],
        do_sample=False,
        min_new_tokens=N_NEW,
        max_new_tokens=N_NEW,
        eos_token_id=None,
    )[:, PROMPT:]
    if not torch.equal(generated, answers["greedy"]):
        raise SystemExit(f"{name}: generate and repeated full forward disagree")


def reproducible(model: nn.Module, answers: dict[str, Tensor], leads: dict[str, float]) -> bool:
    """Whether the answers are worth comparing with: neither dull nor at the mercy of rounding."""
    distinct = min(len(set(row)) for row in answers["greedy"].tolist())
    if min(leads.values()) < 3e-3 or distinct < 5:
        return False
    spread = max(1.0, float(answers["logits"].std()))
    return rounding(model, answers["input_ids"], answers["logits"]) < 1.5e-5 * spread


def make(name: str, folder: Path) -> None:
    seed = zlib.crc32(name.encode())
    model, answers, leads = draw(name, seed)
    while not reproducible(model, answers, leads):
        seed += 1
        model, answers, leads = draw(name, seed)
    logits = answers["logits"]
    tensor, effect = least_effect(model, answers["input_ids"], logits, UNFELT.get(name, ()))
    if effect < 5e-3:  # 100 times what the tests tolerate
        raise SystemExit(f"{name}: {tensor} moves the logits by {effect} only")
    save(model, folder)
    check_folder(model, answers, folder)
    if name not in NOT_GENERATED:
        check_generate(name, model, answers)
    arrays = {key: value.numpy() for key, value in answers.items()}
    np.savez_compressed(folder / "ref.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    margins = ", ".join(f"{key} {value:.4f}" for key, value in leads.items())
    print(
        f"{name}: {size / 1024:.0f} KiB, logits std {float(logits.std()):.2f}, {margins}, "
        f"least effect {effect:.3f} ({tensor})",
        flush=True,
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
    transformers.logging.disable_progress_bar()
    for name in options.names or known:
        if name not in known:
            parser.error(f"unknown name {name!r}; known are {', '.join(known)}")
        if name == "embedded":
            embedded(options.out / "embedded.npz")
        else:
            make(name, options.out / name)


if __name__ == "__main__":
    main()
