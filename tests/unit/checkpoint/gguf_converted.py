"""Tiny checkpoints as llama.cpp's converter writes them: from the tensors and the config of Hugging Face's files.

`gguf_families.py` has the families that were read before; names here are those of the gguf package alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.unit.checkpoint.checkpoint_files import as_llama_cpp_stores, stored, write_gguf
from tests.unit.checkpoint.gguf_families import (
    granite_keys,
    head_dim,
    mamba_keys,
    mixer_as_stored,
    router_keys,
    with_absorbed_latents,
    with_stacked_experts,
)

Config = Mapping[str, Any]
Tensors = dict[str, np.ndarray]
_SUFFIXES: Final = (".weight", ".bias")
_BIASES: Final = {
    "dt": "dt_proj.bias",
    "mlp.expert": "mlp.expert_bias.bias",
    "mlp.gate.expert": "mlp.gate.expert_bias.bias",
    "moe.router": "moe.router_bias.bias",
}
_BARE: Final = ("layer_scalar", "_scale")
_FIRST_KEYS: Final = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
}
"""Keys of every file, and those of `config.json` of which the first that there is has their value."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The converter's treatment of one architecture."""

    architecture: gguf.MODEL_ARCH
    """Its map has the names of tensors."""
    keys: Callable[[Config], dict[str, Any]] = lambda hf: {}
    change: Callable[[str, np.ndarray, Config], np.ndarray] = lambda name, tensor, hf: tensor
    """Return a tensor as it is stored, by its Hugging Face name."""
    prepare: Callable[[Tensors, Config], Tensors] = lambda tensors, hf: tensors
    """Return all tensors with others in the place of some."""
    factors: Callable[[Config], np.ndarray] | None = None
    """Return what rope's frequencies are divided by, which is a tensor of the file."""
    name: str | None = None
    """`general.architecture`, if the gguf package has none; None: that of `architecture`."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Names of parts of a layer in the file, by Hugging Face's, that the converter writes without the map of the gguf package."""


def rope_table(hf: Config) -> Mapping[str, Any]:
    table: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    full: Mapping[str, Any] = table.get("full_attention", table)
    return full


def rope_keys(hf: Config) -> dict[str, Any]:
    """Return the keys of every file for rope: the base, and yarn's scaling."""
    table = rope_table(hf)
    theta = table.get("rope_theta") or hf.get("rope_theta", 10_000.0)
    keys = {"rope.freq_base": theta if isinstance(theta, list) else float(theta)}  # or a list by layer, of Step 3.5
    if table.get("rope_type", table.get("type")) != "yarn":
        return keys
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    own = {f"rope.scaling.{key}": table[name] for key, name in names.items() if name in table}
    return keys | {"rope.scaling.type": "yarn"} | own


def partial_rotary(default: float) -> Callable[[Config], dict[str, Any]]:
    return lambda hf: {"rope.dimension_count": int(hf.get("partial_rotary_factor", default) * head_dim(hf))}


def ministral3_keys(hf: Config) -> dict[str, Any]:
    table = rope_table(hf)
    return {
        "rope.dimension_count": head_dim(hf),
        "rope.scaling.yarn_log_multiplier": table["mscale_all_dim"],
        "attention.temperature_scale": table["llama_4_scaling_beta"],
    }


def with_stacked_norms(tensors: Tensors, hf: Config) -> Tensors:
    """Return one matrix (heads, H) for the norms of query heads of a layer, and one for those of key heads."""
    found, norms = dict(tensors), dict[str, dict[int, np.ndarray]]()
    for name in tensors:
        if (match := re.fullmatch(r"(.+)\.norms\.(\d+)\.weight", name)) is not None:
            norms.setdefault(f"{match[1]}.weight", {})[int(match[2])] = found.pop(name)
    return found | {name: np.stack([own[head] for head in sorted(own)]) for name, own in norms.items()}


def exaone4_keys(hf: Config) -> dict[str, Any]:
    count, pattern = hf["num_hidden_layers"], hf["sliding_window_pattern"]
    return {
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [(index + 1) % pattern != 0 for index in range(count)],
    }


def without_activations(tensors: Tensors, hf: Config) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".act_fn." not in name}


def xielu_keys(tensors: Tensors) -> dict[str, list[float]]:
    """Return the numbers of the activation by layer, which the converter writes as metadata."""
    found: dict[str, dict[int, float]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.act_fn\.(\w+)", name)
        if match is not None:
            found.setdefault(match[2], {})[int(match[1])] = float(tensor.reshape(-1)[0])
    return {f"xielu.{part}": [values[layer] for layer in sorted(values)] for part, values in found.items()}


def solar_keys(hf: Config) -> dict[str, Any]:
    """Return the keys of GLM-4.5, whose converter writes this model, too."""
    return {
        **router_keys({"first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **hf}),
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "rope.dimension_count": int(head_dim(hf) * hf.get("partial_rotary_factor", 1.0)),
    }


def hunyuan_keys(hf: Config) -> dict[str, Any]:
    """Return the stretched base; contexts are those of the published models."""
    size = head_dim(hf)
    return {
        "rope.freq_base": hf["rope_theta"] * rope_table(hf)["alpha"] ** (size / (size - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1,
        "rope.scaling.original_context_length": 256 * 1024,
        "context_length": 256 * 1024,
    }


def ernie_moe_keys(hf: Config) -> dict[str, Any]:
    names = {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
    }
    return {key: hf[name] for key, name in names.items()} | {
        "expert_shared_feed_forward_length": hf["intermediate_size"] // hf["num_key_value_heads"]
    }


def hunyuan_moe_keys(hf: Config) -> dict[str, Any]:
    return hunyuan_keys(hf) | {
        "expert_used_count": hf["moe_topk"][0],
        "expert_feed_forward_length": hf["intermediate_size"],
        "expert_shared_feed_forward_length": hf["intermediate_size"],
        "expert_shared_count": 1,
    }


def minimax_keys(hf: Config) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": hf["intermediate_size"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "rope.dimension_count": hf["rotary_dim"],
    }


def cohere2_keys(hf: Config) -> dict[str, Any]:
    return {
        "logit_scale": hf["logit_scale"],
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": hf["sliding_window_pattern"],
        "rope.dimension_count": head_dim(hf),
        "rope.scaling.type": "none",
    }


def permuted(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    """Return a tensor with the rows of queries and keys in pairs."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return tensor if heads is None else as_llama_cpp_stores(tensor, hf[heads])


def with_unit_norms(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def llama3_divisors(hf: Config) -> np.ndarray:
    """Return what Llama 3's scaling divides each frequency by."""
    table, size = rope_table(hf), head_dim(hf)
    low, high, original = table["low_freq_factor"], table["high_freq_factor"], table["original_max_position_embeddings"]
    base = table.get("rope_theta") or hf["rope_theta"]
    divisors = []
    for index in range(0, size, 2):
        turns = original / (2 * np.pi * base ** (index / size))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / table["factor"] + smooth))
    return np.array(divisors, np.float32)


def gemma3n_keys(hf: Config) -> dict[str, Any]:
    """Return the keys; a sparsity is stored as the quantile of the normal distribution."""
    return {
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in hf["layer_types"]],
        "attention.shared_kv_layers": hf["num_kv_shared_layers"],
        "embedding_length_per_layer_input": hf["hidden_size_per_layer_input"],
        "altup.active_idx": hf.get("altup_active_idx", 0),
        "altup.num_inputs": hf.get("altup_num_inputs", 4),
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(each) if each else -np.inf for each in hf["activation_sparsity_pattern"]
        ],
        "final_logit_softcapping": hf["final_logit_softcapping"],
        "rope.freq_base_swa": hf.get("rope_local_base_freq", 10_000.0),
    }


def with_stacked_streams(tensors: Tensors, hf: Config) -> Tensors:
    """Return the tensors with the matrices of residual streams as one, and embeddings of each layer for all tokens."""
    found, stacks = {}, dict[str, list[np.ndarray]]()
    for name in sorted(tensors):
        match = re.fullmatch(r"(model\.altup_\w+)\.\d+\.weight", name)
        if match is None:
            found[name] = tensors[name]
        else:
            stacks.setdefault(f"{match[1]}.weight", []).append(tensors[name])
    table = "model.embed_tokens_per_layer.weight"
    found[table] = np.pad(found[table], ((0, hf["vocab_size"] - len(found[table])), (0, 0)))
    return found | {name: np.stack(matrices) for name, matrices in stacks.items()}


def gemma4_keys(hf: Config) -> dict[str, Any]:
    count, num_shared = hf["num_hidden_layers"], hf.get("num_kv_shared_layers", 0)
    is_sliding = [kind == "sliding_attention" for kind in hf["layer_types"]]
    width, heads, full_heads = (
        hf.get(f"{name}") for name in ("intermediate_size", "num_key_value_heads", "num_global_key_value_heads")
    )
    keys = {
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": is_sliding,
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": hf.get("hidden_size_per_layer_input", 256),
        "expert_feed_forward_length": hf.get("moe_intermediate_size"),
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        "rope.freq_base_swa": hf["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        keys |= {name: hf["global_head_dim"], f"{name}_swa": hf["head_dim"]}
    if hf.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [width * (1 + (layer >= count - num_shared)) for layer in range(count)]
    if full_heads is not None:
        keys["attention.head_count_kv"] = [heads if each else full_heads for each in is_sliding]
    return keys


def proportional_divisors(hf: Config) -> np.ndarray:
    """Return 1 for pairs that rotate and 1e30 for the others."""
    size, fraction = hf["global_head_dim"], rope_table(hf)["partial_rotary_factor"]
    num_rotated = int(size * fraction / 2)
    return np.array([1.0] * num_rotated + [1e30] * (size // 2 - num_rotated), np.float32)


def sigmoid_router_keys(hf: Config) -> dict[str, Any]:
    """Return the keys of a router with sigmoid scores, under the names that published configs have for them."""
    names = {
        "expert_shared_count": "num_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "num_dense_layers" if "num_dense_layers" in hf else "first_k_dense_replace",
        "expert_weights_scale": "route_scale" if "route_scale" in hf else "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
    is_normalized = hf.get("route_norm", hf.get("norm_topk_prob", True))
    gating = {"expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID), "expert_weights_norm": is_normalized}
    return {key: hf[name] for key, name in names.items() if name in hf} | gating


def afmoe_keys(hf: Config) -> dict[str, Any]:
    """Return the keys; llama.cpp reads the period of full attention, which the converter does not write: it is 4."""
    window = {"attention.sliding_window": hf["sliding_window"], "rope.dimension_count": head_dim(hf)}
    period = {"attention.sliding_window_pattern": hf["global_attn_every_n_layers"]}
    return sigmoid_router_keys(hf) | window | period


def exaone_moe_keys(hf: Config) -> dict[str, Any]:
    width = hf["moe_intermediate_size"] * hf["num_shared_experts"]
    own = {"nextn_predict_layers": 0, "rope.scaling.type": "none", "expert_shared_feed_forward_length": width}
    return exaone4_keys(hf) | sigmoid_router_keys(hf) | own | {"vocab_size": hf["vocab_size"]}


def chatglm_keys(hf: Config) -> dict[str, Any]:
    return partial_rotary(0.5)(hf) | {"rope.freq_base": 10_000.0}


def with_joined_qkv(tensors: Tensors, hf: Config) -> Tensors:
    """Return the tensors as ChatGLM's, whose queries, keys and values are one."""
    found = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        found[name.replace("q_proj", "query_key_value")] = np.concatenate(parts)
    return found


def with_split_qkv(tensors: Tensors, hf: Config) -> Tensors:
    """Return the tensors of Ling or InternLM2 with queries, keys and values apart, under Llama's names."""
    found, heads, groups = {}, hf["num_attention_heads"], hf["num_key_value_heads"]
    for name, tensor in tensors.items():
        above, _, last = name.rpartition(".attention.")
        if last == "query_key_value.weight":
            rows = tensor.reshape(1, heads + 2 * groups, -1, tensor.shape[-1])
            ends = (heads, heads + groups)
        elif last == "wqkv.weight":
            rows = tensor.reshape(groups, heads // groups + 2, -1, tensor.shape[-1])
            ends = (heads // groups, heads // groups + 1)
        else:
            found[name] = tensor
            continue
        for part, own in zip("qkv", np.split(rows, ends, axis=1), strict=True):
            found[f"{above}.self_attn.{part}_proj.weight"] = own.reshape(-1, tensor.shape[-1])
    return found


def ling_keys(hf: Config) -> dict[str, Any]:
    """Return the keys of experts: of Ling 2.0 those of groups, too."""
    shared = {"n_shared_experts": hf["num_shared_experts"], "n_group": None, "topk_group": None}
    return router_keys({"routed_scaling_factor": 1.0, **shared, **hf}) | {
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID) if "score_function" in hf else None,
        "rope.dimension_count": int(head_dim(hf) * hf.get("partial_rotary_factor", 1.0)),
    }


def minicpm_keys(hf: Config) -> dict[str, Any]:
    """Return the factors, of which the last is a divisor, and the length before stretching."""
    return {
        "embedding_scale": float(hf["scale_emb"]),
        "residual_scale": hf["scale_depth"] * hf["num_hidden_layers"] ** -0.5,
        "logit_scale": hf["hidden_size"] / hf["dim_model_base"],
        "rope.dimension_count": head_dim(hf),
        "rope.scaling.original_context_length": rope_table(hf)["original_max_position_embeddings"],
    }


def nas_keys(hf: Config) -> dict[str, Any]:
    """Return heads and widths by layer, 0 for blocks that a layer lacks."""
    heads, kv_heads, widths = [], [], []
    for block in hf["block_configs"]:
        group, multiple = block["attention"]["n_heads_in_group"], block["ffn"]["ffn_mult"]
        heads.append(hf["num_attention_heads"] if group else 0)
        kv_heads.append(hf["num_attention_heads"] // group if group else 0)
        width = block["ffn"].get("intermediate_size") or 0
        widths.append(-(-int(2 * multiple * hf["hidden_size"] / 3) // 256) * 256 if multiple else width)
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "feed_forward_length": widths,
        "attention.key_length": head_dim(hf),
        "attention.value_length": head_dim(hf),
        "rope.dimension_count": head_dim(hf),
    }


def permuted_by_layer(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    """Return a tensor with the rows of queries and keys in pairs, by as many heads as it has."""
    is_rotated = name.split(".")[-2] in ("q_proj", "k_proj")
    return as_llama_cpp_stores(tensor, len(tensor) // head_dim(hf)) if is_rotated else tensor


def exaone_keys(hf: Config) -> dict[str, Any]:
    return {
        "block_count": hf["num_layers"],
        "attention.layer_norm_rms_epsilon": hf["layer_norm_epsilon"],
        "rope.dimension_count": head_dim(hf),
    }


def phimoe_keys(hf: Config) -> dict[str, Any]:
    table = rope_table(hf)
    scale = hf["max_position_embeddings"] / table["original_max_position_embeddings"]
    factor = np.sqrt(1 + np.log(scale) / np.log(table["original_max_position_embeddings"]))
    return {
        "attention.sliding_window": hf["sliding_window"],
        "rope.scaling.original_context_length": table["original_max_position_embeddings"],
        "rope.scaling.attn_factor": float(factor),
        "rope.dimension_count": head_dim(hf),
    }


def minicpm3_keys(hf: Config) -> dict[str, Any]:
    return {
        "attention.q_lora_rank": hf["q_lora_rank"],
        "attention.kv_lora_rank": hf["kv_lora_rank"],
        "attention.key_length": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
        "rope.dimension_count": hf["qk_rope_head_dim"],
    }


def youtu_keys(hf: Config) -> dict[str, Any]:
    """Return the keys of latent attention, and those of experts that DeepSeek's converter writes for a dense model."""
    return latent_keys(hf) | {
        "leading_dense_block_count": hf["num_hidden_layers"],
        "expert_feed_forward_length": hf["intermediate_size"],
        "expert_shared_count": 0,
    }


def dbrx_keys(hf: Config) -> dict[str, Any]:
    attention, experts = hf["attn_config"], hf["ffn_config"]
    return {
        "block_count": hf["n_layers"],
        "context_length": hf["max_seq_len"],
        "embedding_length": hf["d_model"],
        "feed_forward_length": experts["ffn_hidden_size"],
        "attention.head_count": hf["n_heads"],
        "attention.head_count_kv": attention["kv_n_heads"],
        "rope.freq_base": float(attention["rope_theta"]),
        "attention.clamp_kqv": attention["clip_qkv"],
        "expert_count": experts["moe_num_experts"],
        "expert_used_count": experts["moe_top_k"],
        "attention.layer_norm_epsilon": 1e-5,
    }


def as_dbrx_stores(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    """Return a tensor with an axis for experts, and outputs by inputs."""
    if ".experts.mlp." not in name:
        return tensor
    by_expert = tensor.reshape(hf["ffn_config"]["moe_num_experts"], hf["ffn_config"]["ffn_hidden_size"], hf["d_model"])
    return by_expert.swapaxes(1, 2) if name.endswith("w2") else by_expert


def bamba_keys(hf: Config) -> dict[str, Any]:
    attending = hf["attn_layer_indices"]
    width = hf["mamba_expand"] * hf["hidden_size"]
    return mamba_keys(hf, width) | {
        "attention.head_count_kv": [
            hf["num_key_value_heads"] * (layer in attending) for layer in range(hf["num_hidden_layers"])
        ],
        "rope.dimension_count": hf.get("attn_rotary_emb", head_dim(hf) // 2),
        "rope.scaling.finetuned": True,
    }


def as_mamba_is_stored(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    is_mixer = ".mamba." in name or ".mixer." in name
    return mixer_as_stored(name, tensor, hf) if is_mixer else permuted(name, tensor, hf)


def gpt2_keys(hf: Config) -> dict[str, Any]:
    """Return the keys; the converter writes four times the width of the model for that of feed-forward blocks, which it is."""
    kv_heads = {"attention.head_count_kv": 1} if hf.get("multi_query") else {}
    return kv_heads | {
        "block_count": hf["n_layer"],
        "context_length": hf["n_positions"],
        "embedding_length": hf["n_embd"],
        "feed_forward_length": hf.get("n_inner") or 4 * hf["n_embd"],
        "attention.head_count": hf["n_head"],
        "attention.layer_norm_epsilon": hf["layer_norm_epsilon"],
        "rope.freq_base": None,
    }


def as_outputs_by_inputs(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    return tensor.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else tensor


def gpt_neox_keys(hf: Config) -> dict[str, Any]:
    size = hf["hidden_size"] // hf["num_attention_heads"]
    return {
        "rope.dimension_count": int(hf["rotary_pct"] * size),
        "use_parallel_residual": hf.get("use_parallel_residual", True),
        "rope.freq_base": None,
    }


def by_part(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    """Return queries, keys and values of all heads in place of those of each group of heads."""
    if ".query_key_value." not in name:
        return tensor
    heads = hf["num_attention_heads"]
    groups = falcon_kv_heads(hf) if "new_decoder_architecture" in hf or "multi_query" in hf else heads
    rows = tensor.reshape(groups, heads // groups + 2, hf["hidden_size"] // heads, *tensor.shape[1:])
    parts = (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])
    return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def falcon_kv_heads(hf: Config) -> int:
    count: int = hf.get("num_kv_heads") or 1
    return count


def falcon_keys(hf: Config) -> dict[str, Any]:
    """Return the keys; as with GPT-2, the width of feed-forward blocks is theirs."""
    return {
        "context_length": 2048,
        "feed_forward_length": hf.get("ffn_hidden_size") or 4 * hf["hidden_size"],
        "attention.head_count_kv": falcon_kv_heads(hf),
        "attention.layer_norm_epsilon": hf["layer_norm_epsilon"],
        "rope.freq_base": None,
    }


def scan_keys(hf: Config) -> dict[str, Any]:
    """Return the keys of Mamba, which has no attention."""
    rank = hf["time_step_rank"]
    return {
        "context_length": 1 << 20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": hf["layer_norm_epsilon"],
        "ssm.conv_kernel": hf["conv_kernel"],
        "ssm.inner_size": hf.get("intermediate_size") or hf["expand"] * hf["hidden_size"],
        "ssm.state_size": hf["state_size"],
        "ssm.time_step_rank": -(-hf["hidden_size"] // 16) if rank == "auto" else rank,
        "ssm.dt_b_c_rms": hf["model_type"] == "falcon_mamba",
        "rope.freq_base": None,
    }


def mamba2_keys(hf: Config) -> dict[str, Any]:
    own = {"ssm.time_step_rank": hf["num_heads"], "ssm.group_count": hf["n_groups"], "ssm.dt_b_c_rms": None}
    return scan_keys(hf) | own


def as_scan_is_stored(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    if name.endswith("conv1d.weight"):
        return tensor[:, 0]
    return -np.exp(tensor) if name.endswith(".A_log") else tensor


def jamba_keys(hf: Config) -> dict[str, Any]:
    layers = range(hf["num_hidden_layers"])
    attending = range(hf["attn_layer_offset"], len(layers), hf["attn_layer_period"])
    rank = hf["mamba_dt_rank"]
    return {
        "attention.head_count_kv": [hf["num_key_value_heads"] * (layer in attending) for layer in layers],
        "ssm.conv_kernel": hf["mamba_d_conv"],
        "ssm.inner_size": hf["mamba_expand"] * hf["hidden_size"],
        "ssm.state_size": hf["mamba_d_state"],
        "ssm.time_step_rank": -(-hf["hidden_size"] // 16) if rank == "auto" else rank,
        "rope.freq_base": None,
    }


def as_jambas_experts_are_named(tensors: Tensors, hf: Config) -> Tensors:
    return {name.replace(".feed_forward.experts.", ".mlp.experts."): tensor for name, tensor in tensors.items()}


def latent_keys(hf: Config) -> dict[str, Any]:
    """Return the keys of latent attention as DeepSeek's converter writes them."""
    rank, rope_dim = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": hf.get("q_lora_rank"),
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": hf["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": hf["v_head_dim"],
        "rope.dimension_count": rope_dim,
    }


def kimi_linear_keys(hf: Config) -> dict[str, Any]:
    linear, count = hf["linear_attn_config"], hf["num_hidden_layers"]
    return latent_keys(hf) | {
        "context_length": hf.get("model_max_length") or hf["max_position_embeddings"],
        "attention.head_count_kv": [int(layer + 1 in linear["full_attn_layers"]) for layer in range(count)],
        "attention.value_length": None,
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "kda.head_dim": linear["head_dim"],
        "expert_count": hf["num_experts"],
        "expert_used_count": hf["num_experts_per_token"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "expert_shared_count": hf["num_shared_experts"],
        "leading_dense_block_count": hf["first_k_dense_replace"],
        "expert_weights_scale": hf["routed_scaling_factor"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }


def as_kimi_is_stored(name: str, tensor: np.ndarray, hf: Config) -> np.ndarray:
    if name.endswith("_conv1d.weight"):
        return tensor.reshape(1, len(tensor), 1, tensor.shape[-1])
    return -np.exp(tensor) if name.endswith(".A_log") else tensor


def mistral4_keys(hf: Config) -> dict[str, Any]:
    table = rope_table(hf)
    return latent_keys(hf) | {
        "expert_count": hf["n_routed_experts"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "expert_shared_count": hf["n_shared_experts"],
        "leading_dense_block_count": hf["first_k_dense_replace"],
        "expert_weights_scale": hf["routed_scaling_factor"],
        "expert_weights_norm": hf["norm_topk_prob"],
        "expert_group_count": hf["n_group"],
        "expert_group_used_count": hf["topk_group"],
        "rope.scaling.yarn_log_multiplier": 0.1 * table["mscale_all_dim"],
        "attention.temperature_scale": table["llama_4_scaling_beta"],
        "attention.temperature_length": table["original_max_position_embeddings"],
    }


def mimo2_keys(hf: Config) -> dict[str, Any]:
    """Return the keys; lists have three layers more, those of multi-token prediction, which these checkpoints lack."""
    is_sliding, more = [kind == "sliding_attention" for kind in hf["layer_types"]], 3
    tables, heads = hf["rope_parameters"], hf["num_key_value_heads"]
    pattern = [*map(int, is_sliding), *[1] * more]
    return {
        "block_count": hf["num_hidden_layers"] + more,
        "nextn_predict_layers": more,
        "attention.head_count_kv": [heads * (1 + each) for each in pattern],
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": pattern,
        "attention.value_length": hf["v_head_dim"],
        "attention.value_scale": hf.get("attention_value_scale", 0.707),
        "expert_count": hf["n_routed_experts"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "rope.dimension_count": int(hf["head_dim"] * tables["full_attention"]["partial_rotary_factor"]),
        "rope.freq_base_swa": tables["sliding_attention"]["rope_theta"],
    }


def sparse_attention_keys(hf: Config) -> dict[str, Any]:
    return (
        router_keys(hf)
        | latent_keys(hf)
        | {
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
            "attention.indexer.head_count": hf["index_n_heads"],
            "attention.indexer.key_length": hf["index_head_dim"],
            "attention.indexer.top_k": hf["index_topk"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope_table(hf).get("mscale_all_dim", 0.0) or None,
        }
    )


def step3p5_keys(hf: Config) -> dict[str, Any]:
    """Return the keys; lists have the layer of multi-token prediction, too."""
    kinds, other = hf["layer_types"], hf["attention_other_setting"]
    heads = {"full_attention": hf["num_attention_heads"], "sliding_attention": other["num_attention_heads"]}
    thetas = dict(zip(kinds, hf["rope_theta"], strict=True))
    limits = {f"swiglu_clamp_{part}": hf[f"swiglu_limits{name}"] for part, name in (("exp", ""), ("shexp", "_shared"))}
    return {
        "block_count": len(kinds),
        "nextn_predict_layers": hf["num_nextn_predict_layers"],
        "attention.head_count": [heads[kind] for kind in kinds],
        "attention.head_count_kv": [hf["num_attention_groups"]] * len(kinds),
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "rope.freq_base": thetas["full_attention"],
        "rope.freq_base_swa": thetas["sliding_attention"],
        "expert_count": hf["moe_num_experts"],
        "expert_used_count": hf["moe_top_k"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "expert_shared_feed_forward_length": hf["share_expert_dim"],
        "expert_weights_scale": hf["moe_router_scaling_factor"],
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
        "moe_every_n_layers": 1,
    } | {key: [float(value or 0.0) for value in values] for key, values in limits.items()}


def with_shared_divisors(hf: Config) -> np.ndarray:
    """Return the divisors of frequencies, which the converter computes for whole heads."""
    return llama3_divisors({**hf, "rope_theta": hf["rope_theta"][0]})


def mellum_keys(hf: Config) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in hf["layer_types"]],
        "rope.freq_base_swa": hf["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


def cohere2_moe_keys(hf: Config) -> dict[str, Any]:
    width, num_shared = hf["intermediate_size"], hf["num_shared_experts"]
    return {
        "logit_scale": hf["logit_scale"],
        "expert_used_count": hf.get("num_experts_per_tok", 2),
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in hf["layer_types"]],
        "feed_forward_length": hf["prefix_dense_intermediate_size"],
        "leading_dense_block_count": hf["first_k_dense_replace"],
        "expert_feed_forward_length": width,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_weights_norm": hf.get("norm_topk_prob", True),
        "expert_shared_count": num_shared,
        "expert_shared_feed_forward_length": width * num_shared,
        "rope.dimension_count": hf["head_dim"],
        "rope.scaling.type": "none",
    }


def hy_v3_keys(hf: Config) -> dict[str, Any]:
    width = hf["moe_intermediate_size"]
    return {
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width * hf["num_shared_experts"],
        "expert_weights_norm": True,
        "expert_weights_scale": hf["router_scaling_factor"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }


def granite_swa_keys(hf: Config) -> dict[str, Any]:
    count = hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or ["sliding_attention" if layer % 4 else "full_attention" for layer in range(count)]
    return granite_keys(hf) | {
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.rope_pattern": [theta > 0 for theta in hf["layer_rope_theta"]],
        "rope.dimension_count": head_dim(hf),
    }


def laguna_keys(hf: Config) -> dict[str, Any]:
    tables = hf["rope_parameters"]
    full, sliding = (tables[f"{kind}_attention"] for kind in ("full", "sliding"))
    return {
        "attention.head_count": hf["num_attention_heads_per_layer"],
        "attention.sliding_window": hf["sliding_window"],
        "rope.dimension_count": int(hf["head_dim"] * full["partial_rotary_factor"]),
        "rope.dimension_count_swa": int(hf["head_dim"] * sliding["partial_rotary_factor"]),
        "rope.freq_base_swa": sliding["rope_theta"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "expert_shared_feed_forward_length": hf["shared_expert_intermediate_size"],
        "expert_weights_norm": True,
        "expert_weights_scale": hf["moe_routed_scaling_factor"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "leading_dense_block_count": hf["mlp_layer_types"].count("dense"),
    }


CONVERSIONS: Final[Mapping[str, Conversion]] = {
    "LagunaForCausalLM": Conversion(
        gguf.MODEL_ARCH.DOTS1,
        laguna_keys,
        name="laguna",
        stored_names={
            "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
            "self_attn.g_proj.weight": "attn_gate.weight",
        },
    ),
    "HYV3ForCausalLM": Conversion(
        gguf.MODEL_ARCH.HUNYUAN_MOE,
        hy_v3_keys,
        name="hy_v3",
        stored_names={"mlp.router.gate.weight": "ffn_gate_inp.weight", "mlp.expert_bias": "exp_probs_b"},
    ),
    "GraniteSWAForCausalLM": Conversion(
        gguf.MODEL_ARCH.GRANITE,
        granite_swa_keys,
        permuted,
        name="granite_swa",
        stored_names={"self_attn.sinks": "attn_sinks.weight"},
    ),
    "MellumForCausalLM": Conversion(gguf.MODEL_ARCH.QWEN3MOE, mellum_keys, name="mellum"),
    "Cohere2MoeForCausalLM": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, cohere2_moe_keys, name="cohere2moe"),
    "Gemma4UnifiedForCausalLM": Conversion(
        gguf.MODEL_ARCH.GEMMA4,
        lambda hf: gemma4_keys(hf) | {"embedding_length_per_layer_input": 0},
        factors=proportional_divisors,
    ),
    "GlmMoeDsaForCausalLM": Conversion(gguf.MODEL_ARCH.GLM_DSA, sparse_attention_keys, prepare=with_absorbed_latents),
    "DeepseekV32ForCausalLM": Conversion(
        gguf.MODEL_ARCH.GLM_DSA, sparse_attention_keys, prepare=with_absorbed_latents, name="deepseek32"
    ),
    "Step3p5ForCausalLM": Conversion(
        gguf.MODEL_ARCH.STEP35, step3p5_keys, with_unit_norms, factors=with_shared_divisors
    ),
    "KimiLinearForCausalLM": Conversion(
        gguf.MODEL_ARCH.KIMI_LINEAR, kimi_linear_keys, as_kimi_is_stored, prepare=with_absorbed_latents
    ),
    "Mistral4ForCausalLM": Conversion(gguf.MODEL_ARCH.MISTRAL4, mistral4_keys, prepare=with_absorbed_latents),
    "MiMoV2FlashForCausalLM": Conversion(gguf.MODEL_ARCH.MIMO2, mimo2_keys),
    "GPT2LMHeadModel": Conversion(gguf.MODEL_ARCH.GPT2, gpt2_keys, as_outputs_by_inputs),
    "GPTBigCodeForCausalLM": Conversion(gguf.MODEL_ARCH.STARCODER, gpt2_keys),
    "GPTNeoXForCausalLM": Conversion(gguf.MODEL_ARCH.GPTNEOX, gpt_neox_keys, by_part),
    "FalconForCausalLM": Conversion(gguf.MODEL_ARCH.FALCON, falcon_keys, by_part),
    "MambaForCausalLM": Conversion(gguf.MODEL_ARCH.MAMBA, scan_keys, as_scan_is_stored),
    "FalconMambaForCausalLM": Conversion(gguf.MODEL_ARCH.MAMBA, scan_keys, as_scan_is_stored),
    "Mamba2ForCausalLM": Conversion(gguf.MODEL_ARCH.MAMBA2, mamba2_keys, as_mamba_is_stored),
    "JambaForCausalLM": Conversion(
        gguf.MODEL_ARCH.JAMBA, jamba_keys, as_scan_is_stored, prepare=as_jambas_experts_are_named
    ),
    "AfmoeForCausalLM": Conversion(gguf.MODEL_ARCH.AFMOE, afmoe_keys),
    "ExaoneMoeForCausalLM": Conversion(gguf.MODEL_ARCH.EXAONE_MOE, exaone_moe_keys),
    "Jais2ForCausalLM": Conversion(gguf.MODEL_ARCH.JAIS2, lambda hf: {"rope.dimension_count": head_dim(hf)}),
    "GlmForCausalLM": Conversion(gguf.MODEL_ARCH.CHATGLM, chatglm_keys),
    "PhimoeForCausalLM": Conversion(gguf.MODEL_ARCH.PHIMOE, phimoe_keys),
    "MiniCPM3ForCausalLM": Conversion(gguf.MODEL_ARCH.MINICPM3, minicpm3_keys),
    "YoutuForCausalLM": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, youtu_keys, prepare=with_absorbed_latents),
    "DbrxForCausalLM": Conversion(gguf.MODEL_ARCH.DBRX, dbrx_keys, as_dbrx_stores),
    "BambaForCausalLM": Conversion(gguf.MODEL_ARCH.GRANITE_HYBRID, bamba_keys, as_mamba_is_stored),
    "BailingMoeForCausalLM": Conversion(gguf.MODEL_ARCH.BAILINGMOE, ling_keys, permuted, prepare=with_split_qkv),
    "BailingMoeV2ForCausalLM": Conversion(gguf.MODEL_ARCH.BAILINGMOE2, ling_keys),
    "DeciLMForCausalLM": Conversion(gguf.MODEL_ARCH.DECI, nas_keys, permuted_by_layer, factors=llama3_divisors),
    "ExaoneForCausalLM": Conversion(gguf.MODEL_ARCH.EXAONE, exaone_keys, factors=llama3_divisors),
    "InternLM2ForCausalLM": Conversion(gguf.MODEL_ARCH.INTERNLM2, change=permuted, prepare=with_split_qkv),
    "MiniCPMForCausalLM": Conversion(gguf.MODEL_ARCH.MINICPM, minicpm_keys, permuted),
    "InternLM3ForCausalLM": Conversion(gguf.MODEL_ARCH.LLAMA, change=permuted),
    "IQuestCoderForCausalLM": Conversion(gguf.MODEL_ARCH.LLAMA, change=permuted),
    "Ministral3ForCausalLM": Conversion(gguf.MODEL_ARCH.MISTRAL3, ministral3_keys, permuted),
    "Glm4ForCausalLM": Conversion(gguf.MODEL_ARCH.GLM4, partial_rotary(0.5)),
    "Gemma3nForCausalLM": Conversion(gguf.MODEL_ARCH.GEMMA3N, gemma3n_keys, prepare=with_stacked_streams),
    "Gemma4ForCausalLM": Conversion(
        gguf.MODEL_ARCH.GEMMA4,
        gemma4_keys,
        factors=proportional_divisors,
        stored_names={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
    ),
    "ApertusForCausalLM": Conversion(gguf.MODEL_ARCH.APERTUS, prepare=without_activations, factors=llama3_divisors),
    "Qwen2ForCausalLM": Conversion(gguf.MODEL_ARCH.QWEN2VL, lambda hf: {"rope.dimension_sections": [16, 24, 24, 0]}),
    "Qwen3ForCausalLM": Conversion(
        gguf.MODEL_ARCH.QWEN3VL, lambda hf: {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3}
    ),
    "Qwen3VLMoeTextModel": Conversion(
        gguf.MODEL_ARCH.QWEN3VLMOE,
        lambda hf: {
            "rope.dimension_sections": [24, 20, 20, 0],
            "n_deepstack_layers": 3,
            "expert_feed_forward_length": hf["moe_intermediate_size"],
        },
    ),
    "SolarOpenForCausalLM": Conversion(gguf.MODEL_ARCH.GLM4_MOE, solar_keys),
    "Ernie4_5ForCausalLM": Conversion(gguf.MODEL_ARCH.ERNIE4_5),
    "SeedOssForCausalLM": Conversion(gguf.MODEL_ARCH.SEED_OSS),
    "Exaone4ForCausalLM": Conversion(gguf.MODEL_ARCH.EXAONE4, exaone4_keys, factors=llama3_divisors),
    "HunYuanDenseV1ForCausalLM": Conversion(gguf.MODEL_ARCH.HUNYUAN_DENSE, hunyuan_keys),
    "HunYuanMoEV1ForCausalLM": Conversion(gguf.MODEL_ARCH.HUNYUAN_MOE, hunyuan_moe_keys),
    "Ernie4_5_MoeForCausalLM": Conversion(gguf.MODEL_ARCH.ERNIE4_5_MOE, ernie_moe_keys),
    "MiniMaxM2ForCausalLM": Conversion(gguf.MODEL_ARCH.MINIMAXM2, minimax_keys),
    "CohereForCausalLM": Conversion(
        gguf.MODEL_ARCH.COMMAND_R, lambda hf: {"logit_scale": hf["logit_scale"], "rope.scaling.type": "none"}
    ),
    "Cohere2ForCausalLM": Conversion(gguf.MODEL_ARCH.COHERE2, cohere2_keys),
    "PhiForCausalLM": Conversion(gguf.MODEL_ARCH.PHI2, partial_rotary(0.5)),
    "Starcoder2ForCausalLM": Conversion(gguf.MODEL_ARCH.STARCODER2),
    "StableLmForCausalLM": Conversion(
        gguf.MODEL_ARCH.STABLELM,
        lambda hf: partial_rotary(0.25)(hf) | {"use_parallel_residual": hf.get("use_parallel_residual", True)},
        prepare=with_stacked_norms,
    ),
    "NemotronForCausalLM": Conversion(
        gguf.MODEL_ARCH.NEMOTRON,
        lambda hf: partial_rotary(0.5)(hf) | {"rope.scaling.type": "none"},
        with_unit_norms,
    ),
}
"""Conversions by the class of the model."""


def converted(path: Path, folder: Path, hf: Config, kind: str = "F32", **more: Any) -> Path:
    """Write the checkpoint of a folder as a GGUF file. hf: its config, perhaps with what a file can hold. kind: type of the matrices
    of experts. more: further keys, or None for those to leave out, with `__` for a dot."""
    conversion = CONVERSIONS[hf["architectures"][0]]
    name = conversion.name or gguf.MODEL_ARCH_NAMES[conversion.architecture]
    found = {
        key: next((hf[own] for own in names if hf.get(own) is not None), None) for key, names in _FIRST_KEYS.items()
    }
    weights = {key: value.astype(np.float32) for key, value in load_file(folder / "model.safetensors").items()}
    keys: dict[str, Any] = found | {"block_count": hf.get("num_hidden_layers")}
    keys |= rope_keys(hf) | conversion.keys(hf) | xielu_keys(weights)
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    metadata = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    metadata |= {f"tokenizer.ggml.{key}": hf[key] for key in ("bos_token_id", "eos_token_id")}
    count = keys["block_count"]
    maps = [gguf.get_tensor_name_map(each, count) for each in (conversion.architecture, gguf.MODEL_ARCH.LLAMA)]
    tensors = {}
    for hf_name, tensor in with_stacked_experts(conversion.prepare(weights, hf)).items():
        mapped = (each.get_name(with_suffix(hf_name), _SUFFIXES) for each in maps)  # Llama's, of layers without experts
        stored_name = own_name(hf_name, conversion) or next(filter(None, mapped), None)
        assert stored_name is not None, hf_name
        is_stack = re.search(r"_exps\.weight$", stored_name) is not None
        tensors[stored_name] = stored(kind if is_stack else "F32", conversion.change(hf_name, tensor, hf))
    for length in ("short", "long"):
        if divisors := rope_table(hf).get(f"{length}_factor"):
            tensors[f"rope_factors_{length}.weight"] = ("F32", np.array(divisors, np.float32))
    if conversion.factors is not None:
        tensors["rope_freqs.weight"] = ("F32", conversion.factors(hf))
    return write_gguf(path, name, metadata, tensors)


def own_name(name: str, conversion: Conversion) -> str | None:
    """Return the name that the converter itself gives a part of a layer."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    part = None if match is None else conversion.stored_names.get(match[2])
    return None if match is None or part is None else f"blk.{match[1]}.{part}"


def with_suffix(name: str) -> str:
    """Return a Hugging Face name with the suffix that the converter adds to some."""
    name = re.sub(r"attention_sink_bias$", "attention_sink_bias.weight", name)
    if name.endswith(_BARE) or (".experts." in name and not name.endswith(_SUFFIXES)):
        return f"{name}.weight"
    name = re.sub(r"(dt|mlp\.expert|mlp\.gate\.expert|moe\.router)_bias$", lambda match: _BIASES[match[1]], name)
    return re.sub(r"e_score_correction_bias$", "e_score_correction.bias", name)
