"""MPNet (arXiv 2004.09297): BERT with positions from 2, no token types, and scores with a bias by distance; all-mpnet-base-v2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.encoders._common import read_encoder
from jaxserve.models.encoders.bert import with_first_token_head
from jaxserve.models.families._keys import Keys

_SCORER: Final = "MPNetForSequenceClassification"
ARCHITECTURES = ("MPNetModel", "MPNetForMaskedLM", _SCORER)
DEFAULTS: Mapping[str, Any] = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "relative_attention_num_buckets": 32}
NUM_BUCKETS: Final = 32
"""transformers computes so many whatever the config says."""
RENAMES: Final = (
    *(
        (f"attention.attn.{short}", f"attention.self.{name}")
        for short, name in zip("qkv", ("query", "key", "value"), strict=True)
    ),
    ("attention.attn.o", "attention.output.dense"),
    ("attention.LayerNorm", "attention.output.LayerNorm"),
)


def encoder_config(hf: dict[str, Any]) -> EncoderConfig:
    """Read MPNet, also from a config that names the class with a head for tokens, as published models do."""
    keys = Keys({**DEFAULTS, **hf, "type_vocab_size": 0})
    keys.require("relative_attention_num_buckets", NUM_BUCKETS)
    config = read_encoder(keys, first_position=2, num_relative_buckets=NUM_BUCKETS, renames=RENAMES)
    if hf["architectures"][0] != _SCORER:
        return config
    return with_first_token_head(config, keys, "classifier.dense", "classifier.out_proj")
