"""Hunyuan with experts, as Hunyuan-A13B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.routing import SOFTMAX, fixed_router
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families import hunyuan
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._experts import COUNT_KEYS, MAX_EXPERTS, all_with_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(hunyuan.DEFAULTS, num_experts=1, moe_topk=1)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Hunyuan with softmax-routed experts and a shared one in every layer, all as wide as `intermediate_size`."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("moe_drop_tokens", False, None)
    config = hunyuan.read_decoder(keys, computed=COUNT_KEYS)
    return replace(config, layers=all_with_experts(config.layers, _experts(keys)))


def _experts(keys: Keys) -> ExpertsConfig:
    num_experts = _of_all_layers(keys, "num_experts", MAX_EXPERTS)
    width = keys.integer("intermediate_size", MAX_WIDTH)
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=_of_all_layers(keys, "moe_topk", num_experts),
        intermediate_size=width,
        is_normalized=True,
        shared_intermediate_size=width,
    )


def _of_all_layers(keys: Keys, name: str, high: int) -> int:
    """Read a number, or a list with the same number for each layer."""
    value = keys.get(name)
    if not isinstance(value, list):
        return keys.integer(name, high)
    if len({*map(repr, value)}) != 1:
        raise keys.error(name, "the same number in all layers")
    return Keys({name: value[0]}, keys.prefix).integer(name, high)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of experts of a token; raise CheckpointError if experts differ in width, or there are several shared ones."""
    fixed_router(keys, SOFTMAX)
    width = config["intermediate_size"]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if keys.integer(key, width) != width:
            keys.fail(key, f"the width {width} of all blocks", keys.get(key))
    if keys.integer("expert_shared_count", 1) != 1:
        keys.fail("expert_shared_count", "1 or none", keys.get("expert_shared_count"))
    return no_window(keys, config) | {"moe_topk": config["num_experts_per_tok"]}


FAMILY = Family(
    ("HunYuanMoEV1ForCausalLM",),
    decoder_config,
    renames={**hunyuan.FAMILY.renames, "gate.wg": "gate", "shared_mlp": "shared_experts"},
    gguf=GGUFArchitecture("hunyuan-moe", has_bias_flags=True, experts="required", config=_gguf_config),
)
