"""Write tests/models/data/rope.json and configs.json: what transformers makes of a config.

Run from the repository root where torch and transformers are installed: python tests/tools/make_config_goldens.py

rope.json, by name of the case: the keys of a Llama config, `inv_freq` (H / 2 numbers) and the factor on cos and sin,
for sequences up to the declared length.
configs.json: `layers`, by name of the case: a config.json, what `save_pretrained` writes for it if that is no part of a
model, and, layer by layer, the window and whether the layer rotates; `defaults`, by architecture: what absent keys mean.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe

DATA = Path(__file__).parents[1] / "models" / "data"

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "short_factor": [1.0 + 0.125 * index for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": 4096,
}
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}

ROPE_CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0, "head_dim": 64, "max_position_embeddings": 4096},
    "default_theta_inside": {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": {"rope_theta": 1e5, "head_dim": 128, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama3_8b": {"rope_theta": 5e5, "head_dim": 128, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3_1b": {"rope_theta": 5e5, "head_dim": 64, "rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32.0}},
    "llama3_new_spelling": {
        "head_dim": 64,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    },
    "yarn_qwen": {"rope_theta": 1e6, "head_dim": 128, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn_small_head": {"rope_theta": 1e4, "head_dim": 16, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "yarn_betas": {
        "rope_theta": 1e4,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "yarn", **YARN, "factor": 16.0, "beta_fast": 24.0, "beta_slow": 2.0},
    },
    "yarn_attention_factor": {
        "rope_theta": 1e4,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    },
    "yarn_mscale": {
        "rope_theta": 1e4,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "yarn", **YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5},
    },
    "yarn_not_truncated": {
        "rope_theta": 1.5e5,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False},
    },
    "yarn_null_factor": {
        "rope_theta": 1e4,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16384},
    },
    "yarn_outer_original_length": {
        "rope_theta": 1e4,
        "head_dim": 64,
        "original_max_position_embeddings": 8192,
        "rope_scaling": {"rope_type": "yarn", **YARN},
    },
    "longrope_short": {"rope_theta": 1e4, "head_dim": 16, "rope_scaling": {"type": "longrope", **LONGROPE}},
    "longrope_factors": {
        "rope_theta": 1e4,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "longrope", **LONGROPE, "factor": 8.0},
    },
    "longrope_attention_factor": {
        "rope_theta": 1e4,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "longrope", **LONGROPE, "attention_factor": 1.25},
    },
}

LAYER_CASES: dict[str, dict[str, Any]] = {
    "mistral_default_window": {"architectures": ["MistralForCausalLM"]},
    "mistral_null_window": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mistral_small_window": {"architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "qwen2_off": {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 2},
    "qwen2_on": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 3,
    },
    "qwen2_on_default_start": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "num_hidden_layers": 30,
    },
    "qwen3_layer_types": {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "smollm3_default": {"architectures": ["SmolLM3ForCausalLM"]},
    "smollm3_interval": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 3},
    "smollm3_explicit": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 0, 1, 1, 0, 1]},
    "smollm3_window": {"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True, "sliding_window": 16},
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "gemma2_default": {"architectures": ["Gemma2ForCausalLM"]},
    "gemma2_layer_types": {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
    "gemma3_default": {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 13},
    "gemma3_pattern": {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3, "sliding_window": 16},
    "qwen3_moe_default": {"architectures": ["Qwen3MoeForCausalLM"]},
    "qwen3_moe_window": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 3,
    },
    "qwen2_moe_default": {"architectures": ["Qwen2MoeForCausalLM"]},
    "glm4_moe_default": {"architectures": ["Glm4MoeForCausalLM"]},
    "mixtral_default": {"architectures": ["MixtralForCausalLM"]},
    "olmoe_default": {"architectures": ["OlmoeForCausalLM"]},
    "gpt_oss_default": {"architectures": ["GptOssForCausalLM"]},
    "phi3_default": {"architectures": ["Phi3ForCausalLM"]},
    "phi3_window": {"architectures": ["Phi3ForCausalLM"], "sliding_window": 16},
    "glm": {"architectures": ["GlmForCausalLM"]},
    "glm4": {"architectures": ["Glm4ForCausalLM"]},
    "granite": {"architectures": ["GraniteForCausalLM"]},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3_default": {"architectures": ["Olmo3ForCausalLM"]},
    "seed_oss": {"architectures": ["SeedOssForCausalLM"]},
    "exaone4_default": {"architectures": ["Exaone4ForCausalLM"]},
    "exaone4_layer_types": {
        "architectures": ["Exaone4ForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "hunyuan": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
    "hunyuan_moe": {"architectures": ["HunYuanMoEV1ForCausalLM"]},
    "mellum_default": {"architectures": ["MellumForCausalLM"]},
    "mellum_layer_types": {
        "architectures": ["MellumForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "granite_swa": {"architectures": ["GraniteSWAForCausalLM"]},
    "hy_v3": {"architectures": ["HYV3ForCausalLM"]},
    "gemma": {"architectures": ["GemmaForCausalLM"]},
    "vaultgemma": {"architectures": ["VaultGemmaForCausalLM"]},
    "arcee": {"architectures": ["ArceeForCausalLM"]},
    "afmoe_default": {"architectures": ["AfmoeForCausalLM"]},
    "afmoe_layer_types": {
        "architectures": ["AfmoeForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "apertus": {"architectures": ["ApertusForCausalLM"]},
    "mimo_v2_flash": {"architectures": ["MiMoV2FlashForCausalLM"], "num_key_value_heads": 2, "num_hidden_layers": 7},
    "laguna": {"architectures": ["LagunaForCausalLM"]},
    "laguna_layer_types": {
        "architectures": ["LagunaForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "num_attention_heads_per_layer": [4, 8] * 3,
    },
    "muse_glimmer": {"architectures": ["MuseGlimmerTextModel"]},
    "muse_glimmer_rope": {
        "architectures": ["MuseGlimmerTextModel"],
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_rope_theta": [0, 10000.0, 10000.0] * 2,
    },
    "internlm3": {"architectures": ["InternLM3ForCausalLM"]},
    "iquestcoder": {"architectures": ["IQuestCoderForCausalLM"]},
    "olmo": {"architectures": ["OlmoForCausalLM"]},
    "flex_olmo": {"architectures": ["FlexOlmoForCausalLM"]},
    "kolibri1": {"architectures": ["Kolibri1ForCausalLM"]},
    "kolibri1_no_windows": {
        "architectures": ["Kolibri1ForCausalLM"],
        "sliding_window": None,
        "layer_types": ["full_attention"] * 6,
    },
    "flint": {"architectures": ["FlintForCausalLM"]},
    "flint_layer_types": {
        "architectures": ["FlintForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "bitnet": {"architectures": ["BitNetForCausalLM"]},
    "mistral_large4": {"architectures": ["MistralLarge4TextModel"]},
    "modernbert_decoder": {"architectures": ["ModernBertDecoderForCausalLM"]},
    "dbrx": {"architectures": ["DbrxForCausalLM"], "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0}},
    "gpt_neo": {"architectures": ["GPTNeoForCausalLM"], "attention_types": [[["global", "local"], 3]]},
    "step3p5": {"architectures": ["Step3p5ForCausalLM"]},
    "step3p5_layer_types": {
        "architectures": ["Step3p5ForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "num_sliding_attention_heads": 8,
    },
    "nemotron": {"architectures": ["NemotronForCausalLM"]},
    "nanochat": {"architectures": ["NanoChatForCausalLM"]},
    "persimmon": {"architectures": ["PersimmonForCausalLM"]},
    "cohere2_moe_default": {"architectures": ["Cohere2MoeForCausalLM"], "sliding_window_pattern": 3},
    "jais2": {"architectures": ["Jais2ForCausalLM"]},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"]},
    "phi": {"architectures": ["PhiForCausalLM"]},
    "helium": {"architectures": ["HeliumForCausalLM"]},
    "ministral_default": {"architectures": ["MinistralForCausalLM"]},
    "ministral_layer_types": {
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "hyperclovax": {"architectures": ["HyperCLOVAXForCausalLM"]},
    "youtu": {"architectures": ["YoutuForCausalLM"]},
    "minicpm3": {"architectures": ["MiniCPM3ForCausalLM"]},
    "solar_open": {"architectures": ["SolarOpenForCausalLM"]},
    "dots1_default": {
        "architectures": ["Dots1ForCausalLM"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "max_window_layers": 4,
    },
    "exaone_moe_default": {"architectures": ["ExaoneMoeForCausalLM"]},
    "cohere": {"architectures": ["CohereForCausalLM"]},
    "cohere2_default": {"architectures": ["Cohere2ForCausalLM"]},
    "stablelm": {"architectures": ["StableLmForCausalLM"]},
    "deepseek_v2": {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 2},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"]},
    "axk1": {"architectures": ["AXK1ForCausalLM"]},
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"]},
    "axk2": {"architectures": ["AXK2ForCausalLM"]},
    "glm_moe_dsa": {"architectures": ["GlmMoeDsaForCausalLM"]},
    "hy_v4": {"architectures": ["HYV4ForCausalLM"]},
    "deepseek_v4": {"architectures": ["DeepseekV4ForCausalLM"], "num_key_value_heads": 1, "o_groups": 2},
    "glm4_moe_lite": {"architectures": ["Glm4MoeLiteForCausalLM"]},
    "minimax": {"architectures": ["MiniMaxForCausalLM"]},
    "minimax_m2": {"architectures": ["MiniMaxM2ForCausalLM"]},
    "glm5_next": {"architectures": ["Glm5NextForCausalLM"], "num_key_value_heads": 4},
    "minimax_m3": {"architectures": ["MiniMaxM3VLForCausalLM"], "partial_rotary_factor": 0.5, "rotary_dim": 64},
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"]},
    "ernie4_5_moe": {"architectures": ["Ernie4_5_MoeForCausalLM"]},
    "phimoe": {"architectures": ["PhimoeForCausalLM"]},
    "ministral3": {"architectures": ["Ministral3ForCausalLM"]},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"]},
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"]},
    "cwm_default": {"architectures": ["CwmForCausalLM"]},
    "cwm_layer_types": {
        "architectures": ["CwmForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "granitemoe_swa": {"architectures": ["GraniteMoeSWAForCausalLM"]},
    "olmo_hybrid": {"architectures": ["OlmoHybridForCausalLM"]},
    "bailing_hybrid": {"architectures": ["BailingHybridForCausalLM"]},
    "kimi_linear": {"architectures": ["KimiLinearForCausalLM"]},
    "qwen3_5_moe": {"architectures": ["Qwen3_5MoeForCausalLM"]},
    "lfm2": {"architectures": ["Lfm2ForCausalLM"]},
    "lfm3": {"architectures": ["Lfm3ForCausalLM"], "sliding_window": 16},
    "lfm3_layer_types": {"architectures": ["Lfm3ForCausalLM"], "layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"architectures": ["Lfm2MoeForCausalLM"], "layer_types": ["conv", "full_attention"] * 3},
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 3,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": ["linear_attention", "full_attention", "moe"] * 2,
    },
    "gemma3n_default": {"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 0},
    "gemma3n_sharing": {"architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 12, "num_kv_shared_layers": 4},
    "llama4_default": {"architectures": ["Llama4ForCausalLM"]},
    "llama4_chunks": {
        "architectures": ["Llama4ForCausalLM"],
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 0, 1, 1, 0, 1],
        "moe_layers": [1, 3],
    },
    "gpt2": {"architectures": ["GPT2LMHeadModel"]},
    "gpt_bigcode": {"architectures": ["GPTBigCodeForCausalLM"]},
    "gptj": {"architectures": ["GPTJForCausalLM"], "rotary_dim": 8},
    "codegen": {"architectures": ["CodeGenForCausalLM"], "rotary_dim": 8},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"]},
    "opt": {"architectures": ["OPTForCausalLM"]},
    "falcon": {"architectures": ["FalconForCausalLM"]},
    "qwen3_vl_moe": {"architectures": ["Qwen3VLMoeTextModel"]},
    "qwen3_omni_moe": {"architectures": ["Qwen3OmniMoeThinkerTextModel"]},
    "cosmos3_edge": {"architectures": ["Cosmos3EdgeTextModel"], "head_dim": 128},
    "cohere_compass": {
        "architectures": ["CohereCompassForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50_000.0, "mrope_section": [24, 20, 20]},
        },
    },
    "qwen2_5_omni": {"architectures": ["Qwen2_5OmniThinkerTextModel"]},
    "granitemoe": {"architectures": ["GraniteMoeForCausalLM"]},
    "granitemoeshared": {"architectures": ["GraniteMoeSharedForCausalLM"]},
    "mistral4": {"architectures": ["Mistral4ForCausalLM"]},
    "falcon_h1": {"architectures": ["FalconH1ForCausalLM"]},
    "zaya": {"architectures": ["ZayaForCausalLM"], "num_experts_per_tok": 1},
    "jamba": {"architectures": ["JambaForCausalLM"], "attn_layer_period": 3, "attn_layer_offset": 1},
    "mamba": {"architectures": ["MambaForCausalLM"]},
    "mamba2": {"architectures": ["Mamba2ForCausalLM"], "expand": 2, "num_heads": 8, "head_dim": 16},
    "falcon_mamba": {"architectures": ["FalconMambaForCausalLM"]},
    "bamba": {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [2, 5]},
    "gemma4": {"architectures": ["Gemma4ForCausalLM"], "vocab_size_per_layer_input": 256},
    "gemma4_unified": {"architectures": ["Gemma4UnifiedForCausalLM"]},
    "gemma4_many_layers": {
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size_per_layer_input": 256,
        "num_hidden_layers": 12,
    },
    "gemma4_last_layer": {
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size_per_layer_input": 256,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
}

WITH_TEXT_CONFIG = (
    "Glm5NextForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "Llama4ForCausalLM",
    "CohereCompassForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
ROTATES_WINDOWS = (
    "AfmoeForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "CohereCompassForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "Kolibri1ForCausalLM",
    "FlintForCausalLM",
)
"""Their attention rotates in sliding-window layers only, if the model has a window; no other key says so."""
NEVER_ROTATES = ("KimiLinearForCausalLM", "NemotronHForCausalLM", "JambaForCausalLM")
NEVER_ROTATES += ("Glm5NextForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM")
NEVER_ROTATES += ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoForCausalLM", "OPTForCausalLM")
DEFAULTED_KEYS = ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias")
DEFAULTED_KEYS += ("sliding_window", "use_sliding_window", "max_window_layers", "no_rope_layer_interval")
DEFAULTED_KEYS += ("tie_word_embeddings", "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping")
DEFAULTED_KEYS += ("final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "attention_multiplier")
DEFAULTED_KEYS += ("logits_scaling", "original_max_position_embeddings", "decoder_sparse_step", "mlp_only_layers")
DEFAULTED_KEYS += ("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob")
DEFAULTED_KEYS += ("swiglu_alpha", "swiglu_limit", "qkv_bias", "use_qk_norm", "shared_expert_intermediate_size")
DEFAULTED_KEYS += ("n_routed_experts", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
DEFAULTED_KEYS += ("first_k_dense_replace", "attention_out_bias", "layer_norm_eps", "logit_scale", "use_qkv_bias")
DEFAULTED_KEYS += ("qk_layernorm", "use_parallel_residual", "use_bias", "lm_head_bias", "moe_k", "moe_num_experts")
DEFAULTED_KEYS += ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "topk_method")
DEFAULTED_KEYS += ("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
DEFAULTED_KEYS += ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads")
DEFAULTED_KEYS += ("linear_num_value_heads", "norm_eps", "conv_bias", "conv_L_cache", "block_auto_adjust_ff_dim")
DEFAULTED_KEYS += ("block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs", "shared_intermediate_size")
DEFAULTED_KEYS += ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand")
DEFAULTED_KEYS += ("mamba_conv_bias", "mamba_proj_bias", "mamba_d_ssm", "mamba_norm_before_gate", "mamba_rms_norm")
DEFAULTED_KEYS += ("scale_emb", "scale_depth", "dim_model_base")
DEFAULTED_KEYS += ("projectors_bias", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier")
DEFAULTED_KEYS += ("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier", "mlp_multipliers")
DEFAULTED_KEYS += ("ssm_multipliers", "num_dense_layers", "use_expert_bias", "vocab_size_per_layer_input")
DEFAULTED_KEYS += ("hidden_size_per_layer_input", "attention_k_eq_v", "num_kv_shared_layers", "enable_moe_block")
DEFAULTED_KEYS += ("use_double_wide_mlp", "top_k_experts", "ssm_state_size", "mamba_num_heads", "mamba_head_dim")
DEFAULTED_KEYS += ("index_topk", "index_n_heads", "index_head_dim", "gated_norm_rank", "swiglu_limit")
DEFAULTED_KEYS += ("hc_mult", "hc_magnitude", "hc_eps")
DEFAULTED_KEYS += ("altup_active_idx", "altup_correct_scale", "altup_num_inputs", "laurel_rank")
DEFAULTED_KEYS += ("activation_sparsity_pattern",)
DEFAULTED_KEYS += ("attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale", "moe_layers")
DEFAULTED_KEYS += ("interleave_moe_layer_step", "intermediate_size_mlp")
DEFAULTED_KEYS += ("n_groups", "conv_kernel", "use_conv_bias", "mamba_hidden_act", "mlp_hidden_act")
DEFAULTED_KEYS += ("norm_epsilon", "use_post_norm", "router_scaling_factor", "num_shared_experts", "moe_topk")
DEFAULTED_KEYS += (
    "linear_allow_neg_eigval",
    "layer_norm_epsilon",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
)
DEFAULTED_KEYS += ("n_inner", "activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
DEFAULTED_KEYS += ("add_cross_attention", "multi_query", "rotary_dim", "ffn_dim", "word_embed_proj_dim", "activation")
DEFAULTED_KEYS += ("do_layer_norm_before", "_remove_final_layer_norm", "enable_bias", "layer_norm_elementwise_affine")
DEFAULTED_KEYS += ("ffn_hidden_size", "num_kv_heads", "num_ln_in_parallel_attn", "alibi", "new_decoder_architecture")
DEFAULTED_KEYS += ("parallel_attn", "bias", "global_attn_every_n_layers", "mup_enabled", "route_scale")
DEFAULTED_KEYS += ("attention_value_scale", "shared_expert_combination_strategy", "expert_selection_fn")
DEFAULTED_KEYS += ("state_size", "time_step_rank", "mixer_rms_eps", "mamba_dt_rank", "attn_layer_period")
DEFAULTED_KEYS += ("router_hidden_size", "cca_time0", "cca_time1")
DEFAULTED_KEYS += ("attn_layer_offset", "expert_layer_period", "expert_layer_offset")
DEFAULTED_KEYS += ("prefix_dense_sliding_window_pattern", "prefix_dense_intermediate_size")
DEFAULTED_KEYS += ("use_sandwich_norm", "use_attention_gate", "gating", "moe_routed_scaling_factor")
DEFAULTED_KEYS += ("moe_router_logit_softcapping", "qk_scale_factor", "output_multiplier", "post_norm_eps")
DEFAULTED_KEYS += ("clip_qkv", "share_expert_dim", "moe_router_scaling_factor", "num_sliding_attention_heads")
DEFAULTED_KEYS += ("swiglu_limits", "swiglu_limits_shared", "window_size")
DEFAULTED_KEYS += (
    "linear_num_heads",
    "linear_head_dim",
    "linear_lower_bound",
    "hc_mult",
    "hc_eps",
    "hc_sinkhorn_iters",
)
DEFAULTED_KEYS += ("index_kpool",)
DEFAULTED_KEYS += ("full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor")
DEFAULTED_KEYS += ("linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor")
DEFAULTED_KEYS += ("dense_intermediate_size", "index_block_size", "index_topk_blocks", "index_local_blocks")
DEFAULTED_KEYS += ("norm_bias", "local_attention", "classifier_bias", "classifier_activation", "decoder_bias")


def rope_case(keys: dict[str, Any]) -> dict[str, Any]:
    """One rope case: the config.json keys, inv_freq (H / 2 numbers) and the factor on cos and sin."""
    hf = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 131072, **keys}
    config = transformers.LlamaConfig(**json.loads(json.dumps(hf)))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return {"config": hf, "inv_freq": [float(x) for x in inv_freq.tolist()], "attention_factor": float(factor)}


def layer_case(keys: dict[str, Any]) -> dict[str, Any]:
    """One layers case: the window of each layer (null: none), whether it rotates, and the config as transformers saves it."""
    hf = {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 4, "max_position_embeddings": 8192, **keys}
    config = _config_class(hf["architectures"][0])(
        **{
            key: value for key, value in copy.deepcopy(hf).items() if key != "architectures"
        }  # a config changes its lists
    )
    types = getattr(config, "layer_types", None)
    if hf["architectures"][0] == "GPTNeoForCausalLM":
        config.sliding_window = config.window_size
        types = ["sliding_attention" if kind == "local" else "full_attention" for kind in config.attention_layers]
    if types is None:
        window = getattr(config, "sliding_window", None)
        windows = [window] * config.num_hidden_layers
    else:
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        windows = [getattr(config, sizes[name]) if name in sizes else None for name in types]
    marks = getattr(config, "no_rope_layers", None) or getattr(config, "layer_rope_theta", None)
    marks = marks or [1] * config.num_hidden_layers
    if "position_embedding_type" in vars(config):
        marks = [config.position_embedding_type == "rope"] * config.num_hidden_layers
    if hf["architectures"][0] in NEVER_ROTATES:
        marks = [0] * config.num_hidden_layers
    if hf["architectures"][0] in ROTATES_WINDOWS and getattr(config, "sliding_window", None) is not None:
        marks = [window is not None for window in windows]
    use_rope = [bool(mark) for mark in marks[: config.num_hidden_layers]]
    return {"config": hf, "saved": saved_config(config, hf), "windows": windows, "use_rope": use_rope}


def saved_config(config: transformers.PreTrainedConfig, hf: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `save_pretrained` writes, without default ids of tokens, which are outside of a small vocabulary."""
    if hf["architectures"][0].endswith("TextModel"):
        return None
    saved = json.loads(config.to_json_string())
    saved = {key: value for key, value in saved.items() if not key.endswith("_token_id")}
    return {**saved, "architectures": hf["architectures"]}


def defaults(architecture: str) -> dict[str, Any]:
    """Return the config class's values of keys that a config.json may leave out. head_dim: null is hidden_size / heads."""
    config_class = _config_class(architecture)
    found = {key: getattr(config_class, key) for key in DEFAULTED_KEYS if hasattr(config_class, key)}
    found = {
        key: value for key, value in found.items() if not isinstance(value, AttributeError | property)
    }  # a removed key
    for name in {"Step3p5ForCausalLM": ["num_local_experts"], "MiniMaxM3VLForCausalLM": ["rotary_dim"]}.get(
        architecture, []
    ):
        del found[name]  # another key is read in its place
    if architecture.endswith("TextModel"):  # Only a part of a model, whose own config says whether the head is tied.
        whole = getattr(transformers, architecture.replace("TextModel", "Config"))
        found["tie_word_embeddings"] = getattr(whole, "tie_word_embeddings", False)
    theta = config_class.default_theta
    if isinstance(theta, dict):
        return found | {"rope_theta": theta["global"], "rope_local_base_freq": theta["local"]}
    return found | {"rope_theta": theta}


def _config_class(architecture: str) -> type[transformers.PreTrainedConfig]:
    name = (
        architecture.replace("ForCausalLM", "Config")
        .replace("LMHeadModel", "Config")
        .replace("TextModel", "TextConfig")
    )
    name = {"Step3p5Config": "Step3p7TextConfig"}.get(name, name)
    if architecture == "Qwen3OmniMoeThinkerTextModel":
        return configuration_qwen3_omni_moe.Qwen3OmniMoeTextConfig
    if architecture == "Qwen2_5OmniThinkerTextModel":
        return configuration_qwen2_5_omni.Qwen2_5OmniTextConfig
    if architecture in WITH_TEXT_CONFIG:
        name = architecture.replace("ForCausalLM", "TextConfig")
    found: type[transformers.PreTrainedConfig] = getattr(transformers, name)
    return found


def write(path: Path, golden: dict[str, Any]) -> None:
    """JSON with one entry a line, so that a change shows as one line."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Write both files."""
    architectures = sorted({case["architectures"][0] for case in LAYER_CASES.values()})
    write(DATA / "rope.json", {name: rope_case(keys) for name, keys in ROPE_CASES.items()})
    layers = {name: layer_case(keys) for name, keys in LAYER_CASES.items()}
    write(DATA / "configs.json", {"layers": layers, "defaults": {name: defaults(name) for name in architectures}})


if __name__ == "__main__":
    main()
