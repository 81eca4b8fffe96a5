"""GPT-J."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _gpt
from jaxserve.models.families._gpt import gpt, our_keys
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.gpt2 import MASKS, RENAMES

DEFAULTS = dict(_gpt.DEFAULTS, rotary_dim=64, tie_word_embeddings=False)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Attention without biases and a feed-forward block beside each other, and rotation of the first adjacent pairs."""
    return gpt_j(our_keys(hf, DEFAULTS))


def gpt_j(keys: Keys) -> DecoderConfig:
    """Build the features that GPT-J and CodeGen share."""
    keys.require("tie_word_embeddings", False)
    config = gpt(keys, has_rope=True, qkv_bias=False)
    rotary_dim = keys.integer("rotary_dim", config.head_dim, low=2)
    if rotary_dim % 2:
        raise keys.error("rotary_dim", f"an even number from 2 to {config.head_dim}")
    return replace(
        config,
        norm_placement="parallel",
        rotary_pairs="adjacent",
        rotary_dim=None if rotary_dim == config.head_dim else rotary_dim,
        attention_out_bias=False,
        lm_head_bias=True,
    )


FAMILY = Family(
    ("GPTJForCausalLM",),
    decoder_config,
    renames={**RENAMES, "fc_in": "up_proj", "fc_out": "down_proj", "out_proj": "o_proj"},
    key_names=_gpt.KEY_NAMES,
    unused_tensors=MASKS,
)
