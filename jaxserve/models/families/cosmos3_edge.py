"""Cosmos 3 Edge: the part of its checkpoints that reads texts and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers, with_sizes
from jaxserve.models.families._cosmos3_vision import edge_vision
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import without_sections

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 131_072,
    "hidden_size": 2048,
    "intermediate_size": 9216,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 131_072,
}
"""transformers' defaults of further keys, which multimodal configs may leave out."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with feed-forward blocks without a gate."""
    keys = without_sections(Keys({**DEFAULTS, **with_sizes(_SIZES, hf)}))
    config = build(keys, layers=full_layers(keys), computed=("mlp_bias",))
    return replace(config, mlp_has_gate=False)


FAMILY = Family(
    ("Cosmos3EdgeTextModel",),
    decoder_config,
    text_part_of=("Cosmos3EdgeForConditionalGeneration",),
    read_vision=edge_vision,
    renames={"fc1": "up_proj", "fc2": "down_proj"},
)
