"""Hunyuan, the dense models of 2025."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(COMMON_DEFAULTS, rms_norm_eps=1e-5, attention_bias=False)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with norms of query and key heads after rope, whose base a fixed `alpha` may stretch."""
    return read_decoder(Keys({**DEFAULTS, **hf}))


def read_decoder(keys: Keys, *, computed: tuple[str, ...] = ()) -> DecoderConfig:
    """Read the keys that models without experts and with them share. computed: see `build`."""
    keys.require("use_qk_norm", True, None)
    keys.require("use_cla", False, None)
    config, alpha = build(keys, layers=full_layers(keys), computed=computed), _alpha(keys)
    if alpha is not None:
        stretched = config.rope_theta * alpha ** (config.head_dim / (config.head_dim - 2))
        config = replace(config, rope_theta=stretched, rope_scaling=None)
    return replace(config, qk_norm="rotated_heads")


def _alpha(keys: Keys) -> float | None:
    """Read the factor that checkpoints keep in a table of rope_type dynamic."""
    for name in ("rope_scaling", "rope_parameters"):
        table = keys.get(name)
        if isinstance(table, dict) and "dynamic" in (table.get("rope_type"), table.get("type")) and table.get("alpha"):
            return Keys(table, f"{name}.").number("alpha")
    return None


FAMILY = Family(
    ("HunYuanDenseV1ForCausalLM",),
    decoder_config,
    renames={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
    gguf=GGUFArchitecture("hunyuan-dense", has_bias_flags=True),
)
