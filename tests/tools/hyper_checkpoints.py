"""Tiny checkpoints of families whose residual streams have hyper-connections; see tiny_checkpoints.py."""

from __future__ import annotations

from typing import Any

from mixture_checkpoints import BOS, EOS, PAD

_SHARED: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
HYPER_CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, dict[str, Any]]]] = {
    "hy_v4_tiny": (
        {
            "architectures": ["HYV4ForCausalLM"],
            "model_type": "hy_v4",
            **_SHARED,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "index_topk": 8,
            "index_n_heads": 12,
            "index_head_dim": 20,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "hc_mult": 3,
            "hc_magnitude": 1.2,
            "hc_eps": 1e-4,
            "swiglu_limit": 0.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "bfloat16",
        {
            "chosen": {"index_topk": 9},
            "magnitude": {"hc_magnitude": 2.0},
            "limit": {"swiglu_limit": 10.0},
        },
    ),
    "deepseek_v4_tiny": (
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **_SHARED,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "qk_rope_head_dim": 8,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 12,
            "sliding_window": 8,
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
            "index_topk": 3,
            "index_n_heads": 12,
            "index_head_dim": 20,
            "num_hash_layers": 1,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 1e-4,
            "swiglu_limit": 0.7,
            "compress_rope_theta": 40000.0,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
        "bfloat16",
        {
            "chosen": {"index_topk": 4},
            "window": {"sliding_window": 9},
            "hashed": {"num_hash_layers": 0},
            "theta": {"compress_rope_theta": 10000.0},
            "steps": {"hc_sinkhorn_iters": 1},
            "limit": {"swiglu_limit": 10.0},
        },
    ),
}
"""By name: the config, the dtype of the weights, and the changes to the config that must change its logits."""
