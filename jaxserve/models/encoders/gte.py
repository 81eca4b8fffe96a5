"""GTE (arXiv 2407.19669) as transformers has it: BERT with rope and gated feed-forward blocks; gte-multilingual and its reranker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.encoders._common import read_encoder
from jaxserve.models.encoders.bert import with_first_token_head
from jaxserve.models.encoders.nomic_bert import plain_theta
from jaxserve.models.families._keys import Keys

_SCORER: Final = "GteForSequenceClassification"
ARCHITECTURES = ("GteModel", _SCORER)
DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "type_vocab_size": 1,
    "rope_theta": 160_000.0,
}
RENAMES: Final = (
    ("layers", "encoder.layer"),
    ("attention.q_proj", "attention.self.query"),  # `qkv_proj` is split where a checkpoint is opened
    ("attention.k_proj", "attention.self.key"),
    ("attention.v_proj", "attention.self.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("attn_ln", "attention.output.LayerNorm"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("mlp.up_gate_proj", "intermediate.up_gate_proj"),
    ("mlp.up_proj", "intermediate.up_proj"),
    ("mlp.gate_proj", "intermediate.gate_proj"),
    ("mlp.down_proj", "output.dense"),
    ("mlp_ln", "output.LayerNorm"),
    ("post_mlp_layernorm", "output.LayerNorm"),
)
"""Names of published checkpoints, which transformers saves too, and of transformers' modules."""


def encoder_config(hf: dict[str, Any]) -> EncoderConfig:
    """Read the keys of transformers; the model's own class (`NewModel`) has other rope frequencies, and is not read."""
    keys = Keys({**DEFAULTS, **hf})
    config = read_encoder(keys, rope_theta=plain_theta(keys), is_gated=True, has_mlp_bias=False, renames=RENAMES)
    return (
        with_first_token_head(config, keys, "pooler.dense", "classifier")
        if hf["architectures"][0] == _SCORER
        else config
    )
