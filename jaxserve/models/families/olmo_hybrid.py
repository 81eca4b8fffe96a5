"""OLMo Hybrid: gated delta nets with OLMo 3's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, num_layers
from jaxserve.models.families._hybrid import hybrid_layers, layer_names, read_delta
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.olmo2 import olmo

DEFAULTS = dict(
    COMMON_DEFAULTS,
    attention_bias=False,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=None,
    linear_value_head_dim=None,
    linear_num_key_heads=None,
    linear_num_value_heads=None,
    linear_allow_neg_eigval=True,
)
_NORM_EPS: Final = 1e-5
"""Epsilon of the norm of each value head, which no key has."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Attention in every fourth layer, with norms after the blocks, and gated delta nets in the others, with norms before them.

    A rope base of null says that no layer rotates, as in published checkpoints.
    """
    keys = _with_sizes(Keys({**DEFAULTS, **hf}))
    keys.require("hidden_act", "silu")
    scale = 2.0 if keys.flag("linear_allow_neg_eigval") else 1.0
    delta = msgspec.structs.replace(read_delta(keys, "apart"), rate_scale=scale, norm_eps=_NORM_EPS)
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(num_layers(keys))]
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    keys, use_rope = _rope(keys)
    layers = hybrid_layers(keys, layer_names(keys, kinds), "linear_attention", delta)
    return olmo(
        keys,
        tuple(
            replace(layer, use_rope=use_rope) if layer.recurrent is None else replace(layer, norm_placement="pre")
            for layer in layers
        ),
    )


def _with_sizes(keys: Keys) -> Keys:
    """Add the sizes of gated delta nets that follow from others if no key gives them."""
    num_heads = keys.integer("num_attention_heads", MAX_HEADS)
    sizes = {key: keys.get(key) or num_heads for key in ("linear_num_key_heads", "linear_num_value_heads")}
    table = {**keys.table, **sizes}
    if table["linear_key_head_dim"] is None:
        num_key_heads = Keys(table).integer("linear_num_key_heads", MAX_HEADS)
        table["linear_key_head_dim"] = int(0.75 * keys.integer("hidden_size", MAX_WIDTH) / num_key_heads)
    if table["linear_value_head_dim"] is None:
        table["linear_value_head_dim"] = 2 * Keys(table).integer("linear_key_head_dim", MAX_HEAD_DIM)
    return Keys(table, keys.prefix)


def _rope(keys: Keys) -> tuple[Keys, bool]:
    """Return keys with a rope base, and whether layers rotate."""
    table = keys.get("rope_parameters")
    theta = table.get("rope_theta", keys.get("rope_theta")) if isinstance(table, dict) else keys.get("rope_theta")
    if theta is not None:
        return keys, True
    unused = {"rope_parameters": None, "rope_theta": DEFAULTS["rope_theta"]}
    return Keys({**keys.table, **unused}, keys.prefix), False


FAMILY = Family(
    ("OlmoHybridForCausalLM",),
    decoder_config,
    renames={"linear_attn.o_norm": "linear_attn.norm"},
)
