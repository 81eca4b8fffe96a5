"""The work of a step that follows from a model's shapes: weights that multiply a token, and bytes of weights that are read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from jaxserve.checkpoint.vision_names import VISION
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import LeafSpec, ModelSkeleton
from jaxserve.quant.array import ArraySpec
from jaxserve.sharding.rules import AxisRules

_EMBEDDING: Final = "model.embed_tokens.weight"
_LAYER_EMBEDDING: Final = "model.per_layer.embed_tokens.weight"
_POSITIONS: Final = "model.embed_positions.weight"
_HEAD: Final = "lm_head.weight"
_NGRAMS: Final = ".ngram.table.weight"


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step: two operations for each weight that multiplies a token. Attention and the KV cache are not counted."""

    num_layer_weights: int
    """Weights of the layers' matrices that multiply each token: of the experts those that a token selects."""
    num_head_weights: int
    """Weights of the output matrix, which multiplies the tokens that are sampled from."""
    read_bytes: int
    """Bytes of weights that a step reads on one device: all matrices, but only a few rows of an embedding, and no vectors."""
    expert_bytes: int
    """Part of those that belongs to experts: a step of few tokens does not use all of them."""


def step_work(skeleton: ModelSkeleton, leaves: Iterable[LeafSpec] | None = None) -> StepWork:
    """Count the work of a model, sharded as the engine shards it.

    leaves: its parameters; None: those of `skeleton`, which may have one layer of each kind only.
    """
    config, rules = skeleton.config, skeleton.policy.rules
    leaves = skeleton.leaves if leaves is None else tuple(leaves)
    matrices = [leaf for leaf in leaves if _is_of_layers(leaf)]
    head = _EMBEDDING if config.tied_embeddings else _HEAD
    heads = [leaf for leaf in skeleton.leaves if leaf.name == head]
    return StepWork(
        num_layer_weights=sum(_weights_per_token(leaf, config) for leaf in matrices),
        num_head_weights=sum(math.prod(leaf.shape) for leaf in heads),
        read_bytes=sum(
            local_bytes(array, rules) for leaf in (*matrices, *heads) for array in leaf.arrays if len(array.shape) > 1
        ),
        expert_bytes=sum(
            local_bytes(array, rules) for leaf in leaves if leaf.num_experts is not None for array in leaf.arrays
        ),
    )


def local_bytes(array: ArraySpec, rules: AxisRules) -> int:
    """Return the bytes of an array on one device."""
    return array.num_bytes // math.prod(rules.count(axis) for axis in array.axes)


def _is_of_layers(leaf: LeafSpec) -> bool:
    """Return True for a matrix that every step reads, but for embeddings and the output matrix."""
    is_matrix = len(leaf.shape) > 1 and leaf.name not in (_EMBEDDING, _LAYER_EMBEDDING, _POSITIONS, _HEAD)
    return is_matrix and not leaf.name.startswith(VISION) and not leaf.name.endswith(_NGRAMS)


def _weights_per_token(matrix: LeafSpec, config: DecoderConfig) -> int:
    """Return the weights of a matrix that one token is multiplied with."""
    if matrix.num_experts is None or config.experts is None:
        return math.prod(matrix.shape)
    return math.prod(matrix.own_shape) * config.experts.num_per_token
