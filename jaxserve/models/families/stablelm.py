"""StableLM 3B, and StableLM 2 (arXiv 2402.17834)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import LAYER_NORM_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    LAYER_NORM_DEFAULTS,
    num_key_value_heads=32,
    use_qkv_bias=False,
    qk_layernorm=False,
    use_parallel_residual=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm with biases, partial rotation, and perhaps QKV biases, parallel blocks, or LayerNorm without biases of query and
    key heads, each with weights of its own (StableLM 2 12B)."""
    keys = Keys({**DEFAULTS, "partial_rotary_factor": 0.25, **hf})
    config = build(
        keys,
        layers=full_layers(keys),
        qkv_bias=keys.flag("use_qkv_bias"),
        computed=("partial_rotary_factor",),
        eps_key="layer_norm_eps",
    )
    config = replace(config, norm_kind="layer_with_bias")
    if keys.flag("qk_layernorm"):
        config = replace(config, qk_norm="each_head", qk_norm_kind="layer")
    return replace(config, norm_placement="parallel") if keys.flag("use_parallel_residual") else config


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tensors of a layer say: parallel blocks share one norm. Converters always write the key for them."""
    names = {name.partition("blk.0.")[2] for name in keys.file.tensors}
    return no_window(keys, config) | {
        "use_qkv_bias": "attn_q.bias" in names,
        "use_parallel_residual": "ffn_norm.weight" not in names,
        "qk_layernorm": "attn_q_norm.weight" in names,
    }


FAMILY = Family(
    ("StableLmForCausalLM",),
    decoder_config,
    renames={"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
    gguf=GGUFArchitecture(
        "stablelm",
        has_partial_rotary=True,
        eps_key="layer_norm_eps",
        top_names=LAYER_NORM_NAMES,
        config=_gguf_config,
    ),
)
