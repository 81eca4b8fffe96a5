"""Falcon-H1 (arXiv 2507.22448): attention and a Mamba-2 mixer side by side in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.factors import MULTIPLIED
from jaxserve.checkpoint.gguf.mamba import TENSOR_NAMES, mamba_config
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import Mamba2Config
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_WIDTH, build, num_layers
from jaxserve.models.families._hybrid import MAMBA_DEFAULTS, mamba_width, read_mamba
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    attention_bias=False,
    mlp_bias=False,
    projectors_bias=False,
    mamba_d_ssm=1024,
    **MAMBA_DEFAULTS,
    mamba_norm_before_gate=True,
    mamba_rms_norm=False,
    mlp_multipliers=None,
    ssm_multipliers=None,
    **{
        f"{name}_multiplier": 1.0
        for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    },
)
_FACTORS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
"""Lists of factors and their lengths; null: all are 1."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with a Mamba-2 mixer beside attention, and factors on inputs and outputs of every block.

    A factor on a block's input is one on its projections: biases would not be multiplied with them.
    """
    factors = {key: [1.0] * count for key, count in _FACTORS.items() if hf.get(key) is None}
    keys = Keys({**DEFAULTS, "max_position_embeddings": 8192, **hf, **factors})
    for key in ("attention_bias", "projectors_bias", "mamba_proj_bias"):
        keys.require(key, False)
    layers = (LayerConfig(recurrent=_mamba(keys)),) * num_layers(keys)
    config = build(keys, layers=layers, computed=("mlp_bias", "embedding_multiplier"))
    own = keys.number("attention_in_multiplier")
    gate, out = keys.numbers("mlp_multipliers", 2)
    return replace(
        config,
        attention_scale=config.head_dim**-0.5 * own**2 * keys.number("key_multiplier"),
        attention_out_scale=own * keys.number("attention_out_multiplier"),
        embedding_scale=keys.number("embedding_multiplier"),
        logit_scale=keys.number("lm_head_multiplier"),
        mlp_gate_scale=gate,
        mlp_out_scale=out,
    )


def _mamba(keys: Keys) -> Mamba2Config:
    given = keys.get("mamba_d_ssm")
    width = mamba_width(keys) if given is None else keys.integer("mamba_d_ssm", MAX_WIDTH)
    norm: Literal["gate_first", "norm_first", "none"] = "none"
    if keys.flag("mamba_rms_norm"):
        norm = "norm_first" if keys.flag("mamba_norm_before_gate") else "gate_first"
    own = keys.number("ssm_in_multiplier")
    z, x, b, c, dt = (own * scale for scale in keys.numbers("ssm_multipliers", 5))
    return msgspec.structs.replace(
        read_mamba(keys, width, norm=norm), scales=(z, x, b, c, dt), out_scale=keys.number("ssm_out_multiplier")
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return mixers. Converters multiply the weights with all factors; llama.cpp gates before the norm that mixers may have."""
    return {
        **no_window(keys, config),
        **mamba_config(keys),
        "mamba_d_ssm": keys.integer("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in keys.file.tensors,
        "mamba_norm_before_gate": False,
        MULTIPLIED: True,
    }


FAMILY = Family(
    ("FalconH1ForCausalLM",),
    decoder_config,
    renames={
        "feed_forward": "mlp",
        "pre_ff_layernorm": "post_attention_layernorm",
        "final_layernorm": "norm",
    },
    gguf=GGUFArchitecture(
        "falcon-h1",
        has_bias_flags=True,
        tensor_names=TENSOR_NAMES,
        bare_parts={"ffn_norm": "weight"},
        config=_gguf_config,
    ),
)
