"""EuroBERT (arXiv 2503.05500), an encoder with Llama's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS: Final = dict(COMMON_DEFAULTS, rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False, head_dim=None)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama whose tokens attend in both directions."""
    keys = Keys({**DEFAULTS, **hf})
    return replace(build(keys, layers=full_layers(keys), computed=("mlp_bias",)), is_bidirectional=True)


FAMILY = Family(("EuroBertModel",), decoder_config, only_embeds=True)
