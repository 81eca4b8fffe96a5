"""The registry finds the family, reads end tokens, and rejects unsupported configs in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import architectures, decoder_config, encoder_architectures

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

UNSHARED = {"num_kv_shared_layers": 0}
BOTH = ["full_attention", "sliding_attention"]


def of(architecture: str, keys: dict[str, Any]) -> dict[str, Any]:
    name = architecture if architecture.endswith("Model") else f"{architecture}ForCausalLM"
    return {**LLAMA, "architectures": [name], **keys}


def rejection(hf: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        decoder_config(hf)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_family_file_is_found() -> None:
    assert sorted(architectures()) == [
        "AXK1ForCausalLM",
        "AXK2ForCausalLM",
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BailingHybridForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BambaForCausalLM",
        "BitNetForCausalLM",
        "CodeGenForCausalLM",
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        "CohereCompassForCausalLM",
        "CohereForCausalLM",
        "Cosmos3EdgeTextModel",
        "CwmForCausalLM",
        "DbrxForCausalLM",
        "DeciLMForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV4ForCausalLM",
        "Dots1ForCausalLM",
        "EmbeddingGemma2TextModel",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "EuroBertModel",
        "Exaone4ForCausalLM",
        "ExaoneForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "FlexOlmoForCausalLM",
        "FlintForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3nForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4UnifiedForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm5NextForCausalLM",
        "GlmForCausalLM",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "GraniteSWAForCausalLM",
        "HYV3ForCausalLM",
        "HYV4ForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM2ForCausalLM",
        "InternLM3ForCausalLM",
        "Jais2ForCausalLM",
        "JambaForCausalLM",
        "KimiLinearForCausalLM",
        "Kolibri1ForCausalLM",
        "LagunaForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm3ForCausalLM",
        "Llama4ForCausalLM",
        "LlamaBidirectionalModel",
        "LlamaForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MellumForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniCPMForCausalLM",
        "MiniMaxForCausalLM",
        "MiniMaxM1ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "MiniMaxText01ForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "Mistral4ForCausalLM",
        "MistralForCausalLM",
        "MistralLarge4TextModel",
        "MixtralForCausalLM",
        "ModernBertDecoderForCausalLM",
        "ModernBertForSequenceClassification",
        "ModernBertModel",
        "MuseGlimmerTextModel",
        "NanoChatForCausalLM",
        "NemotronForCausalLM",
        "NemotronHForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoHybridForCausalLM",
        "OlmoeForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhiMoEForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2_5OmniThinkerTextModel",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3OmniMoeThinkerTextModel",
        "Qwen3VLMoeTextModel",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen4ExpForCausalLM",
        "SarvamMoEForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SolarOpenForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "Step3p5ForCausalLM",
        "VaultGemmaForCausalLM",
        "YoutuForCausalLM",
        "ZayaForCausalLM",
    ]


def test_unknown_architecture_is_rejected_with_the_supported_ones() -> None:
    message = rejection({**LLAMA, "architectures": ["XLNetLMHeadModel"]})
    assert "XLNetLMHeadModel" in message
    assert all(name in message for name in (*architectures(), *encoder_architectures()))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (
            "Zamba2ForCausalLM",
            "nearest: BambaForCausalLM; missing: a block of attention that several layers share",
        ),
        (
            "InklingForConditionalGeneration",
            "nearest: ZayaForCausalLM; missing: attention scores with a term by distance",
        ),
        (
            "BloomForCausalLM",
            "nearest: FalconForCausalLM; missing: attention scores with a linear bias by distance (ALiBi)",
        ),
        (
            "MptForCausalLM",
            "nearest: FalconForCausalLM; missing: attention scores with a linear bias by distance (ALiBi)",
        ),
        (
            "Granite4VisionForConditionalGeneration",
            "nearest: GraniteForCausalLM; missing: tiles of an image whose rows of features are joined",
        ),
        ("Granite4VisionForConditionalGeneration", "learned vector each, and a Q-Former over windows"),
        (
            "Ernie4_5_VLMoeForConditionalGeneration",
            "nearest: Ernie4_5_MoeForCausalLM; missing: experts of their own for the tokens of images",
        ),
        ("AriaForConditionalGeneration", "missing: queries that attend to an image's features"),
        ("Molmo2ForConditionalGeneration", "nearest: Qwen3ForCausalLM; missing: attention of a block's mean"),
        ("Phi4MultimodalForCausalLM", "nearest: Phi3ForCausalLM; missing: matrices of low rank"),
        (
            "Gemma4AssistantForCausalLM",
            "nearest: Gemma4ForCausalLM; missing: keys and values of its own: it drafts for a Gemma 4",
        ),
        ("RecurrentGemmaForCausalLM", "nearest: GemmaForCausalLM; missing: real-gated linear recurrent units"),
        ("LongcatFlashForCausalLM", "nearest: DeepseekV3ForCausalLM; missing: layers with two attentions"),
        ("KimiVLForConditionalGeneration", "nearest: DeepseekV3ForCausalLM; missing: its preprocessing"),
        ("DeepseekOCRForCausalLM", "nearest: DeepseekV2ForCausalLM; missing: the tower SAM"),
        ("HunYuanVLForConditionalGeneration", "nearest: HunYuanDenseV1ForCausalLM; missing: four positions of a token"),
    ],
)
def test_a_well_known_architecture_is_rejected_with_what_is_missing(architecture: str, expected: str) -> None:
    assert expected in rejection({**LLAMA, "architectures": [architecture]})


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("SomethingForCausalLM", {}, "(nearest: LlamaForCausalLM);"),
        ("SomethingForCausalLM", {"model_type": "qwen3"}, "(nearest: Qwen3ForCausalLM);"),
        (
            "Glm4xForCausalLM",
            {"index_topk": 8, "use_cache": True, "n_gates": None},
            "Glm4ForCausalLM; keys it does not know: index_topk)",
        ),
        ("Phi5ForCausalLM", {"clip_qkv": 8.0}, "(nearest: Phi3ForCausalLM; values it rejects: clip_qkv);"),
        ("TinyStoriesForCausalLM", {"n_experts": 4}, "(nearest: LlamaForCausalLM; keys it does not know: n_experts);"),
        (
            "Gemma9Model",
            {"text_config": {**LLAMA, "altup": 4}},
            "(nearest: Gemma2ForCausalLM; keys it does not know: altup);",
        ),
        ("OtherModel", {"\n": 1}, "keys it does not know: '\\n')"),
        ("Dots3NoteForCausalLM", {"clip_qkv": 8.0}, "num_key_value_heads; values it rejects: clip_qkv)"),
    ],
)
def test_unknown_architecture_is_compared_with_the_nearest_family(
    architecture: str, keys: dict[str, Any], expected: str
) -> None:
    assert expected in rejection({**LLAMA, "architectures": [architecture], **keys})


def test_keys_that_the_nearest_family_needs_are_named() -> None:
    message = rejection({"architectures": ["XLNetLMHeadModel"], "d_model": 64, "vocab_size": 256})
    assert "(nearest: LlamaForCausalLM; keys it does not know: d_model; keys it needs: num_hidden_layers, " in message


def test_a_config_of_many_keys_is_rejected_with_a_few_of_them() -> None:
    message = rejection({**LLAMA, "architectures": ["Llama9"], **{f"k{index}": 1 for index in range(10_000)}})
    assert "k7 and 112 more" in message


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3]])
def test_missing_architecture_is_rejected(value: object) -> None:
    assert "architectures is" in rejection({**LLAMA, "architectures": value})


@pytest.mark.parametrize("key", [key for key in LLAMA if key not in ("architectures", "num_key_value_heads")])
def test_missing_key_is_named(key: str) -> None:
    hf = {name: value for name, value in LLAMA.items() if name != key}
    assert f"the key {key} is missing" in rejection(hf)


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "architectures"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, 1 << 60, [4], float("nan")])
def test_absurd_size_is_rejected_naming_key_and_limit(key: str, value: object) -> None:
    message = rejection({**LLAMA, key: value})
    assert f"model config: {key} is " in message
    assert "an integer from 1 to" in message


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("Llama", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; supported: silu,"),
        ("Llama", {"hidden_act": None}, "hidden_act is null"),
        ("Llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ("Llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ("Llama", {"rope_theta": 0.5}, "rope_theta is 0.5"),
        ("Llama", {"rope_theta": None}, "rope_theta is null"),
        ("Llama", {"attention_bias": "yes"}, "attention_bias is 'yes'; supported: true or false"),
        ("Llama", {"tie_word_embeddings": None}, "tie_word_embeddings is null; supported: true or false"),
        ("Olmo2", {"is_causal": False}, "is_causal is false; supported: true or null"),
        (
            "Mistral",
            {"is_causal": False},
            "is_causal is false; supported: true for models with images or sliding windows",
        ),
        (
            "Llama",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is true; supported: false or null",
        ),
        ("Llama", {"sliding_window": 4096}, "sliding_window is 4096; supported: null"),
        ("Llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ["),
        ("Llama", {"layer_types": ["full_attention"]}, "one entry for each of the 2 layers"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1.0"),
        ("Llama", {"rope_interleaved": True}, "rope_interleaved is true; supported: false"),
        ("Llama", {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ("Llama", {"num_experts": 8}, "num_experts is 8"),
        (
            "Llama",
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3; supported: a divisor of num_attention_heads (4)",
        ),
        ("Llama", {"hidden_size": 66}, "hidden_size is 66; supported: num_attention_heads (4) times"),
        ("Llama", {"head_dim": 15}, "head_dim is 15; supported: an even number"),
        ("Llama", {"head_dim": 4096}, "head_dim is 4096"),
        ("Mistral", {"attention_bias": True}, "attention_bias is true; supported: false"),
        ("Mistral", {"sliding_window": 0}, "sliding_window is 0; supported: an integer from 1"),
        ("Mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention in every layer"),
        ("Mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "no sliding window is set"),
        ("Mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; supported: an integer from 1 to 8"),
        ("Mixtral", {"attention_bias": True}, "attention_bias is true; supported: false"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; supported: null"),
        ("Olmoe", {"norm_topk_prob": None}, "norm_topk_prob is null; supported: true or false"),
        ("Qwen3Moe", {"num_experts": 0}, "num_experts is 0; supported: an integer from 1"),
        ("Qwen3Moe", {"mlp_only_layers": [2]}, r"mlp_only_layers is [2]; supported: a list of layers from 0 to 1"),
        ("Qwen3Moe", {"n_shared_experts": 1}, "n_shared_experts is 1; supported: 0 or null"),
        (
            "Gemma4",
            {"per_layer_config": {"2": {}}},
            "per_layer_config is {'2': {}}; supported: tables by layer, from 0 to 1",
        ),
        ("Qwen2", {"attention_bias": False}, "attention_bias is false; supported: true"),
        ("Qwen2", {"mlp_bias": True}, "mlp_bias is true"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding window is set"),
        ("Qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1; supported: true or false"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
        ("Qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is"),
        ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type is 'linear'"),
        ("Phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1; supported: a fraction of a head of 16"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; supported: a number from 0 to 1"),
        ("Cohere2", {"sliding_window": None}, "sliding_window is null; supported: an integer from 1"),
        ("Exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        (
            "Gemma3n",
            {"intermediate_size": [96, 64]},
            "intermediate_size is [96, 64]; supported: one width for all layers",
        ),
        ("Gemma3n", {"altup_active_idx": 4, **UNSHARED}, "altup_active_idx is 4; supported: an integer from 0 to 3"),
        (
            "Gemma3n",
            {"activation_sparsity_pattern": [0.5, 1.0], **UNSHARED},
            "supported: a list of 2 numbers from 0 to",
        ),
        ("Gemma3n", {"num_kv_shared_layers": 1, "layer_types": BOTH}, "num_kv_shared_layers is 1; supported: a number"),
        (
            "Llama4",
            {"layer_types": ["full_attention"]},
            "supported: full_attention or chunked_attention for each of the 2",
        ),
        ("Llama4", {"moe_layers": [2]}, "moe_layers is [2]; supported: a list of layers from 0 to 1"),
        ("DeepseekV3", {"index_topk": 2048}, "index_topk is 2048; supported: null"),
        ("DeepseekV32", {"layer_types": ["full_attention"] * 2}, "supported: indexed_attention for each layer"),
        ("DeepseekV32", {"indexer_rope_interleave": True}, "indexer_rope_interleave is true; supported: false or null"),
        ("DeepseekV32", {"index_head_dim": 32}, "index_head_dim is 32; supported: an integer from 64"),
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank is null; supported: an integer"),
        ("AXK2", {"n_group": 8}, "n_group is 8; supported: null or 1"),
        ("GlmMoeDsa", {"indexer_types": ["shared", "full"]}, "supported: full for the first layer"),
        ("Glm5Next", {"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64; supported: 0"),
        ("Glm5Next", {"index_topk": 100}, "index_topk is 100; supported: a multiple of index_kpool (16)"),
        (
            "Glm5Next",
            {"index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail is false; supported: true",
        ),
        (
            "Glm5Next",
            {"layer_types": ["full_attention", "full_attention"], "indexer_types": ["full", "shared"]},
            "indexer_types is ['full', 'shared']; supported: full for each layer with attention",
        ),
        (
            "Glm5Next",
            {"linear_attn_config": {"gate_lower_bound": 1.0}},
            "linear_lower_bound is 1.0; supported: null, or a number from -100 to below 0",
        ),
        ("DeepseekV4", {}, "num_key_value_heads is 2; supported: 1 or null"),
        ("DeepseekV4", {"n_shared_experts": 2, "num_key_value_heads": 1}, "n_shared_experts is 2; supported: 1"),
        (
            "DeepseekV4",
            {"compress_ratios": [0, 8], "num_key_value_heads": 1},
            "supported: 0, 128, 4 for each of the 2 layers",
        ),
        (
            "DeepseekV4",
            {"scoring_func": "softmax", "num_key_value_heads": 1},
            "scoring_func is 'softmax'; supported: sqrtsoftplus or sigmoid",
        ),
        (
            "DeepseekV4",
            {"o_groups": 3, "num_key_value_heads": 1},
            "o_groups is 3; supported: a divisor of num_attention_heads",
        ),
        ("HYV4", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0; supported: a finite number above 0"),
        (
            "GlmMoeDsa",
            {"index_topk_pattern": "FX"},
            "index_topk_pattern is 'FX'; supported: full or shared for each of",
        ),
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: 'sigmoid' or null"),
        (
            "DeepseekV3",
            {"kv_lora_rank": 0, "first_k_dense_replace": 1},
            "kv_lora_rank is 0; supported: an integer from 1",
        ),
        ("DeepseekV2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported"),
        ("Glm4MoeLite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is ['dense']; supported: dense or sparse for"),
        ("Ernie4_5_Moe", {"use_bias": True}, "use_bias is true; supported: false"),
        ("Ernie4_5_Moe", {"moe_num_experts": [64, 64]}, "moe_num_experts is [64, 64]; supported: an integer from 1"),
        ("MiniMaxM1", {"postnorm": False}, "postnorm is false; supported: true"),
        ("MiniMax", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; supported: 0 or null"),
        ("MiniMax", {"attn_type_list": [0, 2]}, "attn_type_list is [0, 2]; supported: 0 or 1 for each of the 2 layers"),
        ("MiniMaxM2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: 'sigmoid' or null"),
        ("MiniMaxM2", {"rotary_dim": 512}, "rotary_dim is 512; supported: an integer from 2 to 128"),
        ("MiniMaxM3VL", {"rotary_dim": 64}, "rotary_dim is 64; supported: 128 or null"),
        ("MiniMaxM3VL", {"layer_types": ["sparse", "sparse"]}, "supported: full_attention or minimax_m3_sparse for"),
        (
            "MiniMaxM3VL",
            {"sparse_attention_config": {"sparse_init_block": 1}},
            "sparse_attention_config.sparse_init_block is 1; supported: 0 or null",
        ),
        (
            "MiniMaxM3VL",
            {"sparse_attention_config": {"sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 0]}},
            "sparse_disable_index_value is [0, 0]; supported: 1 for each layer with an indexer",
        ),
        (
            "MiniMaxM3VL",
            {"sparse_attention_config": {"sparse_attention_freq": [0, 1], "sparse_local_block": 17}},
            "index_local_blocks is 17; supported: an integer from 0 to 16",
        ),
        ("MiniMaxM3VL", {"moe_layer_freq": 1}, "moe_layer_freq is 1; supported: 0 or 1 for each of the 2 layers"),
        ("Phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; supported: 2"),
        ("Qwen2", {"dual_chunk_attention_config": True}, "dual_chunk_attention_config is true; supported: a table"),
        ("HunYuanDenseV1", {"use_cla": True}, "use_cla is true; supported: false or null"),
        (
            "Mistral4",
            {"rope_parameters": {"partial_rotary_factor": 1.0}},
            "partial_rotary_factor is 1.0; supported: qk",
        ),
        ("Bamba", {"attn_layer_indices": [2]}, "attn_layer_indices is [2]; supported: a list of layers from 0 to 1"),
        ("NemotronH", {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern is 'MX*'; supported: letters of M"),
        ("OlmoHybrid", {"linear_num_key_heads": 3}, "linear_num_value_heads is 4; supported: a multiple of"),
        ("KimiLinear", {"mla_use_nope": False}, "mla_use_nope is false; supported: true or null"),
        ("KimiLinear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'; supported"),
        (
            "KimiLinear",
            {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [2]}},
            "linear_attn_config.full_attn_layers is [2]; supported: with kda_layers, each of the layers 1 to 2 once",
        ),
        ("NemotronH", {"n_groups": 3}, "n_groups is 3; supported: a divisor of mamba_num_heads (128)"),
        ("Ministral3", {"rope_parameters": {"rope_type": "default"}}, "rope_type is 'default'; supported: 'yarn'"),
        ("Laguna", {"gating": False}, "gating is false; supported: true, per-head, per-element"),
        ("Laguna", {"gating_types": ["per_element"] * 2}, "supported: ['per_head', 'per_head'] or null"),
        (
            "Laguna",
            {"num_attention_heads_per_layer": [4, 3]},
            "[4, 3]; supported: multiples of num_key_value_heads (2)",
        ),
        (
            "Laguna",
            {"moe_apply_router_weight_on_input": True},
            "moe_apply_router_weight_on_input is true; supported: f",
        ),
        ("Laguna", {"mlp_only_layers": [1]}, "mlp_only_layers is [1]; supported: [0] or null"),
        (
            "MuseGlimmerTextModel",
            {"layer_rope_theta": [0, 5.0]},
            "[0, 5.0]; supported: 10000, the base of all layers, or 0",
        ),
        ("InternLM3", {"qkv_bias": True, "bias": False}, "qkv_bias is true; supported: false"),
        ("IQuestCoder", {"clip_qkv": 8.0}, "clip_qkv is 8.0; supported: null"),
        ("IQuestCoder", {"use_sliding_window": True}, "use_sliding_window is true; supported: false or null"),
        ("Olmo", {"clip_qkv": -1.0}, "clip_qkv is -1.0; supported: a finite number above 0"),
        ("Olmo", {"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06; supported: 1e-05"),
        ("Kolibri1", {"attention_bias": True}, "attention_bias is true; supported: false or null"),
        (
            "Dbrx",
            {"attn_config": {"clip_qkv": -1.0}},
            "attn_config.clip_qkv is -1.0; supported: a finite number above 0",
        ),
        (
            "Dbrx",
            {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            "ffn_config.moe_normalize_expert_weights is 2.0; supported: 1.0 or null",
        ),
        (
            "Dbrx",
            {"attn_config": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters.rope_theta is 10000.0; supported: 500000.0",
        ),
        ("Dbrx", {"ffn_config": {"ffn_act_fn": {"name": "silu", "beta": 2}}}, "supported: a table with a name"),
        ("GPTNeo", {"attention_types": [[["global"], 3]]}, "attention_types is [[['global'], 3]]; supported: lists of"),
        (
            "MistralLarge4TextModel",
            {"num_key_value_heads": 4, "kv_source_layers": [0, 1, 2]},
            "kv_source_layers is [0, 1, 2]; supported: a layer for each of the 2 layers",
        ),
        (
            "MistralLarge4TextModel",
            {"num_key_value_heads": 4, "kv_source_layers": [0, 0], "no_rope_layers": [1, 0]},
            "kv_source_layers is [0, 0]; supported: for layer 1 itself, or the last source before it",
        ),
        ("MistralLarge4TextModel", {}, "num_key_value_heads is 2; supported: 4 or null"),
        ("Step3p5", {"gating": "per-element"}, "gating is 'per-element'; supported: true or 'per-head'"),
        ("Step3p5", {"sink": True}, "sink is true; supported: false or null"),
        ("Step3p5", {"attention_other_setting": {"head_dim": 64}}, "head_dim is 64; supported: 128 or null"),
        ("Step3p5", {"num_sliding_attention_heads": 3}, "is 3; supported: a multiple of num_key_value_heads (2)"),
        ("Step3p5", {"moe_layers_enum": "1,b"}, "moe_layers_enum is '1,b'; supported: numbers of layers"),
        ("Step3p5", {"swiglu_limits": [1.0]}, "swiglu_limits is [1.0]; supported: one number for each layer"),
        ("Step3p5", {"rope_theta": [1e4, 1e5]}, "supported: one value for each kind of layer"),
        ("MuseGlimmerTextModel", {"attention_bias": True}, "attention_bias is true; supported: false"),
        ("Afmoe", {"attention_bias": True}, "attention_bias is true; supported: false"),
        ("Cohere2Moe", {"expert_selection_fn": "tanh"}, "is 'tanh'; supported: 'softmax' or 'sigmoid'"),
        ("MiMoV2Flash", {"num_key_value_heads": 4}, "num_key_value_heads is 4; supported: half of a divisor of num_"),
        ("MiMoV2Flash", {"swa_head_dim": 128}, "swa_head_dim is 128; supported: 192 or null"),
        ("MiMoV2Flash", {"v_head_dim": 256}, "v_head_dim is 256; supported: an integer from 1 to 192"),
        ("Persimmon", {"num_key_value_heads": 2}, "num_key_value_heads is 2; supported: null or 4"),
        ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers is [1]; supported: a list of 0 and 1"),
        ("SmolLM3", {"no_rope_layers": [1, 2]}, "no_rope_layers is [1, 2]"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ],
)
def test_value_that_changes_the_computation_is_rejected(architecture: str, keys: dict[str, Any], expected: str) -> None:
    assert expected in rejection(of(architecture, keys))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"type": "ntk", "factor": 2.0}, "rope_scaling.type is 'ntk'; supported: default, linear, dynamic"),
        ({"type": "longrope"}, "the key rope_scaling.short_factor is missing; expected a list of 8 finite numbers"),
        (
            {**LONGROPE, "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; supported: an int",
        ),
        ({**LONGROPE, "long_factor": [1.0] * 7}, "rope_scaling.long_factor is [1.0,"),
        (
            {**LONGROPE, "short_factor": [0.0] * 8},
            "rope_scaling.short_factor is 0.0; supported: a finite number above 0",
        ),
        ({"rope_type": "mrope"}, "rope_scaling.rope_type is 'mrope'"),
        ({"rope_type": "linear"}, "the key rope_scaling.factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor is 0.5"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope_scaling.factor is nan"),
        (
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            "rope_scaling.partial_rotary_factor is 0.5",
        ),
        ({"rope_type": "llama3", "factor": 2.0}, "the key rope_scaling.low_freq_factor is missing"),
        (
            {**LLAMA3, "high_freq_factor": 0.5},
            "rope_scaling.high_freq_factor is 0.5; supported: a number from low_freq_factor (1) on",
        ),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings is 0"),
        ({**YARN, "truncate": 1}, "rope_scaling.truncate is 1; supported: true or false"),
        ({**YARN, "attention_factor": -1.0}, "rope_scaling.attention_factor is -1.0"),
        ({**YARN, "beta_fast": "fast"}, "rope_scaling.beta_fast is 'fast'"),
        ({"full_attention": {"rope_type": "default"}}, "supported: one flat table for all layers"),
        ("yarn", "rope_scaling is 'yarn'; supported: one flat table"),
    ],
)
def test_rope_scaling_that_is_not_computed_is_rejected(table: object, expected: str) -> None:
    assert expected in rejection({**LLAMA, "rope_scaling": table})


def test_refusal_shows_only_the_beginning_of_a_long_value() -> None:
    assert len(rejection({**LLAMA, "hidden_act": "x" * 100_000})) < 300
    supported = ", ".join((*architectures(), *encoder_architectures()))
    assert len(rejection({**LLAMA, "architectures": ["x" * 100_000]})) < 300 + len(supported)


def test_end_tokens_are_the_union_of_both_files() -> None:
    hf = {**LLAMA, "eos_token_id": 2}
    assert decoder_config(hf).eos_token_ids == (2,)
    assert decoder_config(hf, {"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)
    assert decoder_config(hf, {"eos_token_id": None}).eos_token_ids == (2,)
    assert decoder_config(LLAMA).eos_token_ids == ()


@pytest.mark.parametrize("value", [-2, "2", [2, "3"], 2.0, True, 1 << 40])
def test_an_end_token_that_is_no_token_id_is_rejected(value: object) -> None:
    assert "eos_token_id is " in rejection({**LLAMA, "eos_token_id": value})


def test_end_tokens_that_the_model_cannot_generate_end_nothing() -> None:
    size = LLAMA["vocab_size"]
    assert decoder_config({**LLAMA, "eos_token_id": [size - 1, size, -1]}).eos_token_ids == (size - 1,)


def test_reading_a_config_leaves_it_as_it_was() -> None:
    hf = {**LLAMA, "rope_scaling": dict(YARN)}
    before = repr(hf)
    decoder_config(hf)
    assert repr(hf) == before


def test_registry_does_not_import_jax() -> None:
    code = "import sys, jaxserve.models.registry as r; r.architectures(); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(jaxserve.__file__).parents[1])
