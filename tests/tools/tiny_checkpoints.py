"""The tiny checkpoints of tests/models/data: a config.json each, with the keys that published models use.

Between them: every family, 1, 2, 3 and 4 query heads to a kv head, tied and untied heads, biases, qk-norm, a head dim
that is not D / N, windows of 8 tokens, layers without positions, every rope scaling that a short text can show, both
forms of its keys, f32, f16 and bf16, one file and shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from family_checkpoints import FAMILY_CONFIGS
from gpt_checkpoints import GPT_CONFIGS
from hybrid_checkpoints import HYBRID_CONFIGS
from hyper_checkpoints import HYPER_CONFIGS
from later_checkpoints import LATER_CONFIGS
from mixture_checkpoints import MIXTURE_CONFIGS

VOCAB_SIZE = 320
BOS, EOS, PAD = 0, 2, 0


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """The storage of one checkpoint, and the changes to its config that must change its logits."""

    config: dict[str, Any]
    dtype: str = "bfloat16"
    num_shards: int = 1
    generation_eos: list[int] | None = None
    """End tokens of generation_config.json where they are not those of config.json."""
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)


SMALL: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2}


def _config(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **keys,
    }


def _llama(**keys: Any) -> dict[str, Any]:
    return _config("LlamaForCausalLM", "llama", **keys)


def _gemma(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    config = _config(architecture, model_type, head_dim=32, query_pre_attn_scalar=64, sliding_window=8, **keys)
    config |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    return {key: value for key, value in config.items() if key in keys or key not in ("hidden_act", "rope_theta")}


def _gemma4(architecture: str = "Gemma4ForCausalLM", model_type: str = "gemma4_text", **keys: Any) -> dict[str, Any]:
    theta = {"sliding_attention": 10000.0, "full_attention": 100000.0}
    rope: dict[str, Any] = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()}
    rope["full_attention"] |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    kinds = ["sliding_attention", "full_attention"]
    config = _config(
        architecture,
        model_type,
        **{
            **SMALL,
            "hidden_size": 40,
            "sliding_window": 8,
            "rope_parameters": rope,
            "hidden_activation": "gelu_pytorch_tanh",
            **keys,
        },
    )
    config |= {"layer_types": kinds * (config["num_hidden_layers"] // 2), "tie_word_embeddings": True}
    return {key: value for key, value in config.items() if key not in ("hidden_act", "rope_theta")}


def _gemma3n(**keys: Any) -> dict[str, Any]:
    small = {**SMALL, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e5}
    config = _config("Gemma3nForCausalLM", "gemma3n_text", **{**small, **keys}) | {"tie_word_embeddings": True}
    return {key: value for key, value in config.items() if key != "hidden_act"}


def _cohere(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    config = _config(architecture, model_type, **{**SMALL, "layer_norm_eps": 1e-5, "logit_scale": 0.7, **keys})
    return {key: value for key, value in config.items() if key != "rms_norm_eps"} | {"tie_word_embeddings": True}


def _stablelm(**keys: Any) -> dict[str, Any]:
    config = _config("StableLmForCausalLM", "stablelm", **{**SMALL, "layer_norm_eps": 1e-5, "head_dim": 12, **keys})
    return {key: value for key, value in config.items() if key not in ("rms_norm_eps", "head_dim")}


def _latent(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    latent = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    experts: dict[str, Any] = {
        "moe_intermediate_size": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }
    return _config(architecture, model_type, **{**SMALL, "num_key_value_heads": 4, **latent, **experts, **keys})


def _longrope(count: int) -> dict[str, list[float]]:
    return {
        "short_factor": [1.0 + 0.25 * index for index in range(count)],
        "long_factor": [1.0 + 1.5 * index for index in range(count)],
    }


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_SCALING: dict[str, Any] = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

DEEPSEEK_ROPE: dict[str, Any] = {"factor": 8.0, "original_max_position_embeddings": 64, "mscale_all_dim": 0.3}
MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

TINY_CHECKPOINTS: dict[str, TinyCheckpoint] = {
    "llama2_tiny": TinyCheckpoint(
        _llama(
            num_key_value_heads=4, num_hidden_layers=2, intermediate_size=64, attention_bias=False, pretraining_tp=1
        ),
        dtype="float32",
        controls={"theta": {"rope_theta": 20000.0}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "llama3_tiny": TinyCheckpoint(
        {
            **{key: value for key, value in _llama(tie_word_embeddings=True).items() if key != "rope_theta"},
            "eos_token_id": [EOS, 1],
            "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 10000.0},
        },
        controls={"scaling": NO_SCALING},
    ),
    "llama_yarn_tiny": TinyCheckpoint(
        _llama(
            num_key_value_heads=1,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        controls={
            "scaling": NO_SCALING,
            "attention_factor": {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": 1.0,
                }
            },
        },
    ),
    "llama_linear_tiny": TinyCheckpoint(
        _llama(head_dim=32, hidden_act="gelu_pytorch_tanh", rope_scaling={"type": "linear", "factor": 2.0}),
        dtype="float16",
        num_shards=2,
        controls={"scaling": NO_SCALING, "activation": {"hidden_act": "silu"}},
    ),
    "smollm2_tiny": TinyCheckpoint(
        _llama(
            hidden_size=96,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_theta=100000,
            rope_interleaved=False,
            rope_scaling=None,
        ),
        controls={"theta": {"rope_theta": 10000.0}},
    ),
    "smollm3_tiny": TinyCheckpoint(
        _config(
            "SmolLM3ForCausalLM",
            "smollm3",
            num_hidden_layers=4,
            num_key_value_heads=1,
            no_rope_layers=[1, 0, 1, 0],
            no_rope_layer_interval=2,
            layer_types=["full_attention"] * 4,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
            rope_theta=5000000.0,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
        ),
        controls={"nope": {"no_rope_layers": [1, 1, 1, 1]}},
    ),
    "smollm3_sliding_tiny": TinyCheckpoint(
        _config(
            "SmolLM3ForCausalLM",
            "smollm3",
            num_hidden_layers=4,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=8,
            attention_bias=True,
        ),
        controls={
            "nope": {"no_rope_layers": [1, 1, 1, 1], "layer_types": ["full_attention", "sliding_attention"] * 2},
            "window": {"use_sliding_window": False},
            "one_more": {"sliding_window": 9},
        },
    ),
    "mistral_sliding_tiny": TinyCheckpoint(
        _config(
            "MistralForCausalLM",
            "mistral",
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            sliding_window=8,
        ),
        controls={"window": {"sliding_window": None}, "one_more": {"sliding_window": 9}},
    ),
    "qwen2_tiny": TinyCheckpoint(
        _config(
            "Qwen2ForCausalLM",
            "qwen2",
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=8,
            max_window_layers=1,
        ),
        generation_eos=[EOS, 0],
        controls={"theta": {"rope_theta": 10000.0}},
    ),
    "qwen2_sliding_tiny": TinyCheckpoint(
        _config(
            "Qwen2ForCausalLM",
            "qwen2",
            num_key_value_heads=4,
            rms_norm_eps=1e-6,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
        ),
        controls={"window": {"use_sliding_window": False}, "first": {"max_window_layers": 0}},
    ),
    "qwen3_tiny": TinyCheckpoint(
        _config(
            "Qwen3ForCausalLM",
            "qwen3",
            head_dim=32,
            rms_norm_eps=1e-6,
            rope_theta=1000000,
            attention_bias=False,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
        ),
        controls={"theta": {"rope_theta": 10000.0}},
    ),
    "qwen3_sliding_tiny": TinyCheckpoint(
        _config(
            "Qwen3ForCausalLM",
            "qwen3",
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        controls={"window": {"layer_types": ["full_attention"] * 3}, "one_more": {"sliding_window": 9}},
    ),
    "gemma2_tiny": TinyCheckpoint(
        _gemma(
            "Gemma2ForCausalLM",
            "gemma2",
            num_hidden_layers=4,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            hidden_act="gelu_pytorch_tanh",
        ),
        controls={
            "window": {"layer_types": ["full_attention"] * 4},
            "attention_cap": {"attn_logit_softcapping": None},
            "logit_cap": {"final_logit_softcapping": None},
            "scale": {"query_pre_attn_scalar": 16},
        },
    ),
    "gemma3n_tiny": TinyCheckpoint(
        _gemma3n(
            hidden_size=40,
            num_hidden_layers=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=2,
            head_dim=32,
            vocab_size_per_layer_input=300,
            hidden_size_per_layer_input=12,
            laurel_rank=8,
            activation_sparsity_pattern=[0.9, 0.6, 0.5, 0.0, 0.0, 0.0],
            final_logit_softcapping=8.0,
        ),
        controls={
            "window": {"sliding_window": 9},
            "sparsity": {"activation_sparsity_pattern": [0.9, 0.6, 0.4, 0.0, 0.0, 0.0]},
            "scale": {"altup_correct_scale": False},
            "cap": {"final_logit_softcapping": 30.0},
        },
    ),
    "gemma3n_odd_tiny": TinyCheckpoint(
        _gemma3n(
            hidden_size=36,
            intermediate_size=[44] * 5,
            num_hidden_layers=5,
            layer_types=["full_attention", "sliding_attention", *["full_attention"] * 2, "sliding_attention"],
            num_attention_heads=3,
            num_key_value_heads=1,
            num_kv_shared_layers=2,
            head_dim=40,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=10,
            laurel_rank=5,
            activation_sparsity_pattern=[0.5, 0.0, 0.8, 0.0, 0.0],
            altup_num_inputs=3,
            altup_active_idx=1,
            altup_correct_scale=False,
            rope_local_base_freq=1e3,
            rope_scaling={"rope_type": "linear", "factor": 4.0},
        ),
        controls={
            "window": {"sliding_window": 9},
            "active": {"altup_active_idx": 0},
            "scaling": {"rope_scaling": None},
        },
    ),
    "gemma4_tiny": TinyCheckpoint(
        _gemma4(
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            head_dim=32,
            global_head_dim=48,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=12,
            final_logit_softcapping=8.0,
        ),
        controls={"window": {"sliding_window": 9}, "cap": {"final_logit_softcapping": None}},
    ),
    "gemma4_moe_odd_tiny": TinyCheckpoint(
        _gemma4(
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            head_dim=40,
            global_head_dim=72,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=16,
        ),
        controls={"window": {"sliding_window": 9}, "experts": {"top_k_experts": 1}},
    ),
    "gemma4_unified_tiny": TinyCheckpoint(
        _gemma4(
            "Gemma4UnifiedForCausalLM",
            "gemma4_unified_text",
            num_hidden_layers=4,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            head_dim=32,
            global_head_dim=48,
        ),
        controls={"window": {"sliding_window": 9}, "cap": {"final_logit_softcapping": 2.0}},
    ),
    "gemma3_tiny": TinyCheckpoint(
        _gemma(
            "Gemma3ForCausalLM",
            "gemma3_text",
            num_key_value_heads=1,
            num_hidden_layers=4,
            sliding_window_pattern=2,
            rope_theta=1000000.0,
            rope_local_base_freq=10000.0,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        controls={
            "window": {"sliding_window": 9},
            "local_theta": {"rope_local_base_freq": 1000000.0},
            "scaling": {"rope_scaling": None},
        },
    ),
    "granite_tiny": TinyCheckpoint(
        _config(
            "GraniteForCausalLM",
            "granite",
            attention_bias=True,
            embedding_multiplier=2.0,
            residual_multiplier=0.7,
            attention_multiplier=0.125,
            logits_scaling=1.5,
        ),
        controls={
            "embedding": {"embedding_multiplier": 1.0},
            "residual": {"residual_multiplier": 1.0},
            "attention": {"attention_multiplier": 0.25},
            "logits": {"logits_scaling": 1.0},
        },
    ),
    "olmo2_tiny": TinyCheckpoint(
        _config("Olmo2ForCausalLM", "olmo2", num_key_value_heads=4),
        controls={"theta": {"rope_theta": 20000.0}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "olmo3_tiny": TinyCheckpoint(
        _config(
            "Olmo3ForCausalLM",
            "olmo3",
            num_hidden_layers=4,
            sliding_window=8,
            rope_theta=500000.0,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        controls={"window": {"sliding_window": 9}, "scaling": {"rope_scaling": None}},
    ),
    "qwen3_moe_tiny": TinyCheckpoint(
        _config(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            head_dim=32,
            rms_norm_eps=1e-6,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            moe_intermediate_size=32,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
        ),
        controls={"normalised": {"norm_topk_prob": False}, "choices": {"num_experts_per_tok": 3}},
    ),
    "qwen2_moe_tiny": TinyCheckpoint(
        _config(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            rms_norm_eps=1e-6,
            use_sliding_window=False,
            decoder_sparse_step=2,
            mlp_only_layers=[],
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=False,
        ),
        controls={"normalised": {"norm_topk_prob": True}, "choices": {"num_experts_per_tok": 1}},
    ),
    "glm4_moe_tiny": TinyCheckpoint(
        _config(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            attention_bias=True,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
            moe_intermediate_size=32,
            n_routed_experts=6,
            n_shared_experts=1,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            n_group=3,
            topk_group=2,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
        ),
        controls={
            "normalised": {"norm_topk_prob": False},
            "scale": {"routed_scaling_factor": 1.0},
            "groups": {"n_group": 1, "topk_group": 1},
            "choices": {"num_experts_per_tok": 3},
        },
    ),
    "mixtral_tiny": TinyCheckpoint(
        _config(
            "MixtralForCausalLM",
            "mixtral",
            intermediate_size=48,
            num_hidden_layers=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
            router_jitter_noise=0.0,
            output_router_logits=False,
        ),
        dtype="float16",
        num_shards=2,
        controls={"choices": {"num_experts_per_tok": 1}},
    ),
    "gpt_oss_tiny": TinyCheckpoint(
        _config(
            "GptOssForCausalLM",
            "gpt_oss",
            num_hidden_layers=2,
            intermediate_size=32,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_bias=True,
            sliding_window=8,
            swiglu_limit=0.75,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        ),
        controls={
            "window": {"sliding_window": 9},
            "limit": {"swiglu_limit": 7.0},
            "slope": {"swiglu_alpha": 1.0},
            "choices": {"num_experts_per_tok": 1},
        },
    ),
    "olmoe_tiny": TinyCheckpoint(
        _config(
            "OlmoeForCausalLM",
            "olmoe",
            intermediate_size=32,
            num_hidden_layers=2,
            num_key_value_heads=4,
            clip_qkv=None,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=False,
        ),
        controls={"normalised": {"norm_topk_prob": True}, "choices": {"num_experts_per_tok": 2}},
    ),
    "phi3_tiny": TinyCheckpoint(
        _config("Phi3ForCausalLM", "phi3", sliding_window=8, rope_scaling=None),
        controls={"window": {"sliding_window": None}, "one_more": {"sliding_window": 9}},
    ),
    "glm_tiny": TinyCheckpoint(
        _config(
            "GlmForCausalLM",
            "glm",
            num_hidden_layers=2,
            head_dim=32,
            attention_bias=True,
            partial_rotary_factor=0.5,
        ),
        controls={"whole": {"partial_rotary_factor": 1.0}, "theta": {"rope_theta": 20000.0}},
    ),
    "glm4_tiny": TinyCheckpoint(
        _config("Glm4ForCausalLM", "glm4", num_hidden_layers=2, head_dim=16, attention_bias=False),
        controls={"whole": {"partial_rotary_factor": 1.0}, "theta": {"rope_theta": 20000.0}},
    ),
    # The prompt is longer than the original length, so all of it turns by the long factors.
    "phi3_longrope_tiny": TinyCheckpoint(
        _config(
            "Phi3ForCausalLM",
            "phi3",
            num_hidden_layers=2,
            original_max_position_embeddings=32,
            rope_scaling={"type": "longrope", **_longrope(8)},
        ),
        controls={"short": {"original_max_position_embeddings": 40}, "scaling": {"rope_scaling": None}},
    ),
    # No text of the tests is as long as the original length here.
    "phi4_mini_tiny": TinyCheckpoint(
        _config(
            "Phi3ForCausalLM",
            "phi3",
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            hidden_size=48,
            original_max_position_embeddings=256,
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
            rope_scaling={"type": "longrope", **_longrope(6)},
        ),
        controls={
            "long": {"original_max_position_embeddings": 32},
            "whole": {"partial_rotary_factor": 1.0, "rope_scaling": None},
            "attention_factor": {"rope_scaling": {"type": "longrope", **_longrope(6), "attention_factor": 1.0}},
        },
    ),
    "seed_oss_tiny": TinyCheckpoint(
        _config(
            "SeedOssForCausalLM",
            "seed_oss",
            **SMALL,
            head_dim=40,
            num_attention_heads=3,
            num_key_value_heads=1,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
        ),
        controls={"theta": {"rope_theta": 20000.0}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "exaone4_tiny": TinyCheckpoint(
        _config(
            "Exaone4ForCausalLM",
            "exaone4",
            **{**SMALL, "num_hidden_layers": 3},
            head_dim=16,
            num_attention_heads=5,
            num_key_value_heads=1,
            sliding_window=8,
            sliding_window_pattern=3,
            rope_scaling={**LLAMA3_SCALING, "rope_type": "llama3"},
        ),
        controls={
            "window": {"sliding_window": 9},
            "rope": {"layer_types": ["sliding_attention"] * 3},
            "scaling": {"rope_scaling": None},
        },
    ),
    "hunyuan_tiny": TinyCheckpoint(
        _config(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            **SMALL,
            head_dim=32,
            rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        ),
        controls={"alpha": {"rope_scaling": {"type": "dynamic", "alpha": 5.0, "factor": 1.0}}},
    ),
    "cohere_tiny": TinyCheckpoint(
        _cohere("CohereForCausalLM", "cohere", num_key_value_heads=4, use_qk_norm=False),
        controls={"scale": {"logit_scale": 0.5}, "theta": {"rope_theta": 20000.0}},
    ),
    "cohere2_tiny": TinyCheckpoint(
        _cohere("Cohere2ForCausalLM", "cohere2", num_hidden_layers=3, sliding_window=8, sliding_window_pattern=3),
        controls={
            "window": {"sliding_window": 9},
            "rope": {"layer_types": ["sliding_attention"] * 3},
            "scale": {"logit_scale": 0.5},
        },
    ),
    "stablelm_tiny": TinyCheckpoint(
        _stablelm(use_qkv_bias=True, hidden_size=64, partial_rotary_factor=0.25),
        controls={"part": {"partial_rotary_factor": 0.5}, "eps": {"layer_norm_eps": 0.1}},
    ),
    "stablelm_parallel_tiny": TinyCheckpoint(
        _stablelm(use_qkv_bias=False, use_parallel_residual=True, partial_rotary_factor=0.5, num_key_value_heads=1),
        controls={"whole": {"partial_rotary_factor": 1.0}},
    ),
    # The prompt is longer than the original length, so that its last queries grow.
    "ministral3_tiny": TinyCheckpoint(
        _config(
            "Ministral3ForCausalLM",
            "ministral3",
            **{**SMALL, "hidden_size": 40},
            head_dim=24,
            num_attention_heads=6,
            num_key_value_heads=2,
            sliding_window=None,
            rope_parameters={**MINISTRAL_ROPE, "llama_4_scaling_beta": 0.3},
        ),
        controls={
            "scaling": {"rope_parameters": {**MINISTRAL_ROPE, "llama_4_scaling_beta": 0.1}},
            "one_more": {
                "rope_parameters": {
                    **MINISTRAL_ROPE,
                    "llama_4_scaling_beta": 0.3,
                    "original_max_position_embeddings": 17,
                }
            },
        },
    ),
    "minimax_m2_tiny": TinyCheckpoint(
        _config(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            **{**SMALL, "intermediate_size": 24},
            head_dim=20,
            num_attention_heads=6,
            num_key_value_heads=2,
            rotary_dim=10,
            num_local_experts=5,
            num_experts_per_tok=2,
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
        ),
        controls={"whole": {"rotary_dim": 20}, "choices": {"num_experts_per_tok": 1}},
    ),
    "ernie4_5_tiny": TinyCheckpoint(
        _config("Ernie4_5ForCausalLM", "ernie4_5", **SMALL, head_dim=24, use_bias=True, tie_word_embeddings=True),
        controls={"theta": {"rope_theta": 500000.0}},
    ),
    "ernie4_5_moe_tiny": TinyCheckpoint(
        _config(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            **{**SMALL, "num_hidden_layers": 3},
            use_bias=False,
            moe_intermediate_size=16,
            moe_num_experts=5,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
            moe_layer_interval=1,
        ),
        controls={"choices": {"moe_k": 1}, "theta": {"rope_theta": 500000.0}},
    ),
    # No text of the tests is as long as the original length.
    "phimoe_tiny": TinyCheckpoint(
        _config(
            "PhimoeForCausalLM",
            "phimoe",
            **{**SMALL, "intermediate_size": 24},
            attention_bias=True,
            lm_head_bias=True,
            sliding_window=512,
            num_local_experts=5,
            num_experts_per_tok=2,
            router_jitter_noise=0.2,
            original_max_position_embeddings=256,
            rope_scaling={
                **_longrope(6),
                "type": "longrope",
                "short_mscale": 1.24,
                "long_mscale": 1.24,
                "original_max_position_embeddings": 256,
            },
        ),
        controls={"margin": {"router_jitter_noise": 0.01}},
    ),
    "deepseek_v2_tiny": TinyCheckpoint(
        _latent(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            topk_group=1,
            routed_scaling_factor=1.2,
            norm_topk_prob=False,
            scoring_func="softmax",
            n_shared_experts=2,
            rope_scaling={**DEEPSEEK_ROPE, "type": "yarn", "mscale": 0.7},
        ),
        controls={
            "groups": {"topk_method": "greedy"},
            "scale": {"routed_scaling_factor": 1.0},
            "rope": {"rope_scaling": {**DEEPSEEK_ROPE, "type": "yarn", "mscale": 1.0}},
            "all": {"rope_scaling": {**DEEPSEEK_ROPE, "type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.0}},
        },
    ),
    "deepseek_v3_tiny": TinyCheckpoint(
        _latent(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            attention_bias=True,
            norm_topk_prob=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            num_nextn_predict_layers=0,
            rope_scaling={**DEEPSEEK_ROPE, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        controls={
            "groups": {"n_group": 1, "topk_group": 1},
            "normalised": {"norm_topk_prob": False},
            "interleaved": {"rope_interleave": False},
        },
    ),
    "axk1_tiny": TinyCheckpoint(
        _latent(
            "AXK1ForCausalLM",
            "axk1",
            norm_topk_prob=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            rope_scaling={**DEEPSEEK_ROPE, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        controls={"groups": {"n_group": 1, "topk_group": 1}, "interleaved": {"rope_interleave": False}},
    ),
    "glm4_moe_lite_tiny": TinyCheckpoint(
        _latent(
            "Glm4MoeLiteForCausalLM",
            "glm4_moe_lite",
            num_hidden_layers=3,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            v_head_dim=20,
            mlp_layer_types=["dense", "sparse", "dense"],
        ),
        controls={"choices": {"num_experts_per_tok": 1}, "theta": {"rope_theta": 20000.0}},
    ),
}
TINY_CHECKPOINTS |= {
    name: TinyCheckpoint(config, dtype, controls=controls)
    for configs in (HYBRID_CONFIGS, MIXTURE_CONFIGS, LATER_CONFIGS, HYPER_CONFIGS, GPT_CONFIGS, FAMILY_CONFIGS)
    for name, (config, dtype, controls) in configs.items()
}
