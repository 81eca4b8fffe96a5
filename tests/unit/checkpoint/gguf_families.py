"""Tiny checkpoints of families in llama.cpp's format, as its converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from tests.unit.checkpoint.checkpoint_files import as_llama_cpp_stores, stored, write_gguf

ARCHITECTURES = {
    "GemmaForCausalLM": ("gemma", gguf.MODEL_ARCH.GEMMA),
    "ArceeForCausalLM": ("arcee", gguf.MODEL_ARCH.ARCEE),
    "Dots1ForCausalLM": ("dots1", gguf.MODEL_ARCH.DOTS1),
    "Gemma2ForCausalLM": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "Gemma3ForCausalLM": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "Phi3ForCausalLM": ("phi3", gguf.MODEL_ARCH.PHI3),
    "Olmo2ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "Olmo3ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "GraniteForCausalLM": ("granite", gguf.MODEL_ARCH.GRANITE),
    "GraniteMoeForCausalLM": ("granitemoe", gguf.MODEL_ARCH.GRANITE_MOE),
    "GraniteMoeSharedForCausalLM": ("granitemoe", gguf.MODEL_ARCH.GRANITE_MOE),
    "DeepseekV2ForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "DeepseekV3ForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "Glm4MoeLiteForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "Llama4ForCausalLM": ("llama4", gguf.MODEL_ARCH.LLAMA4),
    "Glm4MoeForCausalLM": ("glm4moe", gguf.MODEL_ARCH.GLM4_MOE),
    "GraniteMoeHybridForCausalLM": ("granitehybrid", gguf.MODEL_ARCH.GRANITE_HYBRID),
    "NemotronHForCausalLM": ("nemotron_h_moe", gguf.MODEL_ARCH.NEMOTRON_H_MOE),
    "FalconH1ForCausalLM": ("falcon-h1", gguf.MODEL_ARCH.FALCON_H1),
    "Lfm2ForCausalLM": ("lfm2", gguf.MODEL_ARCH.LFM2),
    "Lfm2MoeForCausalLM": ("lfm2moe", gguf.MODEL_ARCH.LFM2MOE),
    "Qwen3NextForCausalLM": ("qwen3next", gguf.MODEL_ARCH.QWEN3NEXT),
    "Qwen3_5ForCausalLM": ("qwen35", gguf.MODEL_ARCH.QWEN35),
    "Qwen3_5MoeForCausalLM": ("qwen35moe", gguf.MODEL_ARCH.QWEN35MOE),
    "Qwen3MoeForCausalLM": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "Qwen2MoeForCausalLM": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
    "MixtralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "OlmoForCausalLM": ("olmo", gguf.MODEL_ARCH.OLMO),
    "OlmoeForCausalLM": ("olmoe", gguf.MODEL_ARCH.OLMOE),
    "GptOssForCausalLM": ("gpt-oss", gguf.MODEL_ARCH.GPT_OSS),
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def head_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention.key_length": hf["head_dim"], "attention.value_length": hf["head_dim"]}


def gemma_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    caps = {key: hf[key] for key in ("attn_logit_softcapping", "final_logit_softcapping") if key in hf}
    return caps | head_keys(hf) | {"attention.sliding_window": hf["sliding_window"]}


def gemma3_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return gemma_keys(hf) | {
        "attention.sliding_window_pattern": hf["sliding_window_pattern"],
        "rope.scaling.type": "linear",
        "rope.scaling.factor": hf["rope_scaling"]["factor"],
    }


def phi3_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "attention.sliding_window": hf.get("sliding_window") or 0,
        "rope.dimension_count": int(head_dim(hf) * hf.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": hf.get("original_max_position_embeddings", 4096),
    }
    if hf["rope_scaling"]:
        original, longest = hf["original_max_position_embeddings"], hf["max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(longest / original) / np.log(original)))
    return keys


def olmo3_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [True, True, True, False],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": hf["rope_scaling"]["factor"],
        "rope.scaling.original_context_length": hf["rope_scaling"]["original_max_position_embeddings"],
        "rope.scaling.attn_factor": 0.1 * float(np.log(hf["rope_scaling"]["factor"])) + 1,
    }


def granite_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }
    return {key: hf[name] for key, name in names.items()}


def expert_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    keys = {"expert_count": next(hf[name] for name in counts if name in hf)}
    keys["expert_used_count"] = hf["num_experts_per_tok"]
    for key, name in (
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if name in hf:
            keys[key] = hf[name]
    return keys


def granite_moe_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    keys = granite_keys(hf) | expert_keys(hf)
    width = hf.get("shared_intermediate_size")
    return keys if width is None else keys | {"expert_shared_feed_forward_length": width}


def granite_hybrid_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    }
    is_attention = [name in ("attention", "full_attention") for name in hf["layer_types"]]
    return granite_moe_keys(defaults | dict(hf)) | {
        "feed_forward_length": hf["intermediate_size"] if hf["num_local_experts"] else hf["shared_intermediate_size"],
        "attention.head_count_kv": [hf["num_key_value_heads"] * found for found in is_attention],
        **mamba_keys(hf, hf["mamba_expand"] * hf["hidden_size"]),
        "rope.scaling.finetuned": hf["position_embedding_type"] == "rope",
    }


def mamba_keys(hf: Mapping[str, Any], width: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": hf["mamba_d_conv"],
        "ssm.state_size": hf["mamba_d_state"],
        "ssm.group_count": hf["mamba_n_groups"],
        "ssm.inner_size": width,
        "ssm.time_step_rank": hf["mamba_n_heads"],
    }


def falcon_h1_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {f"attention.{size}_length": head_dim(hf) for size in ("key", "value")}
    return sizes | mamba_keys(hf, hf["mamba_d_ssm"])


def nemotron_h_kinds(hf: Mapping[str, Any]) -> list[str]:
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return hf.get("layers_block_type") or [letters[letter] for letter in hf["hybrid_override_pattern"]]


def nemotron_h_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a dense model, or of one whose feed-forward blocks are all experts."""
    kinds, has_experts = nemotron_h_kinds(hf), "moe" in nemotron_h_kinds(hf)
    names = {"mamba_d_conv": "conv_kernel", "mamba_d_state": "ssm_state_size", "mamba_n_groups": "n_groups"}
    mamba = {name: hf[own] for name, own in names.items()} | {"mamba_n_heads": hf["mamba_num_heads"]}
    width = hf["moe_intermediate_size" if has_experts else "intermediate_size"]
    keys = mamba_keys(mamba, hf["mamba_num_heads"] * hf["mamba_head_dim"]) | {
        "attention.head_count_kv": [hf["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "attention.key_length": hf["head_dim"],
        "attention.value_length": hf["head_dim"],
        "attention.layer_norm_rms_epsilon": hf["layer_norm_epsilon"],
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "rope.dimension_count": hf["head_dim"] // 4 * 2,
        "rope.scaling.finetuned": False,
    }
    if not has_experts:
        return keys
    latent = {"moe_latent_size": hf["moe_latent_size"]} if "moe_latent_size" in hf else {}
    return (
        keys
        | expert_keys(hf)
        | latent
        | {
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": hf["moe_shared_expert_intermediate_size"],
            "expert_group_count": hf["n_group"],
            "expert_weights_norm": hf["norm_topk_prob"],
            "expert_weights_scale": hf["routed_scaling_factor"],
        }
    )


def as_in_nemotron_h(name: str) -> str:
    """Return the name of a tensor in a checkpoint of Nemotron-H, whose layers have one block and one norm."""
    name = re.sub(r"\.(mamba|self_attn|mlp)\.(?!experts)", ".mixer.", name)
    name = re.sub(r"\.(input|post_attention)_layernorm\.", ".norm.", name)
    name = name.replace(".shared_expert.", ".shared_experts.")
    return name if ".experts." in name else name.replace("model.layers.", "backbone.layers.")


def falcon_h1_factor(name: str, hf: Mapping[str, Any]) -> float | np.ndarray:
    """Return what the converter multiplies a weight with; of an input projection a factor for each row."""
    own = hf["attention_in_multiplier"]
    gate, down = hf["mlp_multipliers"]
    by_module = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": own,
        "k_proj": own * hf["key_multiplier"],
        "v_proj": own,
        "o_proj": hf["attention_out_multiplier"],
        "out_proj": hf["ssm_out_multiplier"],
        "lm_head": hf["lm_head_multiplier"],
        "embed_tokens": hf["embedding_multiplier"],
    }
    module = name.split(".")[-2]
    if module != "in_proj":
        return float(by_module.get(module, 1.0))
    width, states = hf["mamba_d_ssm"], hf["mamba_n_groups"] * hf["mamba_d_state"]
    counts = [width, width, states, states, hf["mamba_n_heads"]]
    return np.repeat(np.float32(hf["ssm_in_multiplier"]) * np.float32(hf["ssm_multipliers"]), counts)[:, None]


def lfm2_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    count = hf["num_hidden_layers"]
    attending = hf.get("full_attn_idxs", range(count))
    layer_types = hf.get("layer_types") or [
        "full_attention" if layer in attending else "conv" for layer in range(count)
    ]
    sizes = ("key_length", "value_length") if "head_dim" in hf else ()
    return {f"attention.{size}": hf["head_dim"] for size in sizes} | {
        "attention.head_count_kv": [hf["num_key_value_heads"] * (name != "conv") for name in layer_types],
        "attention.layer_norm_rms_epsilon": hf["norm_eps"],
        "shortconv.l_cache": hf["conv_L_cache"],
        "vocab_size": hf["vocab_size"],
    }


def lfm2_width(hf: Mapping[str, Any]) -> int:
    width: int = hf.get("block_ff_dim") or hf["intermediate_size"]
    if not hf.get("block_auto_adjust_ff_dim", True):
        return width
    step = hf["block_multiple_of"]
    return -(-int(hf["block_ffn_dim_multiplier"] * int(2 * width / 3)) // step) * step


def lfm2_moe_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **lfm2_keys(hf),
        **expert_keys(hf),
        "leading_dense_block_count": hf["num_dense_layers"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }


def delta_net_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    rope, heads = hf["rope_parameters"], hf["linear_num_value_heads"]
    return {
        "attention.key_length": hf["head_dim"],
        "attention.value_length": hf["head_dim"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(hf["head_dim"] * rope["partial_rotary_factor"]),
        "ssm.conv_kernel": hf["linear_conv_kernel_dim"],
        "ssm.state_size": hf["linear_key_head_dim"],
        "ssm.group_count": hf["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": hf["linear_value_head_dim"] * heads,
    }


def qwen3_5_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return delta_net_keys(hf) | {"full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0]}


def with_tiled_values(name: str, tensor: np.ndarray, hf: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor of a gated delta net with the first value head of every key head, then the second of every key head, ..."""
    num_keys, num_values, width = (
        hf[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    part, group = name.split(".linear_attn.")[1], num_values // num_keys
    if part == "norm.weight":
        return tensor
    axis = 1 if part == "out_proj.weight" else 0
    per_head = 1 if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight") else width
    before, values = np.split(tensor, [tensor.shape[axis] - num_values * per_head], axis)
    heads = np.split(values, num_values, axis)
    tiled = [heads[key * group + index] for index in range(group) for key in range(num_keys)]
    return np.concatenate([before, *tiled], axis)


def with_split_gates(tensors: Mapping[str, np.ndarray], hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors with `in_proj_qkvz` as all queries, all keys and all values, and the gates beside them."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("in_proj_qkvz.weight"):
            found[name] = tensor
            continue
        heads, key_dim = hf["linear_num_key_heads"], hf["linear_key_head_dim"]
        width = hf["linear_num_value_heads"] // heads * hf["linear_value_head_dim"]
        by_head = tensor.reshape(heads, 2 * (key_dim + width), -1)
        parts = np.split(by_head, [key_dim, 2 * key_dim, 2 * key_dim + width], 1)
        *inputs, gates = (part.reshape(-1, tensor.shape[-1]) for part in parts)
        found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = np.concatenate(inputs), gates
    return found


def mixer_as_stored(name: str, tensor: np.ndarray, hf: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor of a Mamba-2 mixer as the converter writes it."""
    if name.endswith(".A_log"):
        return -np.exp(tensor)[:, None]
    if name.endswith(".D"):
        return tensor[:, None]
    if name.endswith("conv1d.weight"):
        return tensor[:, 0]
    groups = hf.get("mamba_n_groups") or hf["n_groups"]
    return tensor.reshape(groups, -1) if name.endswith("norm.weight") else tensor


def router_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return expert_keys(hf) | {
        "leading_dense_block_count": hf["first_k_dense_replace"],
        "expert_shared_count": hf["n_shared_experts"],
        "expert_group_count": hf["n_group"],
        "expert_group_used_count": hf["topk_group"],
        "expert_weights_norm": hf["norm_topk_prob"],
        "expert_weights_scale": hf["routed_scaling_factor"],
    }


def glm4_moe_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return router_keys(hf) | {
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "rope.dimension_count": int(head_dim(hf) * hf["partial_rotary_factor"]),
    }


def deepseek_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    rank, rope_dim = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    keys = router_keys(hf) | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": hf["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": hf["v_head_dim"],
        "rope.dimension_count": rope_dim,
    }
    if hf["q_lora_rank"] is not None:
        keys["attention.q_lora_rank"] = hf["q_lora_rank"]
    if "scoring_func" in hf:
        keys["expert_gating_func"] = int(gguf.ExpertGatingFuncType[hf["scoring_func"].upper()])
    if not hf.get("rope_scaling"):
        return keys
    return keys | {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": hf["rope_scaling"]["factor"],
        "rope.scaling.original_context_length": hf["rope_scaling"]["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * hf["rope_scaling"]["mscale_all_dim"],
    }


def llama4_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return expert_keys(hf) | {
        "feed_forward_length": hf["intermediate_size_mlp"],
        "expert_feed_forward_length": hf["intermediate_size"],
        "interleave_moe_layer_step": hf.get("interleave_moe_layer_step", 1),
    }


LLAMA4_FIXED = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "use_qk_norm": True}
"""Values that llama.cpp uses for every Llama 4 with fewer than 128 experts."""


def llama4_in_a_file(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a Llama 4 with what files of llama.cpp can hold: every fourth layer without rope, and these factors."""
    changed = {key: value for key, value in hf.items() if key != "no_rope_layers"} | LLAMA4_FIXED
    if "rope_parameters" in hf:
        changed["rope_parameters"] = hf["rope_parameters"] | {"original_max_position_embeddings": 8192}
    return changed


def llama3_factors(hf: Mapping[str, Any]) -> np.ndarray:
    """Return the divisors of frequencies of Llama 3's rope without a smooth part: slow ones have the factor."""
    rope, size = hf["rope_parameters"], head_dim(hf)
    assert rope["low_freq_factor"] == rope["high_freq_factor"]
    longest = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    return np.where(wavelengths > longest, rope["factor"], 1.0).astype(np.float32)


def as_before_absorption(hf: Mapping[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSeek's keys as converters wrote them before llama.cpp absorbed matrices, and before keys of groups and gating."""
    kept = {key: value for key, value in keys.items() if not key.endswith("_mla") and "_group_" not in key}
    del kept["expert_gating_func"]
    return kept | {
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
        "attention.value_length": hf["v_head_dim"],
    }


def with_absorbed_latents(tensors: Mapping[str, np.ndarray], hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors with `kv_b_proj` as the transposed matrices of the heads' keys and the matrices of their values."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        heads = np.split(tensor, hf["num_attention_heads"])
        key_dim = hf["qk_nope_head_dim"]
        found[name.replace("kv_b_proj", "k_b_proj")] = np.stack([head[:key_dim].T for head in heads])
        found[name.replace("kv_b_proj", "v_b_proj")] = np.stack([head[key_dim:] for head in heads])
    return found


def mtp_blocks(hf: Mapping[str, Any], count: int) -> tuple[dict[str, Any], dict[str, tuple[str, np.ndarray]]]:
    """Return metadata and tensors of multi-token-prediction layers: converters write them as blocks after the decoder's."""
    first = hf["num_hidden_layers"]
    names = ("attn_norm", "attn_q", "exp_probs_b", "nextn.eh_proj", "nextn.shared_head_norm")
    blocks = [f"blk.{block}.{name}.weight" for block in range(first, first + count) for name in names]
    keys = {"block_count": first + count, "nextn_predict_layers": count}
    return keys, {name: ("F32", np.ones((4, 4), np.float32)) for name in blocks}


def gpt_oss_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return expert_keys(hf) | {
        "expert_feed_forward_length": hf["intermediate_size"],
        "attention.sliding_window": hf["sliding_window"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": hf["rope_scaling"]["factor"],
        "rope.scaling.original_context_length": hf["rope_scaling"]["original_max_position_embeddings"],
    }


OWN_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "GemmaForCausalLM": head_keys,
    "ArceeForCausalLM": head_keys,
    "Dots1ForCausalLM": lambda hf: router_keys(hf) | {"expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID)},
    "Gemma2ForCausalLM": gemma_keys,
    "Gemma3ForCausalLM": gemma3_keys,
    "Phi3ForCausalLM": phi3_keys,
    "Olmo2ForCausalLM": lambda hf: {},
    "Olmo3ForCausalLM": olmo3_keys,
    "GraniteForCausalLM": granite_keys,
    "GraniteMoeForCausalLM": granite_moe_keys,
    "GraniteMoeSharedForCausalLM": granite_moe_keys,
    "DeepseekV2ForCausalLM": deepseek_keys,
    "DeepseekV3ForCausalLM": deepseek_keys,
    "Glm4MoeLiteForCausalLM": deepseek_keys,
    "Llama4ForCausalLM": llama4_keys,
    "Glm4MoeForCausalLM": glm4_moe_keys,
    "GraniteMoeHybridForCausalLM": granite_hybrid_keys,
    "NemotronHForCausalLM": nemotron_h_keys,
    "FalconH1ForCausalLM": falcon_h1_keys,
    "Lfm2ForCausalLM": lambda hf: lfm2_keys(hf) | {"feed_forward_length": lfm2_width(hf)},
    "Lfm2MoeForCausalLM": lfm2_moe_keys,
    "Qwen3NextForCausalLM": lambda hf: expert_keys(hf) | delta_net_keys(hf),
    "Qwen3_5ForCausalLM": qwen3_5_keys,
    "Qwen3_5MoeForCausalLM": lambda hf: expert_keys(hf) | qwen3_5_keys(hf),
    "Qwen3MoeForCausalLM": expert_keys,
    "Qwen2MoeForCausalLM": expert_keys,
    "MixtralForCausalLM": expert_keys,
    "OlmoForCausalLM": lambda hf: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": hf["clip_qkv"]},
    "OlmoeForCausalLM": expert_keys,
    "GptOssForCausalLM": gpt_oss_keys,
}


def head_dim(hf: Mapping[str, Any]) -> int:
    found: int = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    return found


def as_stored(name: str, tensor: np.ndarray, hf: Mapping[str, Any]) -> np.ndarray:
    """Return the tensor that llama.cpp's converter writes."""
    model = hf["architectures"][0]
    if model.startswith("FalconH1"):
        tensor = tensor * falcon_h1_factor(name, hf)
    if ".mamba." in name:
        return mixer_as_stored(name, tensor, hf)
    if model.startswith("Qwen3_5") and ".linear_attn." in name:
        tensor = with_tiled_values(name, tensor, hf)
    if name.endswith(".conv.conv.weight"):
        return tensor[:, 0]
    if name.endswith(".linear_attn.A_log"):
        return -np.exp(tensor)
    if name.endswith(".linear_attn.conv1d.weight"):
        return tensor[:, 0]
    has_offset = model.startswith(("Gemma", "Qwen3Next", "Qwen3_5")) and not name.endswith("linear_attn.norm.weight")
    if has_offset and name.endswith("norm.weight"):
        return tensor + 1
    if model.startswith(("Arcee", "Granite", "Mixtral", "Nemotron", "OlmoFor")) and (
        "q_proj" in name or "k_proj" in name
    ):
        heads = hf["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return as_llama_cpp_stores(tensor, heads)
    return tensor[0] if name.endswith("shared_expert_gate.weight") else tensor


def with_stacked_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the matrices of a layer's experts as one."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    found = {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    return found | {name: np.stack([stack[index] for index in sorted(stack)]) for name, stack in stacks.items()}


def with_joined_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the gates of all experts before their other inputs, in one."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".experts.gate_proj.weight")]:
        parts = [found.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
        found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(parts, 1)
    return found


def write_as_gguf(
    path: Path,
    checkpoint: Checkpoint,
    hf: Mapping[str, Any],
    kind: str = "F32",
    num_mtp_layers: int = 0,
    *,
    is_absorbed: bool = True,
    has_split_gates: bool = True,
    joins_experts: bool = False,
    matrices: str = "F32",
) -> Path:
    """Write the checkpoint as llama.cpp's converter does.

    kind: type of the matrices of experts. matrices: type of other projections whose rows are whole blocks of 32. num_mtp_layers: blocks of multi-token-prediction layers after those of the
    decoder. is_absorbed: False: as converters of early 2025 wrote DeepSeek's files. has_split_gates:
    False: as the first converters of Qwen3-Next wrote the inputs of gated delta nets. joins_experts: gates and inputs of experts are one
    tensor.
    """
    name, architecture = ARCHITECTURES[hf["architectures"][0]]
    if architecture == gguf.MODEL_ARCH.NEMOTRON_H_MOE and "moe" not in nemotron_h_kinds(hf):
        name, architecture = "nemotron_h", gguf.MODEL_ARCH.NEMOTRON_H
    keys = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf.get("intermediate_size"),
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": hf.get("rms_norm_eps"),
        "rope.freq_base": float(hf.get("rope_theta", 10_000.0)),
        "rope.dimension_count": head_dim(hf),
        **OWN_KEYS[hf["architectures"][0]](hf),
    }
    if not is_absorbed:
        keys = as_before_absorption(hf, keys)
    tokens = {f"tokenizer.ggml.{key}": hf[key] for key in ("bos_token_id", "eos_token_id")}
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, hf["num_hidden_layers"])  # of layers without experts
    names = gguf.get_tensor_name_map(architecture, hf["num_hidden_layers"])
    tensors = {}
    values_by_name = with_stacked_experts(as_in_the_file(checkpoint))
    if joins_experts:
        values_by_name = with_joined_experts(values_by_name)
    if has_split_gates:
        values_by_name = with_split_gates(values_by_name, hf)
    for tensor, values in (with_absorbed_latents(values_by_name, hf) if is_absorbed else values_by_name).items():
        hf_name = tensor.replace("shared_experts.", "shared_expert.").replace("_correction_bias", "_correction.bias")
        hf_name = hf_name.replace(".dt_bias", ".dt_proj.bias").replace(".conv.o_proj", ".conv.out_proj")
        if architecture == gguf.MODEL_ARCH.FALCON_H1:
            hf_name = hf_name.replace("post_attention_layernorm", "pre_ff_layernorm")
        if name.startswith("nemotron_h"):
            hf_name = as_in_nemotron_h(hf_name)
        if architecture == gguf.MODEL_ARCH.LFM2MOE:
            hf_name = hf_name.replace("model.norm.", "model.embedding_norm.")
        joined = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj\.weight", tensor)
        stored_name = f"blk.{joined[1]}.ffn_gate_up_exps.weight" if joined else None
        stored_name = (
            stored_name or names.get_name(hf_name, (".weight", ".bias")) or dense.get_name(hf_name, (".weight",))
        )
        assert stored_name is not None, tensor
        stored_name += ".weight" if tensor.endswith("sinks") else ""
        is_stack = tensor.endswith("_proj.weight") and ".experts." in tensor
        value = as_stored(tensor, values, hf)
        is_matrix = tensor.endswith("_proj.weight") and value.shape[-1] % 32 == 0
        tensors[stored_name] = stored(kind if is_stack else matrices if is_matrix else "F32", value)
    for kind_of_text in ("short", "long"):
        factors = (hf.get("rope_scaling") or {}).get(f"{kind_of_text}_factor")
        if factors:
            tensors[f"rope_factors_{kind_of_text}.weight"] = ("F32", np.array(factors, np.float32))
    if (hf.get("rope_parameters") or {}).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = ("F32", llama3_factors(hf))
    if num_mtp_layers:
        own_keys, own_tensors = mtp_blocks(hf, num_mtp_layers)
        keys, tensors = keys | own_keys, tensors | own_tensors
    return write_gguf(
        path, name, {f"{name}.{key}": value for key, value in keys.items() if value is not None} | tokens, tensors
    )


def as_in_the_file(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Return float32 tensors under the names of `checkpoint`; of a dense one without mixers, with matrices joined as they are
    stored."""
    is_split = any(part in name for name in checkpoint.tensors for part in (".experts.", ".mamba."))
    whole = checkpoint.inner if not is_split and isinstance(checkpoint, CheckpointView) else checkpoint
    return {name: np.asarray(whole.read(name)).astype(np.float32) for name in whole.tensors}
