"""Checkpoints whose models ship as code beside them, which transformers has no class for: a class with the same arithmetic computes each.

A tensor of that class is made of rows of published ones, and the other way round: `PublishedRows` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import numpy as np
import torch

Config = Mapping[str, Any]
Index = int | slice | np.ndarray | EllipsisType | tuple[int | EllipsisType, slice]
State = dict[str, torch.Tensor]
ALL = ...


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Rows of a published tensor that a part of a tensor of transformers is made of."""

    name: str
    """The published tensor."""
    rows: Index = ALL
    part: Index = ALL
    """The part of the tensor of transformers."""
    is_copy: bool = False
    """True if another part has the same rows."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model without a class in transformers."""

    config: Callable[[Config], dict[str, Any]]
    """Return the config.json of the class with the same arithmetic."""
    places: Callable[[str, torch.Size, Config], Iterator[PublishedRows]]
    """Return where a tensor of that class is, by its name and shape; what has no place is zero."""


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the published name of a tensor. names: published parts by those of transformers."""
    for own, published in names.items():
        name = name.replace(own, published)
    return name


def fused_qkv(name: str, hf: Config, published: str, *, by_kv_head: bool = False) -> PublishedRows | None:
    """Return the rows of queries, keys or values in the module `published`; None for other tensors.

    by_kv_head: each KV head has its queries, its keys and its values.
    """
    above, _, last = name.rpartition(".self_attn.")
    part, _, kind = last.partition("_proj.")
    if part not in ("q", "k", "v"):
        return None
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    dim = hf.get("head_dim") or hf["hidden_size"] // heads
    groups = kv_heads if by_kv_head else 1
    rows = np.arange((heads + 2 * kv_heads) * dim).reshape(groups, -1, dim)
    own, shared = heads // groups, kv_heads // groups
    first = {"q": 0, "k": own, "v": own + shared}[part]
    count = own if part == "q" else shared
    return PublishedRows(f"{above}.{published}.{kind}", rows[:, first : first + count].ravel())


LING_NAMES = {
    "embed_tokens.": "word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
}


def ling_2(hf: Config) -> dict[str, Any]:
    """Return the config of GLM-4.5."""
    own = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": hf["num_experts"],
        "n_shared_experts": hf["num_shared_experts"],
        "attention_bias": hf["use_qkv_bias"],
    }
    return {key: value for key, value in hf.items() if key not in ("num_experts", "num_shared_experts")} | own


def ling_1(hf: Config) -> dict[str, Any]:
    """Return the config of Granite with experts and a shared one, whose factors are neutral."""
    own = {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "num_local_experts": hf["num_experts"],
        "intermediate_size": hf["moe_intermediate_size"],
        "shared_intermediate_size": hf["moe_intermediate_size"] * hf["num_shared_experts"],
        "attention_multiplier": (hf["hidden_size"] // hf["num_attention_heads"]) ** -0.5,
    }
    return {key: value for key, value in hf.items() if key not in ("num_experts", "head_dim")} | own


def ling_places(name: str, shape: torch.Size, hf: Config) -> Iterator[PublishedRows]:
    """Return the places of a tensor in a checkpoint of Ling. Gates and up projections of Granite are in one tensor."""
    if fused := fused_qkv(name, hf, "attention.query_key_value"):
        yield fused
        return
    layer, _, part = name.partition(".block_sparse_moe.")
    if part.startswith(("input_linear", "output_linear")):
        for expert in range(shape[0]):
            above = f"{layer}.mlp.experts.{expert}"
            if part.startswith("output"):
                yield PublishedRows(f"{above}.down_proj.weight", part=expert)
                continue
            for half, own in enumerate(("gate", "up")):
                rows = slice(half * shape[1] // 2, (half + 1) * shape[1] // 2)
                yield PublishedRows(f"{above}.{own}_proj.weight", part=(expert, rows))
    elif ".shared_mlp.input_linear." in name:
        for half, own in enumerate(("gate", "up")):
            rows = slice(half * shape[0] // 2, (half + 1) * shape[0] // 2)
            yield PublishedRows(name.replace("shared_mlp.input_linear", f"mlp.shared_experts.{own}_proj"), part=rows)
    else:
        names = {".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj."}
        yield PublishedRows(renamed(name, LING_NAMES | names))


def minicpm(hf: Config) -> dict[str, Any]:
    """Return the config of Granite."""
    own = {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": hf["scale_emb"],
        "residual_multiplier": hf["scale_depth"] * hf["num_hidden_layers"] ** -0.5,
        "attention_multiplier": (hf["hidden_size"] // hf["num_attention_heads"]) ** -0.5,
        "logits_scaling": hf["hidden_size"] / hf["dim_model_base"],
    }
    return {**hf, **own}


def llama(hf: Config, **names: str) -> dict[str, Any]:
    """Return the config of Llama. names: its keys by published ones."""
    own = {names.get(key, key): value for key, value in hf.items()}
    return {**own, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def same_places(name: str, shape: torch.Size, hf: Config) -> Iterator[PublishedRows]:
    """Return the place of a tensor under its own name."""
    yield PublishedRows(name)


INTERNLM2_NAMES = {
    "embed_tokens.": "tok_embeddings.",
    "lm_head.": "output.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
}


def internlm2_places(name: str, shape: torch.Size, hf: Config) -> Iterator[PublishedRows]:
    """Return the place of a tensor in a checkpoint of InternLM2."""
    yield fused_qkv(name, hf, "attention.wqkv", by_kv_head=True) or PublishedRows(renamed(name, INTERNLM2_NAMES))


EXAONE_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
}


def exaone_places(name: str, shape: torch.Size, hf: Config) -> Iterator[PublishedRows]:
    """Return the place of a tensor in a checkpoint of EXAONE 3."""
    yield PublishedRows(renamed(name, EXAONE_NAMES))


def nas(hf: Config) -> dict[str, Any]:
    """Return the config of a Llama whose layers have as many KV heads as query heads, and the width of the widest."""
    widths = [ffn_width(block, hf) for block in hf["block_configs"]]
    return {**llama(hf), "num_key_value_heads": hf["num_attention_heads"], "intermediate_size": max(widths)}


def ffn_width(block: Config, hf: Config) -> int:
    """Return the width of a feed-forward block, 0 if there is none."""
    own = block["ffn"]
    if own["no_op"] or own["ffn_mult"] is None:
        return int(own.get("intermediate_size") or 0)
    return -(-int(2 * own["ffn_mult"] * hf["hidden_size"] / 3) // 256) * 256


def nas_places(name: str, shape: torch.Size, hf: Config) -> Iterator[PublishedRows]:
    """Return the places of a tensor in a checkpoint of Llama-Nemotron: blocks that a layer lacks have none, and add nothing."""
    _, _, rest = name.partition(".layers.")
    if not rest:
        yield PublishedRows(name)
        return
    number, block, *part = rest.split(".")
    own = hf["block_configs"][int(number)]
    if block in ("mlp", "post_attention_layernorm"):
        width = ffn_width(own, hf)
        is_down = part[:1] == ["down_proj"]
        if width:
            kept: Index = ALL if block != "mlp" else (ALL, slice(width)) if is_down else slice(width)
            yield PublishedRows(name, part=kept)
        return
    if own["attention"]["no_op"]:
        return
    if part[:1] not in (["k_proj"], ["v_proj"]):
        yield PublishedRows(name)
        return
    group, dim = own["attention"]["n_heads_in_group"], hf["hidden_size"] // hf["num_attention_heads"]
    heads = np.arange(shape[0]).reshape(-1, group, dim)
    for copy in range(group):
        yield PublishedRows(name, part=heads[:, copy].ravel(), is_copy=copy > 0)


REMOTE: dict[str, RemoteModel] = {
    "DeciLMForCausalLM": RemoteModel(nas, nas_places),
    "ExaoneForCausalLM": RemoteModel(
        partial(
            llama, num_layers="num_hidden_layers", activation_function="hidden_act", layer_norm_epsilon="rms_norm_eps"
        ),
        exaone_places,
    ),
    "InternLM2ForCausalLM": RemoteModel(partial(llama, bias="attention_bias"), internlm2_places),
    "MiniCPMForCausalLM": RemoteModel(minicpm, same_places),
    "BailingMoeForCausalLM": RemoteModel(ling_1, ling_places),
    "BailingMoeV2ForCausalLM": RemoteModel(ling_2, ling_places),
}
"""Models by their published class."""


def find(hf: Config) -> RemoteModel | None:
    """Return the model of a config.json; None if transformers has a class for it."""
    return REMOTE.get(hf["architectures"][0])


def published(state: State, hf: Config) -> State:
    """Return the tensors of a published checkpoint from those of the class with the same arithmetic; of other models the same."""
    model = find(hf)
    if model is None:
        return state
    parts: dict[str, list[tuple[Index, torch.Tensor]]] = {}
    for name, tensor in state.items():
        for place in model.places(name, tensor.shape, hf):
            if place.is_copy:
                continue
            parts.setdefault(place.name, []).append((place.rows, tensor[place.part]))
    return {name: _joined(own) for name, own in parts.items()}


def _joined(parts: list[tuple[Index, torch.Tensor]]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0][1].contiguous()
    whole = torch.cat([tensor for _, tensor in parts])
    for rows, tensor in parts:
        whole[rows] = tensor
    return whole


def plain(stored: State, like: State, hf: Config) -> State:
    """Return the tensors of the class with the same arithmetic from those of a published checkpoint. like: its names and shapes."""
    model = find(hf)
    assert model is not None, hf["architectures"]
    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for name, tensor in state.items():
        for place in model.places(name, tensor.shape, hf):
            tensor[place.part] = stored[place.name][place.rows].to(tensor.dtype)
    return state
