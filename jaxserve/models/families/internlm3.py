"""InternLM3."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import llama
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(llama.DEFAULTS, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5)
_BIASES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with narrower attention than the model. Its two keys of biases must say the same, as transformers asks."""
    keys = Keys({**DEFAULTS, **with_our_keys(hf, _BIASES)}, names={ours: own for own, ours in _BIASES.items()})
    keys.require("attention_bias", keys.flag("mlp_bias"))
    return llama.decoder_config(dict(keys.table))


FAMILY = Family(("InternLM3ForCausalLM",), decoder_config)
