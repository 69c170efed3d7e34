"""The configurations of the reference models in tests/golden, by folder; make_golden.py builds them.

They are small, and chosen so that what is easily mixed up differs in size: heads of queries and of K/V,
dimensions of keys and of values, the width of the model and that of all its heads. A norm's epsilon is
large where the family allows it, which keeps the noise of float32 small.
"""

from __future__ import annotations

from typing import Any

VOCAB = 96
COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

HEADS = {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
EPS = {"rms_norm_eps": 1e-3}
MAMBA2 = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "state_size": 12,
    "n_groups": 2, "conv_kernel": 4, "expand": 2, "chunk_size": 8, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
GRANITE_HYBRID = {
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
SMALL_LLAMA = {
    **HEADS, **EPS, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40,
    "max_position_embeddings": 256,
}  # fmt: skip
NEMOTRON = {
    **HEADS, "hybrid_override_pattern": "M*-M", "head_dim": 8, "intermediate_size": 40,
    "mamba_num_heads": 4, "mamba_head_dim": 9, "n_groups": 2, "ssm_state_size": 6, "conv_kernel": 4,
    "chunk_size": 8, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
NEMOTRON_MOE = {
    **NEMOTRON, "hybrid_override_pattern": "ME*M", "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 16, "routed_scaling_factor": 2.5,
}  # fmt: skip
BAMBA = {
    **EPS, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "attn_layer_indices": [1], "intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "tie_word_embeddings": True,
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6,
    "mamba_expand": 1, "mamba_chunk_size": 8,
}  # fmt: skip
FALCON_H1 = {
    **HEADS, **EPS, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 28,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "mamba_d_ssm": 36,
    "mamba_n_heads": 4, "mamba_d_head": 9, "mamba_n_groups": 2, "mamba_d_state": 6,
    "mamba_chunk_size": 8, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.9, 0.4], "key_multiplier": 0.4, "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 0.7, 1.3, 0.8, 1.2], "mamba_rms_norm": False,
}  # fmt: skip
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN = {
    **HEADS, **EPS, **DELTA_NET, "head_dim": 8, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
QWEN_ROPE = {
    "rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5,
    "mrope_interleaved": True, "mrope_section": [1, 1, 0],
}  # fmt: skip
QWEN_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 10, "tie_word_embeddings": True,
}  # fmt: skip
LFM2 = {
    **HEADS, "hidden_size": 24, "norm_eps": 1e-3, "conv_L_cache": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
LATENT_ATTENTION = {
    **EPS, "hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 3, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "intermediate_size": 20, "moe_intermediate_size": 8,
    "num_experts_per_token": 2, "routed_scaling_factor": 2.4,
}  # fmt: skip
ZAMBA = {
    **EPS, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 20,
    "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
}  # fmt: skip
ZAMBA2 = {
    **ZAMBA, "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 6, "chunk_size": 8,
    "adapter_rank": 3,
}  # fmt: skip
LLAMA3_ROPE = {  # waves of 6 to 350 tokens, so that all three parts of the rule occur
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {  # a ramp from the second of eight frequencies to the seventh
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG_ROPE = {  # the short factors hold for all of the tokens
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 9.0],
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid_dense": ("granitemoehybrid", {**GRANITE_HYBRID, "mamba_conv_bias": False}),
    "granitemoehybrid_rope": (
        "granitemoehybrid",
        {
            **GRANITE_HYBRID,
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
    "yarn_rope": (
        "llama",
        {**SMALL_LLAMA, "head_dim": 16, "rope_parameters": YARN_ROPE, "tie_word_embeddings": True},
    ),
    "longrope_rope": (
        "llama",
        {**SMALL_LLAMA, "head_dim": 12, "rope_parameters": LONG_ROPE, "tie_word_embeddings": True},
    ),
    "linear_rope": (
        "llama",
        {
            **SMALL_LLAMA,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
            "tie_word_embeddings": True,
        },
    ),
    "mistral": (
        "mistral",
        {
            **SMALL_LLAMA,
            "head_dim": 12,
            "sliding_window": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "qwen3": (
        "qwen3",
        {
            **SMALL_LLAMA,
            "head_dim": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "granite": (
        "granite",
        {
            **SMALL_LLAMA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.6,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h_small_dt": ("nemotron_h", NEMOTRON),
    "nemotron_h_moe": ("nemotron_h", NEMOTRON_MOE),
    "nemotron_h_latent": ("nemotron_h", {**NEMOTRON_MOE, "moe_latent_size": 8}),
    "bamba": ("bamba", BAMBA),
    "bamba_dt_limit": ("bamba", {**BAMBA, "time_step_limit": [0.05, 0.2]}),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1_rms": (
        "falcon_h1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "falcon_h1_rms_before": (
        "falcon_h1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "tie_word_embeddings": True},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **QWEN,
            **QWEN_EXPERTS,
            "mlp_only_layers": [1],
            "intermediate_size": 28,
            "partial_rotary_factor": 0.5,
            "rope_theta": 50.0,
        },
    ),
    "qwen3_5_text": ("qwen3_5_text", {**QWEN, "intermediate_size": 28, "rope_parameters": QWEN_ROPE}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**QWEN, **QWEN_EXPERTS, "rope_parameters": QWEN_ROPE}),
    "lfm2": (
        "lfm2",
        {
            **LFM2,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_bias": True,
            "intermediate_size": 40,  # two thirds of it, a tenth more, rounded up: 32
            "block_ffn_dim_multiplier": 1.1,
            "block_multiple_of": 8,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **LFM2,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "intermediate_size": 28,
            "moe_intermediate_size": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            **HEADS,
            "norm_eps": 1e-3,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "head_dim": 8,
            "conv_L_cache": 7,
            "sliding_window": 6,
            "intermediate_size": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **LATENT_ATTENTION,
            "num_experts": 4,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 8,
                "num_heads": 3,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            **LATENT_ATTENTION,
            "num_experts": 6,
            "num_expert_group": 2,
            "topk_group": 1,
            "num_shared_experts": 2,
            "first_k_dense_replace": 2,
            "layer_group_size": 2,
            "head_dim": 6,
            "num_nextn_predict_layers": 0,
            "rope_theta": 500.0,
        },
    ),
    "jamba": (
        "jamba",
        {
            **HEADS,
            **EPS,
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 12,
            "mamba_expand": 1,
            "mamba_d_state": 5,
            "mamba_dt_rank": 3,
            "tie_word_embeddings": True,
        },
    ),
    "mamba": (
        "mamba",
        {
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "state_size": 5,
            "time_step_rank": 3,
            "layer_norm_epsilon": 1e-3,
            "use_bias": True,
        },
    ),
    "falcon_mamba": (
        "falcon_mamba",
        {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "state_size": 5,
            "time_step_rank": 3,
            "layer_norm_epsilon": 1e-3,
            "mixer_rms_eps": 1e-3,
            "tie_word_embeddings": False,
        },
    ),
    "zamba": (
        "zamba",
        {**ZAMBA, "attention_head_dim": 10, "n_mamba_heads": 2, "mamba_d_state": 5, "mamba_dt_rank": 3},
    ),
    "zamba2": (
        "zamba2",
        {
            **ZAMBA2,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "num_key_value_heads": 2,
        },
    ),
    "zamba2_shared": (
        "zamba2",
        {
            **ZAMBA2,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **HEADS,
            **EPS,
            **DELTA_NET,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 28,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "lara_mini": (
        "lara_mini",
        {
            **HEADS,
            **EPS,
            **DELTA_NET,
            **QWEN_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
            "head_dim": 8,
            "sliding_window": 6,
            "moe_intermediate_size": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "minimax": (
        "minimax",
        {
            **HEADS,
            **EPS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 8,
            "block_size": 8,
            "intermediate_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.7,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.9,
            "tie_word_embeddings": True,
        },
    ),
    "recurrent_gemma": (  # the root of 40 is no bfloat16
        "recurrent_gemma",
        {
            **EPS,
            "hidden_size": 40,
            "lru_width": 30,
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "recurrent", "attention"],
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "intermediate_size": 24,
            "attention_window_size": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
            "logits_soft_cap": 5.0,
        },
    ),
}
