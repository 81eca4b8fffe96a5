"""Models of 2025 and 2026 with further kinds of attention and recurrence, by shape: those without kernels of their own.

Keys that transformers' defaults give stay out, unless the published checkpoint differs from them.
"""

from __future__ import annotations

from benchmarks.model_steps.shapes import FALCON_MAMBA_7B, Model

DEEPSEEK_V4 = Model(
    "DeepSeek-V4-Flash",
    {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 129_280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "max_position_embeddings": 1_048_576,
        "tie_word_embeddings": False,
    },
    layers=(4, 5),  # blocks of 128 tokens; blocks of 4 that an indexer chooses
)
MINIMAX_M3 = Model(
    "MiniMax-M3",
    {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3",
        "vocab_size": 200_064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "head_dim": 128,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 524_288,
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "tie_word_embeddings": False,
    },
    layers=(3,),
)
MISTRAL_LARGE_4 = Model(
    "Mistral Large 4",
    {
        "architectures": ["MistralLarge4TextModel"],
        "model_type": "mistral_large4_text",
        "vocab_size": 204_800,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    layers=(2, 3),  # with rotation and without
)
GLM_5_3_FLASH = Model(
    "GLM-5.3-Flash",
    {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "vocab_size": 154_880,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "max_position_embeddings": 1_048_576,
        "tie_word_embeddings": False,
    },
    layers=(4, 7),  # Kimi delta attention; latent attention with an indexer of pools
)
HY_V4 = Model(
    "Hy4",
    {
        "architectures": ["HYV4ForCausalLM"],
        "model_type": "hy_v4",
        "vocab_size": 120_832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "head_dim": 64,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    },
    layers=(1, 2),  # with an indexer, and with the choice of the layer before
)
MINIMAX_TEXT_01 = Model(
    "MiniMax-Text-01",
    {
        "architectures": ["MiniMaxForCausalLM"],
        "model_type": "minimax",
        "vocab_size": 200_064,
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 10_240_000,
        "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
        "tie_word_embeddings": False,
    },
    layers=(6, 7),
)
ZAYA1 = Model(
    "ZAYA1",
    {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "vocab_size": 262_272,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
    },
    layers=(1, 2),
)
JAMBA_1_5_MINI = Model(
    "Jamba-1.5-Mini",
    {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "vocab_size": 65_536,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    layers=(2, 3, 4),  # a mixer; a mixer and experts; attention
)
BITNET_2B = Model(
    "BitNet-b1.58-2B-4T, ternary weights as int8",
    {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "vocab_size": 128_256,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 30,
        "num_attention_heads": 20,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    layers=(0,),
    quantization="int8-weight-only",
)
NEWER_MODELS = {
    "deepseek-v4-flash": DEEPSEEK_V4,
    "minimax-m3": MINIMAX_M3,
    "mistral-large-4": MISTRAL_LARGE_4,
    "glm-5.3-flash": GLM_5_3_FLASH,
    "hy4": HY_V4,
    "minimax-text-01": MINIMAX_TEXT_01,
    "zaya1": ZAYA1,
    "jamba-1.5-mini": JAMBA_1_5_MINI,
    "bitnet-2b": BITNET_2B,
    "falcon-mamba-7b": FALCON_MAMBA_7B,
}
