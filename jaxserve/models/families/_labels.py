"""Keys of a head for labels: their names, and the function that makes logits into scores or probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.sentence.texts import LABEL_ACTIVATIONS
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.models.families._keys import Keys
from jaxserve.types import LabelActivation, Pooling

MAX_LABELS: Final = 8192
"""The numbers of a reply are bounded like those of vectors."""
_DEFAULT_LABELS: Final = 2
"""Number of labels of a config without `id2label` and `num_labels`: transformers leaves out its default."""
_OF_PROBLEM: Final[Mapping[Any, LabelActivation]] = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
"""Activation of a classifier of two labels or more by `problem_type`, as transformers' pipeline applies it."""


def label_head(keys: Keys, layers: tuple[HeadLayer, ...], pooling: Pooling) -> EmbeddingHead:
    """Return the head of these layers, of which the last gets an output for each label. Raises CheckpointError.

    A single label is the score of a cross-encoder, whose activation sentence-transformers names.
    """
    labels = _labels(keys)
    *inner, last = layers
    layers = (*inner, replace(last, out_dim=len(labels)))
    if len(labels) == 1:
        keys.require("problem_type", None, "regression")
        return EmbeddingHead(layers, pooling, labels, _score_activation(keys))
    problem = keys.get("problem_type")
    if problem not in _OF_PROBLEM:
        raise keys.error("problem_type", " or ".join(filter(None, _OF_PROBLEM)))
    return EmbeddingHead(layers, pooling, labels, _OF_PROBLEM[problem])


def _labels(keys: Keys) -> tuple[str, ...]:
    """Read the labels' names (`id2label`), or their number (`num_labels`)."""
    names = keys.get("id2label")
    if names is None:
        has_count = keys.get("num_labels") is not None
        count = keys.integer("num_labels", MAX_LABELS) if has_count else _DEFAULT_LABELS
        return tuple(f"LABEL_{index}" for index in range(count))
    by_id = {str(key): name for key, name in names.items()} if isinstance(names, dict) else {}
    found = [by_id.get(str(index)) for index in range(len(by_id))]
    labels = tuple(name for name in found if isinstance(name, str))
    if not 1 <= len(labels) <= MAX_LABELS or len(labels) < len(found):
        raise keys.error("id2label", f"names of 1 to {MAX_LABELS} labels by their numbers from 0")
    return labels


def _score_activation(keys: Keys) -> LabelActivation:
    """Read sentence-transformers' activation from its newer or older key; by default a sigmoid."""
    nested = keys.get("sentence_transformers")
    inner = Keys(nested, "sentence_transformers.") if isinstance(nested, dict) else Keys({})
    for table, key in ((inner, "activation_fn"), (keys, "sbert_ce_default_activation_function")):
        value = table.get(key)
        if value is not None:
            name = str(value).rpartition(".")[2]
            if name not in LABEL_ACTIVATIONS:
                raise table.error(key, " or ".join(LABEL_ACTIVATIONS))
            return LABEL_ACTIVATIONS[name]
    return "sigmoid"
