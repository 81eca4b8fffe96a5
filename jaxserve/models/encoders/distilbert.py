"""DistilBERT (arXiv 1910.01108): BERT without token types; multi-qa-distilbert, distiluse."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.encoders._common import read_encoder
from jaxserve.models.encoders.bert import with_first_token_head
from jaxserve.models.families._keys import Keys

_SCORER: Final = "DistilBertForSequenceClassification"
ARCHITECTURES = ("DistilBertModel", "DistilBertForMaskedLM", _SCORER)
KEY_NAMES: Final = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
FIXED: Final = {"layer_norm_eps": 1e-12, "type_vocab_size": 0}
"""Values that the config does not have."""
RENAMES: Final = (
    ("transformer.layer", "encoder.layer"),
    ("attention.q_lin", "attention.self.query"),
    ("attention.k_lin", "attention.self.key"),
    ("attention.v_lin", "attention.self.value"),
    ("attention.out_lin", "attention.output.dense"),
    ("sa_layer_norm", "attention.output.LayerNorm"),
    ("ffn.lin1", "intermediate.dense"),
    ("ffn.lin2", "output.dense"),
    ("output_layer_norm", "output.LayerNorm"),
)


def encoder_config(hf: dict[str, Any]) -> EncoderConfig:
    """Read DistilBERT; its sinusoidal positions are stored as a table, too."""
    table = {"hidden_act": "gelu", **with_our_keys(hf, KEY_NAMES), **FIXED}
    keys = Keys(table, names={ours: own for own, ours in KEY_NAMES.items()})
    config = read_encoder(keys, renames=RENAMES)
    if hf["architectures"][0] != _SCORER:
        return config
    return with_first_token_head(config, keys, "pre_classifier", "classifier", "relu")
