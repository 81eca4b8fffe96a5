"""Keys that all encoders read alike."""

from __future__ import annotations

from typing import Any

from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.families._common import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    read_activation,
    reject_quantized,
)
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

MAX_TOKEN_TYPES = 16


def read_encoder(keys: Keys, *, first_position: int = 0, **own: Any) -> EncoderConfig:
    """Read an encoder's sizes; reject decoder configs of the same class. own: the fields that its family adds."""
    reject_quantized(keys)
    keys.require("is_decoder", False, None)
    keys.require("add_cross_attention", False, None)
    num_heads = keys.integer("num_attention_heads", MAX_HEADS)
    hidden_size = keys.integer("hidden_size", MAX_WIDTH)
    if hidden_size % num_heads:
        raise keys.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    return EncoderConfig(
        vocab_size=keys.integer("vocab_size", MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_heads=num_heads,
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_positions=keys.integer("max_position_embeddings", MAX_POSITION, low=first_position + 1),
        num_token_types=keys.integer("type_vocab_size", MAX_TOKEN_TYPES, low=0),
        norm_eps=keys.number("layer_norm_eps"),
        activation=read_activation(keys),
        first_position=first_position,
        **own,
    )
