"""Llama 2 and 3 and what shares their format (Mistral, Granite 3, Qwen 3): attention in every layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxhybrid.families.names import Fields, Source, attention_heads, ends, one, rows
from jaxhybrid.hparams import AttentionHparams, Hparams, MlpHparams, MoeHparams, Residual


def hparams(config: dict[str, Any]) -> Hparams:
    c = Fields(config)
    family = c.text("model_type")
    d_model, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    heads, kv_heads = attention_heads(c)
    head_dim = c.integer("head_dim", 128 if family == "qwen3" else d_model // heads)
    bias, eps = c.flag("attention_bias", False), c.number("rms_norm_eps", 1e-6)
    residual = Residual(branch=c.number("residual_multiplier", 1.0))
    return Hparams(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        vocab_size=c.integer("vocab_size"),
        attention_layer_indices=tuple(range(n_layers)),
        attention=_windowed(
            c,
            n_layers,
            AttentionHparams(
                n_heads=heads,
                n_kv_heads=kv_heads,
                head_dim=head_dim,
                scale=c.number("attention_multiplier", head_dim**-0.5),
                rope=c.rope(head_dim),
                bias=bias,
                out_bias=bias,
                qk_norm_eps=eps if family == "qwen3" else None,
            ),
        ),
        mlp=MlpHparams(c.integer("intermediate_size"), c.activation(), c.flag("mlp_bias", False)),
        mixer_residual=residual,
        feed_forward_residual=residual,
        norm_eps=eps,
        embedding_multiplier=c.number("embedding_multiplier", 1.0),
        logits_multiplier=1 / c.number("logits_scaling", 1.0),
        tie_embeddings=c.flag("tie_word_embeddings", False),
        context_length=c.integer("max_position_embeddings", 2048),
    )


def _windowed(
    c: Fields, n_layers: int, full: AttentionHparams
) -> AttentionHparams | tuple[AttentionHparams, ...]:
    """With the sliding window of Mistral (every layer) and of Qwen (from layer `max_window_layers`)."""
    window = c.get("sliding_window")
    if window is None or c.text("model_type") not in ("mistral", "qwen3"):
        return full
    local = dataclasses.replace(full, window=c.integer("sliding_window"))
    if c.text("model_type") == "mistral":
        return local
    if not c.flag("use_sliding_window", False):
        return full
    first = c.integer("max_window_layers", 28, least=0)
    words = c.get("layer_types", [_KINDS[i >= first] for i in range(n_layers)])
    return tuple(local if word == "sliding_attention" else full for word in words)


_KINDS = ("full_attention", "sliding_attention")


def tensors(hp: Hparams) -> dict[str, Source]:
    d = hp.d_model
    found = ends(hp, "model.embed_tokens.weight", "model.norm.weight")
    for i, layer in enumerate(hp.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        found |= {
            f"{ours}.norm": one(f"{theirs}.input_layernorm.weight", d),
            f"{ours}.mlp_norm": one(f"{theirs}.post_attention_layernorm.weight", d),
            **attention_tensors(f"{ours}.attention", f"{theirs}.self_attn", layer.attention, d),
            **mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", layer.mlp, d),
        }
    return found


def attention_tensors(
    ours: str,
    theirs: str,
    hp: object,
    d: int,
    *,
    out: str = "o_proj",
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    gate: str = "gate_proj",
) -> dict[str, Source]:
    """q_proj, k_proj, v_proj and the output, with the biases, norms and gates that there are."""
    assert isinstance(hp, AttentionHparams)
    q, kv, d_in = hp.n_heads * hp.head_dim, hp.n_kv_heads * hp.head_dim, hp.d_in or d
    queries = 2 * q if hp.gate == "element" else q
    found = {
        f"{ours}.q": one(f"{theirs}.q_proj.weight", queries, d_in),
        f"{ours}.k": one(f"{theirs}.k_proj.weight", kv, d_in),
        f"{ours}.v": one(f"{theirs}.v_proj.weight", kv, d_in),
        f"{ours}.out": one(f"{theirs}.{out}.weight", d, q),
    }
    if hp.bias:
        found |= {
            f"{ours}.q_bias": one(f"{theirs}.q_proj.bias", queries),
            f"{ours}.k_bias": one(f"{theirs}.k_proj.bias", kv),
            f"{ours}.v_bias": one(f"{theirs}.v_proj.bias", kv),
        }
    if hp.out_bias:
        found[f"{ours}.out_bias"] = one(f"{theirs}.{out}.bias", d)
    if hp.qk_norm_eps is not None:
        sizes = (q, kv) if hp.qk_norm_full else (hp.head_dim, hp.head_dim)
        for name, theirs_, size in zip("qk", norms, sizes, strict=True):
            found[f"{ours}.{name}_norm"] = one(f"{theirs}.{theirs_}.weight", size)
    if hp.gate == "head":
        found[f"{ours}.gate"] = one(f"{theirs}.{gate}.weight", hp.n_heads, d_in)
    return found


def mlp_tensors(
    ours: str,
    theirs: str,
    hp: MlpHparams | None,
    d: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Source]:
    """An MLP, by its names for gate, up and down, with their biases where there are any."""
    assert hp is not None
    gate, up, down = names
    found = {f"{ours}.down": one(f"{theirs}.{down}.weight", d, hp.d_ff)}
    if hp.gated:
        both = [(f"{theirs}.{gate}.weight", hp.d_ff), (f"{theirs}.{up}.weight", hp.d_ff)]
        found[f"{ours}.gate_up"] = rows(both, d)
    else:
        found[f"{ours}.up"] = one(f"{theirs}.{up}.weight", hp.d_ff, d)
    if hp.bias:
        found[f"{ours}.down_bias"] = one(f"{theirs}.{down}.bias", d)
        if hp.gated:
            both = [(f"{theirs}.{gate}.bias", hp.d_ff), (f"{theirs}.{up}.bias", hp.d_ff)]
            found[f"{ours}.gate_up_bias"] = rows(both)
        else:
            found[f"{ours}.up_bias"] = one(f"{theirs}.{up}.bias", hp.d_ff)
    return found


def expert_tensors(
    ours: str,
    theirs: str,
    hp: MoeHparams | None,
    d: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
) -> dict[str, Source]:
    """A router at `theirs`.`router` and experts in a list, each with tensors of its own."""
    assert hp is not None
    gate, up, down = names
    width, numbers = hp.latent or d, range(hp.n_experts)
    parts = (gate, up) if hp.gated else (up,)
    into = [(f"{theirs}.experts.{e}.{part}.weight", hp.d_ff) for e in numbers for part in parts]
    return {
        f"{ours}.router": one(f"{theirs}.{router}.weight", hp.n_experts, d),
        f"{ours}.{'gate_up' if hp.gated else 'up'}": rows(into, width),
        f"{ours}.down": rows([(f"{theirs}.experts.{e}.{down}.weight", width) for e in numbers], hp.d_ff),
    }
