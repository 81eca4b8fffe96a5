"""Keys of a head that scores pairs of texts: one label, and sentence-transformers' activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.models.families._keys import Keys
from jaxserve.types import Pooling

_ACTIVATIONS: Final[Mapping[str, bool]] = {"Sigmoid": True, "Identity": False}
"""True by the name of sentence-transformers' activation if it is a sigmoid."""


def scoring_head(keys: Keys, layers: tuple[HeadLayer, ...], pooling: Pooling) -> EmbeddingHead:
    """Return the scoring head of these layers, which has one label (`num_labels` or `id2label`). Raises CheckpointError."""
    labels = keys.get("id2label")
    count = len(labels) if isinstance(labels, dict) else keys.get("num_labels")
    if count != 1:
        key = "id2label" if isinstance(labels, dict) else "num_labels"
        raise keys.error(key, "one label, as in a cross-encoder")
    keys.require("problem_type", None, "regression")
    return EmbeddingHead(layers, pooling, scores_pairs=True, is_sigmoid=_is_sigmoid(keys))


def _is_sigmoid(keys: Keys) -> bool:
    """Read sentence-transformers' activation from its newer or older key; by default a sigmoid."""
    nested = keys.get("sentence_transformers")
    inner = Keys(nested, "sentence_transformers.") if isinstance(nested, dict) else Keys({})
    for table, key in ((inner, "activation_fn"), (keys, "sbert_ce_default_activation_function")):
        value = table.get(key)
        if value is not None:
            name = str(value).rpartition(".")[2]
            if name not in _ACTIVATIONS:
                raise table.error(key, " or ".join(_ACTIVATIONS))
            return _ACTIVATIONS[name]
    return True
