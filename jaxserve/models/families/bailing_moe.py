"""Ling 1 and 1.5, and Ring-lite (arXiv 2503.05139). transformers has no class: tests compare with Granite's experts and shared expert."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.routing import SOFTMAX, fixed_router, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, dense_first, read_experts, with_shared
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    rms_norm_eps=1e-5,
    use_bias=True,
    use_qkv_bias=False,
    num_experts=16,
    num_shared_experts=0,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    first_k_dense_replace=0,
)
RENAMES: Final = {
    "word_embeddings": "embed_tokens",
    "attention": "self_attn",
    "query_key_value": "qkv_proj",
    "dense": "o_proj",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "expert_bias": "e_score_correction_bias",
}
"""Our names of the parts of Ling's layers."""
_SHARED: Final = "num_shared_experts"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with softmax-routed experts and shared ones after the first dense layers."""
    keys = Keys({**DEFAULTS, **hf})
    is_normalized = keys.flag("norm_topk_prob") and keys.get("num_experts_per_tok") != 1
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=is_normalized)
    return ling(keys, experts)


def ling(keys: Keys, experts: ExpertsConfig, computed: Collection[str] = ()) -> DecoderConfig:
    """Build a decoder of Ling with these experts and its shared ones after the first dense layers.

    computed: further keys that the family reads, as `build` takes them. Windows that `use_sliding_window` turns off are ignored.
    """
    for key in ("use_bias", "norm_head", "use_sliding_window"):
        keys.require(key, False, None)
    keys.require("moe_shared_expert_intermediate_size", experts.intermediate_size, None)
    if keys.get(_SHARED):
        experts = with_shared(keys, experts, _SHARED)
    keys = Keys({**keys.table, "sliding_window": None}, keys.prefix)
    layers = dense_first(keys, full_layers(keys), experts)
    return build(keys, layers=layers, qkv_bias=keys.flag("use_qkv_bias"), computed=(*COUNT_KEYS, *computed))


def gguf_experts(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of experts by Ling's names. Files have no biases."""
    found = router_config(keys, config)
    return {**no_window(keys, config), _SHARED: found.pop("n_shared_experts"), **found, "use_bias": False}


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    fixed_router(keys, SOFTMAX)
    return gguf_experts(keys, config)


FAMILY = Family(
    ("BailingMoeForCausalLM",),
    decoder_config,
    renames=RENAMES,
    gguf=GGUFArchitecture("bailingmoe", is_rope_permuted=True, experts="required", config=_gguf_config),
)
