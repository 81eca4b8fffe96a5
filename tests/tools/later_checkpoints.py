"""Tiny checkpoints of families whose layers are those of others, put together anew; see tiny_checkpoints.py."""

from __future__ import annotations

from typing import Any, Final

from mixture_checkpoints import BOS, EOS, PAD

_LAYER_NORM = "layer_norm_eps"


def _config(architecture: str, model_type: str, eps: str = "rms_norm_eps", **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        eps: 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **keys,
    }


_ROUTED: dict[str, Any] = {
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 3,
    "topk_group": 2,
}
_ROUTED_CONTROLS: dict[str, dict[str, Any]] = {
    "choices": {"num_experts_per_tok": 3},
    "scale": {"routed_scaling_factor": 1.0},
    "groups": {"n_group": 1, "topk_group": 1},
}
_THETA: dict[str, dict[str, Any]] = {"theta": {"rope_theta": 20000.0}}

_GRANITE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.125,
    "logits_scaling": 1.5,
}

_YARN: dict[str, Any] = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_GLM5_NEXT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "index_n_heads": 8,
    "index_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "swiglu_limit": 2.0,
}
_MINIMAX_M3: dict[str, Any] = {
    "hidden_act": "silu",
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 20,
    "dense_intermediate_size": 56,
    "shared_intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 2.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_INDEXED: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "index_topk": 8,
    "index_n_heads": 12,
    "index_head_dim": 20,
}
"""A decoder whose indexers choose 8 tokens."""

_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}

_LAGUNA_ROPE: dict[str, Any] = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
}

_COHERE_LAYERS: Final = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]

LATER_CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, dict[str, Any]]]] = {
    "gemma_tiny": (
        _config(
            "GemmaForCausalLM",
            "gemma",
            head_dim=32,
            num_attention_heads=3,
            num_key_value_heads=1,
            hidden_act="gelu",
            tie_word_embeddings=True,
        ),
        "bfloat16",
        {**_THETA, "activation": {"hidden_act": "silu"}},
    ),
    "vaultgemma_tiny": (
        {
            key: value
            for key, value in _config(
                "VaultGemmaForCausalLM",
                "vaultgemma",
                head_dim=32,
                query_pre_attn_scalar=64,
                sliding_window=8,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=6.0,
                hidden_activation="gelu_pytorch_tanh",
                tie_word_embeddings=True,
            ).items()
            if key != "hidden_act"
        },
        "bfloat16",
        {"window": {"sliding_window": 9}, "cap": {"final_logit_softcapping": None}},
    ),
    "arcee_tiny": (
        _config(
            "ArceeForCausalLM", "arcee", hidden_act="relu2", head_dim=40, num_attention_heads=3, num_key_value_heads=1
        ),
        "bfloat16",
        {**_THETA, "activation": {"hidden_act": "silu"}},
    ),
    "apertus_tiny": (
        {
            key: value
            for key, value in _config(
                "ApertusForCausalLM", "apertus", hidden_act="xielu", rope_parameters=_LLAMA3
            ).items()
            if key != "rope_theta"
        },
        "bfloat16",
        {"activation": {"hidden_act": "relu2"}, "rope": {"rope_parameters": {**_LLAMA3, "factor": 1.0}}},
    ),
    "afmoe_tiny": (
        _config(
            "AfmoeForCausalLM",
            "afmoe",
            head_dim=16,
            num_hidden_layers=3,
            num_dense_layers=1,
            global_attn_every_n_layers=3,
            sliding_window=8,
            moe_intermediate_size=16,
            num_experts=6,
            num_experts_per_tok=2,
            num_shared_experts=2,
            route_scale=1.5,
            mup_enabled=True,
        ),
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "kinds": {"layer_types": ["sliding_attention"] * 3},
            "choices": {"num_experts_per_tok": 3},
            "scale": {"route_scale": 1.0},
        },
    ),
    "mimo_v2_flash_tiny": (
        {
            key: value
            for key, value in _config(
                "MiMoV2FlashForCausalLM",
                "mimo_v2_flash",
                head_dim=16,
                v_head_dim=12,
                num_hidden_layers=3,
                num_key_value_heads=1,
                sliding_window=8,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                },
                moe_intermediate_size=16,
                n_routed_experts=6,
                num_experts_per_tok=2,
                routed_scaling_factor=1.5,
            ).items()
            if key != "rope_theta"
        },
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "choices": {"num_experts_per_tok": 3},
            "values": {"attention_value_scale": None},
        },
    ),
    "nemotron_tiny": (
        _config("NemotronForCausalLM", "nemotron", "norm_eps", hidden_size=64, hidden_act="relu2"),
        "bfloat16",
        {**_THETA, "whole": {"partial_rotary_factor": 1.0}, "eps": {"norm_eps": 0.1}},
    ),
    "nanochat_tiny": (
        _config("NanoChatForCausalLM", "nanochat", hidden_act="relu2", final_logit_softcapping=6.0),
        "bfloat16",
        {**_THETA, "cap": {"final_logit_softcapping": None}},
    ),
    "persimmon_tiny": (
        _config(
            "PersimmonForCausalLM",
            "persimmon",
            _LAYER_NORM,
            hidden_size=64,
            num_key_value_heads=None,
            hidden_act="relu2",
            qk_layernorm=True,
        ),
        "float16",
        {**_THETA, "whole": {"partial_rotary_factor": 1.0}, "norm": {"qk_layernorm": False}},
    ),
    "laguna_tiny": (
        {
            key: value
            for key, value in _config(
                "LagunaForCausalLM",
                "laguna",
                head_dim=16,
                num_hidden_layers=3,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                num_attention_heads_per_layer=[4, 6, 6],
                mlp_layer_types=["dense", "sparse", "sparse"],
                sliding_window=8,
                rope_parameters=_LAGUNA_ROPE,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=24,
                num_experts=6,
                num_experts_per_tok=2,
                moe_routed_scaling_factor=1.5,
            ).items()
            if key != "rope_theta"
        },
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "choices": {"num_experts_per_tok": 3},
            "scale": {"moe_routed_scaling_factor": 1.0},
            "cap": {"moe_router_logit_softcapping": 1.0},
            "rope": {
                "rope_parameters": {
                    **_LAGUNA_ROPE,
                    "sliding_attention": {**_LAGUNA_ROPE["sliding_attention"], "partial_rotary_factor": 0.5},
                }
            },
        },
    ),
    "muse_glimmer_tiny": (
        {
            key: value
            for key, value in _config(
                "MuseGlimmerTextModel",
                "muse_glimmer_text",
                head_dim=16,
                num_hidden_layers=4,
                hidden_activation="silu",
                sliding_window=8,
                layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                layer_rope_theta=[10000.0, 10000.0, 10000.0, 0],
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                final_logit_softcapping=8.0,
                output_multiplier=0.9,
                qk_scale_factor=1.3,
                post_norm_eps=1e-8,
            ).items()
            if key not in ("rope_theta", "hidden_act")
        },
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "rope": {"layer_rope_theta": [10000.0] * 4},
            "eps": {"post_norm_eps": 0.1},
            "scores": {"qk_scale_factor": 1.0},
            "cap": {"final_logit_softcapping": 4.0},
        },
    ),
    "internlm3_tiny": (
        _config("InternLM3ForCausalLM", "internlm3", head_dim=16, qkv_bias=True, bias=True),
        "bfloat16",
        _THETA,
    ),
    "iquestcoder_tiny": (
        _config(
            "IQuestCoderForCausalLM",
            "iquestcoder",
            head_dim=16,
            clip_qkv=None,
            use_sliding_window=False,
        ),
        "bfloat16",
        _THETA,
    ),
    "olmo_tiny": (
        {
            key: value
            for key, value in _config("OlmoForCausalLM", "olmo", hidden_size=64, clip_qkv=0.7).items()
            if key != "rms_norm_eps"
        },
        "bfloat16",
        {**_THETA, "clip": {"clip_qkv": None}},
    ),
    "flex_olmo_tiny": (
        _config(
            "FlexOlmoForCausalLM",
            "flex_olmo",
            hidden_size=64,
            intermediate_size=24,
            num_experts=5,
            num_experts_per_tok=2,
        ),
        "bfloat16",
        {**_THETA, "choices": {"num_experts_per_tok": 3}},
    ),
    "kolibri1_tiny": (
        {
            key: value
            for key, value in _config(
                "Kolibri1ForCausalLM",
                "kolibri1",
                head_dim=16,
                num_hidden_layers=3,
                sliding_window=8,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                moe_intermediate_size=16,
                shared_expert_intermediate_size=24,
                num_experts=6,
                num_experts_per_tok=2,
            ).items()
            if key != "intermediate_size"
        },
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "choices": {"num_experts_per_tok": 3},
            "weights": {"norm_topk_prob": True},
        },
    ),
    "step3p5_tiny": (
        {
            key: value
            for key, value in _config(
                "Step3p5ForCausalLM",
                "step3p5",
                head_dim=16,
                num_hidden_layers=3,
                num_nextn_predict_layers=1,
                num_attention_groups=2,
                layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                attention_other_setting={
                    "attention_type": "sliding_attention",
                    "num_attention_heads": 6,
                    "num_attention_groups": 2,
                    "head_dim": 16,
                },
                sliding_window=8,
                rope_theta=[5000.0, 1000.0, 1000.0, 5000.0],
                partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
                rope_scaling={key: value for key, value in _LLAMA3.items() if key != "rope_theta"},
                moe_layers_enum="1,2",
                moe_num_experts=6,
                moe_top_k=2,
                moe_intermediate_size=16,
                share_expert_dim=24,
                moe_router_scaling_factor=1.5,
                swiglu_limits=[0.0, 0.0, 0.4, 0.0],
                swiglu_limits_shared=[0.5, None, 0.6, 0.0],
            ).items()
            if key not in ("hidden_act", "num_key_value_heads")
        },
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "choices": {"moe_top_k": 3},
            "limits": {"swiglu_limits": None},
            "shared": {"swiglu_limits_shared": None},
            "rope": {"partial_rotary_factors": [0.5, 0.5, 0.5, 0.5]},
            "scores": {"query_pre_attn_scalar": 8},
        },
    ),
    "cohere2_moe_tiny": (
        _config(
            "Cohere2MoeForCausalLM",
            "cohere2_moe",
            _LAYER_NORM,
            intermediate_size=16,
            head_dim=16,
            num_hidden_layers=4,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=56,
            sliding_window=8,
            sliding_window_pattern=2,
            num_experts=5,
            num_shared_experts=2,
            logit_scale=0.7,
            tie_word_embeddings=True,
        ),
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "choices": {"num_experts_per_tok": 3},
            "rope": {"prefix_dense_sliding_window_pattern": 4, "layer_types": _COHERE_LAYERS},
            "sum": {"shared_expert_combination_strategy": "sum"},
        },
    ),
    "jais2_tiny": (
        _config(
            "Jais2ForCausalLM",
            "jais2",
            _LAYER_NORM,
            hidden_size=64,
            num_hidden_layers=3,
            hidden_act="relu2",
            attention_bias=True,
            mlp_bias=True,
        ),
        "float32",
        {**_THETA, "eps": {"layer_norm_eps": 0.1}},
    ),
    "starcoder2_tiny": (
        _config(
            "Starcoder2ForCausalLM",
            "starcoder2",
            "norm_epsilon",
            hidden_size=64,
            num_hidden_layers=3,
            hidden_act="gelu_pytorch_tanh",
            sliding_window=8,
            use_bias=True,
            tie_word_embeddings=False,
        ),
        "float16",
        {"window": {"sliding_window": 9}, "eps": {"norm_epsilon": 0.1}},
    ),
    "phi_tiny": (
        _config(
            "PhiForCausalLM",
            "phi",
            _LAYER_NORM,
            hidden_size=60,
            num_key_value_heads=4,
            num_attention_heads=6,
            hidden_act="gelu_new",
            partial_rotary_factor=0.4,
        )
        | {"num_key_value_heads": 6},
        "float16",
        {"whole": {"partial_rotary_factor": 1.0}, "eps": {"layer_norm_eps": 0.1}},
    ),
    "helium_tiny": (
        _config("HeliumForCausalLM", "helium", head_dim=12, num_key_value_heads=4, rms_norm_eps=1e-8),
        "bfloat16",
        {**_THETA, "eps": {"rms_norm_eps": 0.1}},
    ),
    "ministral_tiny": (
        _config(
            "MinistralForCausalLM",
            "ministral",
            head_dim=16,
            num_hidden_layers=3,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        "bfloat16",
        {"window": {"sliding_window": 9}, "kinds": {"layer_types": ["sliding_attention"] * 3}},
    ),
    "hyperclovax_tiny": (
        _config(
            "HyperCLOVAXForCausalLM",
            "hyperclovax",
            embedding_multiplier=2.0,
            residual_multiplier=0.7,
            attention_multiplier=0.125,
            logits_scaling=1.3,
            use_post_norm=True,
        ),
        "bfloat16",
        {
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 1.0},
            "scores": {"attention_multiplier": 0.3},
        },
    ),
    "youtu_tiny": (
        _config(
            "YoutuForCausalLM",
            "youtu",
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=20,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            tie_word_embeddings=True,
            pad_token_id=None,  # transformers sets its embedding to zero
        ),
        "bfloat16",
        {**_THETA, "pairs": {"rope_interleave": False}},
    ),
    "minicpm3_tiny": (
        _config(
            "MiniCPM3ForCausalLM",
            "minicpm3",
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=20,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            scale_emb=2.0,
            scale_depth=1.2,
            dim_model_base=40,
            tie_word_embeddings=True,
            pad_token_id=None,  # transformers sets its embedding to zero
            rope_scaling={
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.6],
                "long_factor": [1.0, 1.5, 2.0, 3.0],
                "original_max_position_embeddings": 512,
            },
        ),
        "bfloat16",
        {
            **_THETA,
            "embeddings": {"scale_emb": 3.0},
            "residuals": {"scale_depth": None},
            "logits": {"dim_model_base": None},
        },
    ),
    "solar_open_tiny": (
        _config("SolarOpenForCausalLM", "solar_open", n_routed_experts=6, n_shared_experts=1, **_ROUTED),
        "bfloat16",
        _ROUTED_CONTROLS,
    ),
    "dots1_tiny": (
        _config(
            "Dots1ForCausalLM",
            "dots1",
            n_routed_experts=6,
            n_shared_experts=2,
            first_k_dense_replace=1,
            sliding_window=None,
            **_ROUTED,
        ),
        "bfloat16",
        _ROUTED_CONTROLS,
    ),
    "exaone_moe_tiny": (
        _config(
            "ExaoneMoeForCausalLM",
            "exaone_moe",
            num_hidden_layers=3,
            num_experts=6,
            num_shared_experts=1,
            sliding_window=8,
            sliding_window_pattern=3,
            first_k_dense_replace=1,
            **_ROUTED,
        ),
        "bfloat16",
        {**_ROUTED_CONTROLS, "window": {"sliding_window": 9}, "rope": {"layer_types": ["sliding_attention"] * 3}},
    ),
    "hy_v3_tiny": (
        _config(
            "HYV3ForCausalLM",
            "hy_v3",
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            num_shared_experts=1,
            moe_intermediate_size=16,
            router_scaling_factor=1.7,
        ),
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}, "scale": {"router_scaling_factor": 1.0}},
    ),
    "mellum_tiny": (
        {
            key: value
            for key, value in _config(
                "MellumForCausalLM",
                "mellum",
                num_hidden_layers=3,
                head_dim=16,
                num_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                sliding_window=8,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                mlp_layer_types=["dense", "sparse", "sparse"],
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            ).items()
            if key != "rope_theta"
        },
        "bfloat16",
        {"choices": {"num_experts_per_tok": 3}, "window": {"sliding_window": 9}},
    ),
    "granite_swa_tiny": (
        _config("GraniteSWAForCausalLM", "granite_swa", layer_rope_theta=[0, 10000.0, 10000.0, 10000.0], **_GRANITE),
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "rope": {"layer_rope_theta": [10000.0] * 4},
            "residual": {"residual_multiplier": 1.0},
        },
    ),
    "granitemoe_swa_tiny": (
        _config(
            "GraniteMoeSWAForCausalLM",
            "granitemoe_swa",
            intermediate_size=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
            layer_rope_theta=[0, 10000.0, 10000.0, 10000.0],
            **_GRANITE,
        ),
        "bfloat16",
        {
            "window": {"sliding_window": 9},
            "rope": {"layer_rope_theta": [10000.0] * 4},
            "choices": {"num_experts_per_tok": 3},
        },
    ),
    "cwm_tiny": (
        _config("CwmForCausalLM", "cwm", head_dim=16, num_hidden_layers=5, sliding_window=8, rope_parameters=_LLAMA3),
        "bfloat16",
        {"window": {"sliding_window": 9}, "kinds": {"layer_types": ["sliding_attention"] * 5}},
    ),
    "hunyuan_moe_tiny": (
        _config(
            "HunYuanMoEV1ForCausalLM",
            "hunyuan_v1_moe",
            intermediate_size=16,
            head_dim=32,
            num_experts=5,
            moe_topk=[2, 2],
            rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        ),
        "bfloat16",
        {
            "alpha": {"rope_scaling": {"type": "dynamic", "alpha": 5.0, "factor": 1.0}},
            "choices": {"moe_topk": [3, 3]},
        },
    ),
    "deepseek_v32_tiny": (
        _config(
            "DeepseekV32ForCausalLM",
            "deepseek_v32",
            n_group=3,
            topk_group=2,
            rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            **_INDEXED,
        ),
        "bfloat16",
        {"chosen": {"index_topk": 9}, "all": {"index_topk": 512}, **_THETA},
    ),
    "axk2_tiny": (
        _config(
            "AXK2ForCausalLM",
            "axk2",
            gated_norm_rank=4,
            mlp_layer_types=["dense", "sparse"],
            **{key: value for key, value in _INDEXED.items() if key != "first_k_dense_replace"},
        ),
        "bfloat16",
        {"chosen": {"index_topk": 9}, "all": {"index_topk": 512}, **_THETA},
    ),
    "glm_moe_dsa_tiny": (
        _config(
            "GlmMoeDsaForCausalLM",
            "glm_moe_dsa",
            num_hidden_layers=4,
            n_group=1,
            topk_group=1,
            indexer_types=["full", "shared", "full", "shared"],
            mlp_layer_types=["dense", "dense", "sparse", "dense"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            **_INDEXED,
        ),
        "bfloat16",
        {"chosen": {"index_topk": 9}, "all": {"index_topk": 512}},
    ),
    "minimax_m3_tiny": (
        _config(
            "MiniMaxM3VLForCausalLM",
            "minimax_m3_vl_text",
            num_hidden_layers=3,
            layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            index_n_heads=2,
            index_head_dim=12,
            index_block_size=4,
            index_topk_blocks=3,
            **_MINIMAX_M3,
        ),
        "bfloat16",
        {
            "chosen": {"index_topk_blocks": 4},
            "all": {"index_topk_blocks": 64},
            "local": {"index_local_blocks": 2},
            "scale": {"routed_scaling_factor": 1.0},
            "clamp": {"swiglu_limit": 0.5},
        },
    ),
    "minimax_m3_odd_tiny": (
        _config(
            "MiniMaxM3VLForCausalLM",
            "minimax_m3_vl_text",
            layer_types=["minimax_m3_sparse", "full_attention"],
            mlp_layer_types=["sparse", "dense"],
            index_n_heads=1,
            index_head_dim=9,
            index_block_size=5,
            index_topk_blocks=4,
            index_local_blocks=2,
            **{**_MINIMAX_M3, "num_attention_heads": 6, "num_local_experts": 5},
        ),
        "bfloat16",
        {"chosen": {"index_topk_blocks": 5}, "blocks": {"index_block_size": 4}, "local": {"index_local_blocks": 0}},
    ),
    "glm5_next_tiny": (
        _config(
            "Glm5NextForCausalLM",
            "glm5_next_text",
            num_hidden_layers=3,
            layer_types=["linear_attention", "indexed_attention", "indexed_attention"],
            mlp_layer_types=["dense", "sparse", "dense"],
            **{**_GLM5_NEXT, "index_topk": 8, "index_kpool": 4, "hidden_size": 32, "intermediate_size": 40},
        ),
        "bfloat16",
        {
            "chosen": {"index_topk": 12},
            "all": {"index_topk": 512},
            "bound": {"linear_lower_bound": -1.0},
            "clamp": {"swiglu_limit": 0.5},
        },
    ),
    "glm5_next_odd_tiny": (
        _config(
            "Glm5NextForCausalLM",
            "glm5_next_text",
            layer_types=["indexed_attention", "linear_attention"],
            mlp_layer_types=["sparse", "dense"],
            **{
                **_GLM5_NEXT,
                "linear_attn_config": {
                    "head_dim": 9,
                    "num_heads": 3,
                    "short_conv_kernel_size": 3,
                    "safe_gate": False,
                    "gate_lower_bound": None,
                },
                "hc_mult": 3,
                "index_n_heads": 7,
                "index_head_dim": 7,
                "index_topk": 9,
                "index_kpool": 3,
                "kv_lora_rank": 13,
                "v_head_dim": 11,
            },
        ),
        "bfloat16",
        {"chosen": {"index_topk": 12}},
    ),
    "minimax_tiny": (
        _config(
            "MiniMaxForCausalLM",
            "minimax",
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            num_local_experts=4,
            intermediate_size=24,
            head_dim=12,
            block_size=16,
            linear_attn_alpha_factor=1.5,
            full_attn_alpha_factor=1.25,
            full_attn_beta_factor=0.75,
            mlp_alpha_factor=2.0,
        ),
        "bfloat16",
        {
            "alpha": {"mlp_alpha_factor": 1.0},
            "beta": {"full_attn_beta_factor": 1.0},
            "choices": {"num_experts_per_tok": 1},
        },
    ),
    "minimax_odd_tiny": (
        _config(
            "MiniMaxForCausalLM",
            "minimax",
            hidden_size=40,
            num_hidden_layers=3,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            num_attention_heads=3,
            num_key_value_heads=1,
            num_local_experts=3,
            intermediate_size=10,
            head_dim=14,
            block_size=7,
            mlp_beta_factor=0.5,
        ),
        "bfloat16",
        {"alpha": {"mlp_alpha_factor": 2.0}, "beta": {"mlp_beta_factor": 1.0}},
    ),
}
"""By name: the config, the dtype of the weights, and the changes to the config that must change its logits."""
