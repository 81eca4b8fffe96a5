"""The tiny checkpoints with recurrent layers; see tiny_checkpoints.py."""

from __future__ import annotations

from typing import Any

BOS, EOS, PAD = 0, 2, 0


def _config(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **keys,
    }


def _qwen(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    delta |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    keys = {**delta, **rope, "hidden_size": 48, "head_dim": 32, **keys}
    return _config(architecture, model_type, rms_norm_eps=1e-6, **keys)


_ODD_QWEN: dict[str, Any] = {
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 40,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
_TYPES = ["linear_attention", "full_attention", "linear_attention"]
_MAMBA: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_FACTORS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.125,
    "logits_scaling": 1.5,
}
_FALCON: dict[str, Any] = {
    "intermediate_size": 96,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.3],
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "rope_theta": 1e5,
}

_KIMI: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_LING: dict[str, Any] = {
    **{key: value for key, value in _KIMI.items() if not key.startswith(("mla_", "moe_router", "q_lora"))},
    "rms_norm_eps": 1e-6,
    "head_dim": 16,
    "layer_group_size": 2,
    "short_conv_kernel_size": 4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "rope_theta": 1e4,
    "num_nextn_predict_layers": 0,
}
_NEMOTRON: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 32,
    "layer_norm_epsilon": 1e-5,
    "intermediate_size": 56,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}

_BAMBA: dict[str, Any] = {
    **_MAMBA,
    "hidden_size": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "intermediate_size": 56,
    "attn_layer_indices": [1],
}

_LFM3_ROPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
}

_JAMBA: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_SCAN: dict[str, Any] = {
    "hidden_size": 48,
    "state_size": 8,
    "expand": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "time_step_rank": "auto",
}
_ODD_SCAN: dict[str, Any] = {
    **_SCAN,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "state_size": 5,
    "expand": 3,
    "conv_kernel": 3,
    "use_bias": True,
    "use_conv_bias": False,
    "time_step_rank": 7,
}


_ZAYA_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_ZAYA: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "router_hidden_size": 20,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"hybrid": _ZAYA_ROPE},
    "tie_word_embeddings": True,
}


def _without_attention(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    found = _config(architecture, model_type, **keys)
    return {key: value for key, value in found.items() if key not in ("num_attention_heads", "num_key_value_heads")} | {
        "max_position_embeddings": 512
    }


HYBRID_CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, dict[str, Any]]]] = {
    "jamba_tiny": (
        _config("JambaForCausalLM", "jamba", **_JAMBA),
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "jamba_odd_tiny": (
        _config("JambaForCausalLM", "jamba", **_JAMBA)
        | {"hidden_size": 40, "head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
        | {"num_experts_per_tok": 1, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_expand": 1, "mamba_dt_rank": 7}
        | {"mamba_conv_bias": False, "mamba_proj_bias": True, "tie_word_embeddings": True},
        "bfloat16",
        {"eps": {"rms_norm_eps": 0.1}},
    ),
    "mamba_tiny": (
        _without_attention("MambaForCausalLM", "mamba", **_SCAN, tie_word_embeddings=True),
        "bfloat16",
        {"eps": {"layer_norm_epsilon": 0.1}},
    ),
    "mamba_odd_tiny": (
        _without_attention("MambaForCausalLM", "mamba", **_ODD_SCAN),
        "bfloat16",
        {"eps": {"layer_norm_epsilon": 0.1}},
    ),
    "mamba2_tiny": (
        _without_attention("Mamba2ForCausalLM", "mamba2", **_SCAN, num_heads=6, head_dim=16, n_groups=2, chunk_size=16),
        "bfloat16",
        {"eps": {"layer_norm_epsilon": 0.1}},
    ),
    "mamba2_odd_tiny": (
        _without_attention(
            "Mamba2ForCausalLM", "mamba2", **_ODD_SCAN, num_heads=3, head_dim=40, n_groups=1, chunk_size=16
        )
        | {"tie_word_embeddings": True, "use_conv_bias": True},
        "bfloat16",
        {"eps": {"layer_norm_epsilon": 0.1}},
    ),
    "falcon_mamba_tiny": (
        _without_attention("FalconMambaForCausalLM", "falcon_mamba", **_SCAN, mixer_rms_eps=1e-6),
        "bfloat16",
        {"eps": {"mixer_rms_eps": 1.0}},
    ),
    "falcon_mamba_odd_tiny": (
        _without_attention(
            "FalconMambaForCausalLM", "falcon_mamba", **_ODD_SCAN, mixer_rms_eps=1e-2, tie_word_embeddings=True
        ),
        "bfloat16",
        {"eps": {"mixer_rms_eps": 1.0}},
    ),
    "zaya_tiny": (
        _config("ZayaForCausalLM", "zaya", **_ZAYA),
        "bfloat16",
        {
            "theta": {"rope_parameters": {"hybrid": {**_ZAYA_ROPE, "rope_theta": 1e2}}},
            "eps": {"rms_norm_eps": 0.1},
        },
    ),
    "zaya_odd_tiny": (
        _config("ZayaForCausalLM", "zaya", **_ZAYA)
        | {"hidden_size": 40, "head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "num_experts": 5}
        | {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 8}
        | {"cca_time0": 3, "cca_time1": 3, "router_hidden_size": 12, "tie_word_embeddings": False}
        | {"rope_parameters": {"hybrid": _ZAYA_ROPE, "hybrid_sliding": {**_ZAYA_ROPE, "rope_theta": 1e2}}},
        "bfloat16",
        {"window": {"sliding_window": 12}},
    ),
    "kimi_linear_tiny": (
        _config(
            "KimiLinearForCausalLM",
            "kimi_linear",
            **{
                **_KIMI,
                "linear_attn_config": {
                    "full_attn_layers": [2],
                    "kda_layers": [1, 3],
                    "head_dim": 16,
                    "num_heads": 4,
                    "short_conv_kernel_size": 4,
                },
            },
        ),
        "bfloat16",
        {"scale": {"routed_scaling_factor": 1.0}, "normalised": {"moe_renormalize": False}},
    ),
    "kimi_linear_odd_tiny": (
        _config(
            "KimiLinearForCausalLM",
            "kimi_linear",
            **{
                **_KIMI,
                "hidden_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "kv_lora_rank": 20,
                "v_head_dim": 24,
                "num_expert_group": 3,
                "topk_group": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "mlp_layer_types": ["sparse", "sparse"],
                "linear_head_dim": 40,
                "linear_num_heads": 3,
                "linear_conv_kernel_dim": 3,
            },
        ),
        "bfloat16",
        {"groups": {"num_expert_group": 1, "topk_group": 1}},
    ),
    "bailing_hybrid_tiny": (
        _config(
            "BailingHybridForCausalLM",
            "bailing_hybrid",
            **_LING,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "bfloat16",
        {
            "scale": {"routed_scaling_factor": 1.0},
            "bound": {"kda_lower_bound": -2.0},
            "decay": {"kda_safe_gate": False},
            "rope": {"rope_theta": 100.0},
        },
    ),
    "bailing_hybrid_odd_tiny": (
        _config("BailingHybridForCausalLM", "bailing_hybrid", **_LING)
        | {
            "hidden_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 40,
        }
        | {"kv_lora_rank": 20, "v_head_dim": 24, "num_expert_group": 3, "topk_group": 2, "short_conv_kernel_size": 3}
        | {"kda_safe_gate": False, "mlp_layer_types": ["sparse", "sparse"]},
        "bfloat16",
        {"groups": {"num_expert_group": 1, "topk_group": 1}},
    ),
    "olmo_hybrid_tiny": (
        _config(
            "OlmoHybridForCausalLM",
            "olmo_hybrid",
            hidden_size=48,
            intermediate_size=56,
            rms_norm_eps=1e-6,
            layer_types=_TYPES,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
        "bfloat16",
        {
            "rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rates": {"linear_allow_neg_eigval": False},
        },
    ),
    "olmo_hybrid_odd_tiny": (
        _config(
            "OlmoHybridForCausalLM",
            "olmo_hybrid",
            hidden_size=120,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            rms_norm_eps=1e-6,
            linear_num_key_heads=1,
            linear_num_value_heads=3,
            linear_key_head_dim=24,
            linear_value_head_dim=None,
            linear_conv_kernel_dim=3,
            linear_allow_neg_eigval=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "bfloat16",
        {"rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": None}}},
    ),
    "qwen3_next_tiny": (
        _qwen("Qwen3NextForCausalLM", "qwen3_next", intermediate_size=48, mlp_only_layers=[1], **_EXPERTS)
        | {"layer_types": _TYPES, "norm_topk_prob": True},
        "bfloat16",
        {"normalised": {"norm_topk_prob": False}, "rotation": {"partial_rotary_factor": 1.0, "rope_parameters": None}},
    ),
    "qwen3_next_odd_tiny": (
        _qwen("Qwen3NextForCausalLM", "qwen3_next", intermediate_size=48, decoder_sparse_step=2, **_EXPERTS)
        | _ODD_QWEN
        | {"num_experts": 5},
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}},
    ),
    "qwen3_5_tiny": (
        _qwen("Qwen3_5ForCausalLM", "qwen3_5_text", intermediate_size=96, layer_types=_TYPES),
        "bfloat16",
        {"eps": {"rms_norm_eps": 0.1}},
    ),
    "qwen3_5_odd_tiny": (
        _qwen("Qwen3_5ForCausalLM", "qwen3_5_text", intermediate_size=56) | _ODD_QWEN | {"tie_word_embeddings": True},
        "bfloat16",
        {"theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5}}},
    ),
    "qwen3_5_moe_tiny": (
        _qwen("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", layer_types=_TYPES, **_EXPERTS),
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}},
    ),
    "lfm2_tiny": (
        _config(
            "Lfm2ForCausalLM",
            "lfm2",
            intermediate_size=96,
            block_auto_adjust_ff_dim=False,
            num_hidden_layers=4,
            full_attn_idxs=[1, 3],
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            rope_theta=1e4,
            tie_word_embeddings=True,
        ),
        "bfloat16",
        {"theta": {"rope_theta": 1e2}},
    ),
    "lfm2_odd_tiny": (
        _config(
            "Lfm2ForCausalLM",
            "lfm2",
            hidden_size=48,
            head_dim=40,
            num_attention_heads=3,
            num_key_value_heads=1,
            block_ff_dim=72,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=20,
            layer_types=["conv", "full_attention", "conv"],
            norm_eps=1e-5,
            conv_bias=True,
            conv_L_cache=4,
            rope_theta=1e4,
        ),
        "bfloat16",
        {"eps": {"norm_eps": 0.1}},
    ),
    "lfm3_tiny": (
        _config(
            "Lfm3ForCausalLM",
            "lfm3",
            hidden_size=48,
            intermediate_size=72,
            head_dim=24,
            num_hidden_layers=5,
            norm_eps=1e-5,
            conv_L_cache=7,
            sliding_window=8,
            layer_types=["conv", "sliding_attention", "conv", "full_attention", "sliding_attention"],
            rope_parameters=_LFM3_ROPE,
            tie_word_embeddings=True,
        ),
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "gate": {"use_attention_gate": False},
            "theta": {"rope_parameters": {**_LFM3_ROPE, "full_attention": {"rope_type": "default", "rope_theta": 1e3}}},
        },
    ),
    "lfm3_odd_tiny": (
        _config(
            "Lfm3ForCausalLM",
            "lfm3",
            hidden_size=48,
            intermediate_size=72,
            head_dim=40,
            num_attention_heads=3,
            num_key_value_heads=1,
            layer_types=["conv", "full_attention", "conv"],
            norm_eps=1e-5,
            conv_bias=True,
            conv_L_cache=4,
            use_sandwich_norm=False,
            use_attention_gate=False,
            attention_bias=True,
            rope_parameters=_LFM3_ROPE,
        ),
        "bfloat16",
        {"eps": {"norm_eps": 0.1}},
    ),
    "lfm2_moe_tiny": (
        _config(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            hidden_size=48,
            intermediate_size=56,
            moe_intermediate_size=16,
            num_dense_layers=1,
            num_experts=5,
            num_experts_per_tok=2,
            use_expert_bias=True,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            layer_types=["conv", "full_attention", "conv"],
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            rope_theta=1e4,
        ),
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}, "normalised": {"norm_topk_prob": False}},
    ),
    "granitemoehybrid_tiny": (
        _config(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            intermediate_size=16,
            shared_intermediate_size=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["mamba", "attention", "mamba"],
            position_embedding_type="nope",
            normalization_function="rmsnorm",
            **_MAMBA,
            **_FACTORS,
        ),
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}, "residual": {"residual_multiplier": 1.0}},
    ),
    "granitemoehybrid_dense_tiny": (
        _config(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            intermediate_size=16,
            shared_intermediate_size=72,
            num_local_experts=0,
            num_experts_per_tok=0,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            position_embedding_type="rope",
            rope_theta=1e4,
            **{**_MAMBA, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_d_state": 20},
        ),
        "bfloat16",
        {"rope": {"position_embedding_type": None}},
    ),
    "nemotron_h_tiny": (
        _config("NemotronHForCausalLM", "nemotron_h", **_NEMOTRON)
        | {"num_hidden_layers": 5, "hybrid_override_pattern": "ME*-M"},
        "bfloat16",
        {"groups": {"n_group": 1, "topk_group": 1}, "normalised": {"norm_topk_prob": False}},
    ),
    "nemotron_h_odd_tiny": (
        _config("NemotronHForCausalLM", "nemotron_h", **_NEMOTRON)
        | {"hidden_size": 40, "head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "n_group": 1}
        | {"topk_group": 1, "n_routed_experts": 5, "moe_latent_size": 20, "mamba_num_heads": 6, "n_groups": 3}
        | {"ssm_state_size": 20, "conv_kernel": 3, "use_conv_bias": False, "use_bias": True, "num_hidden_layers": 4}
        | {"layers_block_type": ["full_attention", "linear_attention", "moe", "mlp"]},
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}, "eps": {"layer_norm_epsilon": 0.1}},
    ),
    "bamba_tiny": (
        _config("BambaForCausalLM", "bamba", **_BAMBA, rope_theta=1e4),
        "bfloat16",
        {"theta": {"rope_theta": 1e2}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "bamba_odd_tiny": (
        _config("BambaForCausalLM", "bamba", **_BAMBA, rope_theta=1e4, mlp_bias=True, attention_bias=True)
        | {"hidden_size": 120, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"num_hidden_layers": 2, "mamba_expand": 1, "mamba_d_head": "auto", "mamba_n_groups": 3, "mamba_d_state": 20}
        | {"mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True, "attn_layer_indices": [0]},
        "bfloat16",
        {"theta": {"rope_theta": 1e2}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "falcon_h1_tiny": (
        _config("FalconH1ForCausalLM", "falcon_h1", **{**_MAMBA, **_FALCON}),
        "bfloat16",
        {name: {name: 1.0} for name in _FALCON if name.endswith("multiplier") and name != "key_multiplier"},
    ),
    "falcon_h1_odd_tiny": (
        _config(
            "FalconH1ForCausalLM",
            "falcon_h1",
            **{**_MAMBA, **_FALCON},
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mlp_bias=True,
        )
        | {"hidden_size": 48, "head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"num_hidden_layers": 2, "mamba_n_groups": 1, "intermediate_size": 56},
        "bfloat16",
        {"gate": {"mamba_norm_before_gate": True}},
    ),
}
"""By name: config, dtype, and controls as in `TinyCheckpoint`."""
