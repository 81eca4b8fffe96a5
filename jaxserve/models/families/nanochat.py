"""NanoChat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

_CAP = "final_logit_softcapping"
DEFAULTS = dict(COMMON_DEFAULTS, hidden_act="relu2", attention_bias=False, final_logit_softcapping=15.0)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """RMSNorm without weights, also of embeddings and of rotated queries and keys, which turn the other way round; feed-forward
    blocks without a gate, and capped logits."""
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=full_layers(keys), computed=(_CAP,))
    return replace(
        config,
        norm_weights="none",
        qk_norm="rotated_unit",
        rotary_pairs="swapped_halves",
        embedding_norm="inputs",
        mlp_has_gate=False,
        logit_softcap=None if keys.get(_CAP) is None else keys.number(_CAP),
    )


FAMILY = Family(("NanoChatForCausalLM",), decoder_config, renames={"fc1": "up_proj", "fc2": "down_proj"})
