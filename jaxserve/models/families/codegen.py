"""CodeGen (arXiv 2203.13474)."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _gpt
from jaxserve.models.families._gpt import our_keys
from jaxserve.models.families.gpt2 import RENAMES
from jaxserve.models.families.gptj import gpt_j

DEFAULTS = dict(_gpt.DEFAULTS, rotary_dim=64, tie_word_embeddings=False)
_GROUPS = 4
"""Devices that the models were trained on, which each held a part of QKV."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """GPT-J, whose queries, values and keys are stored in four groups."""
    keys = our_keys(hf, DEFAULTS)
    config = gpt_j(keys)
    if config.num_heads % _GROUPS:
        raise keys.error("num_attention_heads", f"a multiple of {_GROUPS}")
    return config


FAMILY = Family(
    ("CodeGenForCausalLM",),
    decoder_config,
    renames={**RENAMES, "fc_in": "up_proj", "fc_out": "down_proj", "out_proj": "o_proj"},
    key_names=_gpt.KEY_NAMES,
    qkv_rows=QKVRows(_GROUPS, ("q_proj", "v_proj", "k_proj")),
    unused_tensors=(".attn.causal_mask",),
)
