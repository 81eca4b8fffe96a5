"""IQuest-Coder."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import llama
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(llama.DEFAULTS, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama, of which the published code has variants with windows and clipped projections that no published model has."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("use_sliding_window", False, None)
    return llama.decoder_config({**keys.table, "sliding_window": None})


FAMILY = Family(("IQuestCoderForCausalLM",), decoder_config)
