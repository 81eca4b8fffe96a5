"""Apertus (arXiv 2509.14233)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.xielu import xielu_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import ACTIVATIONS, COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(COMMON_DEFAULTS, hidden_act="xielu", rms_norm_eps=1e-5, rope_theta=12_000_000.0, attention_bias=False)
_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Rope of a config without a table."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with norms of query and key heads, and feed-forward blocks without a gate, whose activation is xIELU."""
    has_table = any(hf.get(key) for key in ("rope_scaling", "rope_parameters"))
    keys = Keys({**DEFAULTS, **hf, **({} if has_table else {"rope_parameters": _ROPE})})
    config = build(keys, layers=full_layers(keys), activations={**ACTIVATIONS, "xielu": "xielu"})
    return replace(config, qk_norm="heads", mlp_has_gate=False)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation with its numbers. A file without factors of Llama 3 has plain rope."""
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    rope = {} if config.get("rope_scaling") else {"rope_parameters": plain}
    return {**no_window(keys, config), **xielu_config(keys, config), **rope, "hidden_act": "xielu"}


FAMILY = Family(
    ("ApertusForCausalLM",),
    decoder_config,
    renames={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
    gguf=GGUFArchitecture("apertus", has_bias_flags=True, config=_gguf_config),
)
