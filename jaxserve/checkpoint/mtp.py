"""The multi-token-prediction (MTP) layer of a checkpoint, as a checkpoint of one layer.

Checkpoints name it as the layer after the last one:

    model.layers.L.enorm, .hnorm          norms of the next token's embedding and of the model's hidden state
    model.layers.L.eh_proj                projection of both, side by side
    model.layers.L.self_attn, .mlp, ...   a decoder layer
    model.layers.L.shared_head.norm       norm before the output head
    model.layers.L.embed_tokens, .shared_head.head    copies of the model's own, which are not read

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); the names are those of its published checkpoints and of GLM-4.5's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import architecture, renamed
from jaxserve.errors import CheckpointError

_COUNT: Final = "num_nextn_predict_layers"
_OWN: Final = {"enorm.": "model.enorm.", "hnorm.": "model.hnorm.", "eh_proj.": "model.eh_proj."}
_NORM: Final = "shared_head.norm."
_COPIES: Final = ("embed_tokens.", "shared_head.head.")


def mtp_config(config: Mapping[str, Any], families: Collection[Family]) -> dict[str, Any]:
    """Return `config.json` of the first MTP layer alone, as a decoder of one layer of the same family.

    Raises CheckpointError in one line for a model without such a layer, or whose MTP layers are not served.
    """
    name = architecture(config)
    if not any(family.has_mtp_layers and name in family.architectures for family in families):
        served = ", ".join(
            sorted(each for family in families if family.has_mtp_layers for each in family.architectures)
        )
        raise CheckpointError(
            f"multi-token-prediction layers of {str(name)[:80]} models are not served; those of {served} are"
        )
    count = config.get(_COUNT)
    if type(count) is not int or count < 1:
        raise CheckpointError(f"no multi-token-prediction layer in this checkpoint: {_COUNT} is {str(count)[:80]}")
    one = {"num_hidden_layers": 1, _COUNT: 0, "first_k_dense_replace": 0}
    lists = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    return {**config, **one, **{key: value for key, value in lists.items() if config.get(key) is not None}}


def only_mtp_layer(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """Return the tensors of the first MTP layer, which follows `num_layers` layers, under their own names."""
    prefix = f"model.layers.{num_layers}."
    return renamed(checkpoint, lambda name: name if name.startswith(prefix) else None)


def as_first_layer(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """Return the tensors of `only_mtp_layer` under the names of a decoder's first layer, without copies of the model's own.

    Raises CheckpointError if there are none.
    """
    prefix = f"model.layers.{num_layers}."

    def name_in_layer(name: str) -> str | None:
        own = name.removeprefix(prefix)
        if own.startswith(_COPIES):
            return None
        if own.startswith(_NORM):
            return "model.norm." + own.removeprefix(_NORM)
        return next(
            (new + own.removeprefix(old) for old, new in _OWN.items() if own.startswith(old)), f"model.layers.0.{own}"
        )

    found = renamed(checkpoint, name_in_layer)
    if not found.tensors:
        raise CheckpointError(
            f"{checkpoint.path}: tensors of the multi-token-prediction layer expected at {prefix}*, as {_COUNT} says; found none"
        )
    return found
