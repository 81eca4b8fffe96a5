"""The multi-token-prediction (MTP) layer of a checkpoint, as a checkpoint of one layer.

Checkpoints name it as the layer after the last one, L ("layer"), or have a module for it ("module"):

    model.layers.L.enorm                mtp.pre_fc_norm_embedding    norm of the next token's embedding
    model.layers.L.hnorm                mtp.pre_fc_norm_hidden       norm of the model's hidden state
    model.layers.L.eh_proj              mtp.fc                       projection of both, side by side
    model.layers.L.self_attn, .mlp, ... mtp.layers.0.*               a decoder layer
    model.layers.L.shared_head.norm     mtp.norm                     norm before the output head
    model.layers.L.embed_tokens, .shared_head.head                   copies of the model's own, which are not read

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), and the names in its published checkpoints and those of GLM-4.5; those of
Qwen3-Next and Qwen3.5. All of them put the embedding first, and take the hidden state after the model's final norm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from jaxserve.checkpoint.family import Family, MTPNames
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import architecture, renamed
from jaxserve.errors import CheckpointError

_COUNTS: Final[Mapping[MTPNames, str]] = {"layer": "num_nextn_predict_layers", "module": "mtp_num_hidden_layers"}
_DEDICATED: Final = "mtp_use_dedicated_embeddings"
_IN_LAYER: Final = {
    "enorm.": "model.enorm.",
    "hnorm.": "model.hnorm.",
    "eh_proj.": "model.eh_proj.",
    "shared_head.norm.": "model.norm.",
    "": "model.layers.0.",
}
_IN_MODULE: Final = {
    "pre_fc_norm_embedding.": "model.enorm.",
    "pre_fc_norm_hidden.": "model.hnorm.",
    "fc.": "model.eh_proj.",
    "norm.": "model.norm.",
    "layers.0.": "model.layers.0.",
}
_COPIES: Final = ("embed_tokens.", "shared_head.head.")


def mtp_config(config: Mapping[str, Any], families: Collection[Family]) -> dict[str, Any]:
    """Return `config.json` of the first MTP layer alone, as a decoder of one layer of the same family.

    Raises CheckpointError in one line for a model without such a layer, or whose MTP layers are not served.
    """
    form, count_key = _form(config, families)
    count = config.get(count_key, 1 if form == "module" else None)  # Qwen3-Next has no key: its tensors tell
    if type(count) is not int or count < 1:
        raise CheckpointError(f"no multi-token-prediction layer in this checkpoint: {count_key} is {str(count)[:80]}")
    if config.get(_DEDICATED):
        raise CheckpointError(
            f"multi-token-prediction layers with embeddings of their own ({_DEDICATED}) are not served"
        )
    one = {"num_hidden_layers": 1, count_key: 0, "first_k_dense_replace": 0}
    kind = "full_attention" if config.get("index_topk") is None else "indexed_attention"
    lists = {"layer_types": [kind], "mlp_layer_types": ["sparse"]}
    given: dict[str, Any] = {
        key: value for key, value in lists.items() if config.get(key) is not None or form == "module"
    }
    own_indexer = {"indexer_types": ["full"], "index_topk_pattern": "F"}  # whichever layers of the model have one
    given |= {key: value for key, value in own_indexer.items() if config.get(key) is not None}
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list):  # of Qwen's layers; the MTP layer counts as layer 0
        given["mlp_only_layers"] = [layer for layer in dense if layer == 0]
    return {**config, **one, **given}


def only_mtp_layer(checkpoint: Checkpoint, num_layers: int, families: Collection[Family]) -> Checkpoint:
    """Return the tensors of the first MTP layer of a model with `num_layers` layers, under their own names."""
    prefix = _prefix(_form(checkpoint.config, families)[0], num_layers)
    return renamed(checkpoint, lambda name: name if name.startswith(prefix) else None)


def as_first_layer(checkpoint: Checkpoint, num_layers: int, families: Collection[Family]) -> Checkpoint:
    """Return the tensors of `only_mtp_layer` under the names of a decoder's first layer, without copies of the model's own.

    Raises CheckpointError if there are none.
    """
    form, count_key = _form(checkpoint.config, families)
    prefix, names = _prefix(form, num_layers), _IN_LAYER if form == "layer" else _IN_MODULE

    def name_in_layer(name: str) -> str | None:
        own = name.removeprefix(prefix)
        if own.startswith(_COPIES):
            return None
        return next((new + own.removeprefix(old) for old, new in names.items() if own.startswith(old)), None)

    found = renamed(checkpoint, name_in_layer)
    if not found.tensors:
        raise CheckpointError(
            f"{checkpoint.path}: tensors of the multi-token-prediction layer expected at {prefix}* ({count_key}); found none"
        )
    return found


def _form(config: Mapping[str, Any], families: Collection[Family]) -> tuple[MTPNames, str]:
    """Return how the model's checkpoints name the layer, and the key with their number. Raises CheckpointError."""
    name = architecture(config)
    served = {each: family.mtp_names for family in families if family.mtp_names for each in family.architectures}
    if name not in served and config.get("num_mtp_modules"):
        raise CheckpointError(
            f"the config of this {str(name)[:80]} model declares multi-token-prediction layers (num_mtp_modules), but its published "
            "checkpoints do not have them; draft with --speculative-model and an EAGLE-3 head"
        )
    if name not in served:
        raise CheckpointError(
            f"multi-token-prediction layers of {str(name)[:80]} models are not served; those of {', '.join(sorted(served))} are"
        )
    return served[name], _COUNTS[served[name]]


def _prefix(form: MTPNames, num_layers: int) -> str:
    return f"model.layers.{num_layers}." if form == "layer" else "mtp."
