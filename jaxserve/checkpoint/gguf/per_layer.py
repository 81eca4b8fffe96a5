"""Layers that differ from each other in GGUF files (Gemma 3n, Gemma 4): heads and widths by layer, the KV caches that they share, and
embeddings for each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.architecture import KV_HEADS, ROPE_FACTORS, SLIDING_THETA, WINDOW, GGUFKeys, layer_types
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.errors import CheckpointError
from jaxserve.quant.tensor import Tensor

TENSOR_NAMES: Final[Mapping[str, str]] = {
    "inp_gate": "per_layer.gate",
    "proj": "per_layer.projection",
    "post_norm": "per_layer.norm",
}
"""Our names by llama.cpp's, of the parts of a layer that take its embeddings."""
_EMBEDDINGS: Final = "per_layer_token_embd.weight"
TOP_NAMES: Final[Mapping[str, str]] = {
    _EMBEDDINGS: "model.per_layer.embed_tokens.weight",
    "per_layer_model_proj.weight": "model.per_layer.projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer.norm.weight",
}
STREAMS: Final[Mapping[str, str]] = {
    "altup_proj.weight": "model.altup.projections",
    "altup_unembd_proj.weight": "model.altup.unembed_projections",
}
"""Our names by llama.cpp's, of the matrices of all residual streams of Gemma 3n."""
_WIDTH: Final = "feed_forward_length"
_CAP: Final = "final_logit_softcapping"
_FULL: Final = "full_attention"
_SHARED: Final = "attention.shared_kv_layers"
_UNROTATED: Final = 1e20
"""Divisors of frequencies from here on leave a pair as it is: converters write 1e30."""


def by_layer(keys: GGUFKeys, key: str, num_layers: int, *, minimum: int = 1) -> list[int]:
    """Return a number for each layer, at least `minimum`; the file has a list of them or one for all."""
    values = keys.get(key)
    if not isinstance(values, list):
        return [keys.integer(key)] * num_layers
    values = values[:num_layers]  # without those of multi-token-prediction layers
    if len(values) != num_layers or any(type(value) is not int or value < minimum for value in values):
        keys.fail(key, f"a number from {minimum} on for each of the {num_layers} layers", values)
    return values


def embeddings_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for embeddings of each layer, and for layers that read others' keys and values."""
    table = keys.file.tensors.get(_EMBEDDINGS)
    return {
        "num_kv_shared_layers": keys.integer(_SHARED, minimum=0, maximum=config["num_hidden_layers"] - 1),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
    }


def with_each_stream(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a matrix for each residual stream of Gemma 3n but the active one; files have them as one tensor."""
    tensors, readers = dict(checkpoint.tensors), {}
    for name in [name for name in tensors if name in STREAMS.values()]:
        info = tensors.pop(name)
        count, *shape = info.shape
        for index in range(count):
            own = f"{name}.{index}.weight"
            size = info.num_stored_bytes // count
            tensors[own] = replace(info, name=own, shape=tuple(shape), num_stored_bytes=size)
            readers[own] = partial(_read_stream, name, index)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _read_stream(stored: str, index: int, inner: Checkpoint) -> Tensor:
    return inner.read(stored)[index]


def windows_config(keys: GGUFKeys, config: Mapping[str, Any], period: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for layers with a sliding window, the rope of both kinds of layers, and a cap of logits.

    period: by default the last of so many layers has full attention. rope: table of layers with full attention, but for its base.
    """
    return {
        "layer_types": layer_types(keys, config, period),
        "sliding_window": keys.integer(WINDOW),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": config["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number(SLIDING_THETA, 10_000.0)},
        },
        _CAP: keys.number(_CAP) if keys.has(_CAP) else None,
    }


def widths_config(keys: GGUFKeys, config: Mapping[str, Any], num_shared: int) -> dict[str, Any]:
    """Return `use_double_wide_mlp`: the last `num_shared` layers have feed-forward blocks of twice the width. Raises CheckpointError
    for other widths."""
    count, width = config["num_hidden_layers"], config["intermediate_size"]
    widths, own = by_layer(keys, _WIDTH, count), count - num_shared
    is_double = num_shared > 0 and widths[-1] != width
    if widths != [width] * own + [width * (1 + is_double)] * num_shared:
        others = f", or twice as much in the last {num_shared} layers" if num_shared else ""
        keys.fail(_WIDTH, f"one width{others}", widths)
    return {"use_double_wide_mlp": is_double}


def heads_config(keys: GGUFKeys, kinds: list[str], num_shared: int) -> dict[str, Any]:
    """Return the keys of `config.json` for heads of layers with a sliding window and of those with full attention. kinds:
    `layer_types`.

    Full attention without a projection of values takes its keys for them, and may have a number of KV heads of its own. Raises
    CheckpointError if layers of one kind differ.
    """
    dim, dims = keys.integer("attention.key_length_swa"), ("attention.value_length_swa", "rope.dimension_count_swa")
    for key in dims:
        if keys.integer(key, dim) != dim:
            keys.fail(key, f"the head size {dim} of layers with a window", keys.get(key))
    counts = by_layer(keys, KV_HEADS, len(kinds))
    by_kind = list(zip(counts, kinds, strict=True))
    full = {count for count, kind in by_kind if kind == _FULL}
    sliding = {count for count, kind in by_kind if kind != _FULL}
    own = [layer for layer, kind in enumerate(kinds[: len(kinds) - num_shared]) if kind == _FULL]
    has_shared_projection = any(f"blk.{layer}.attn_v.weight" not in keys.file.tensors for layer in own)
    if len(sliding) > 1 or len(full) > 1 or (sliding and full and sliding != full and not has_shared_projection):
        keys.fail(KV_HEADS, "one number for the layers of each kind, the same for both if keys are not values", counts)
    return {
        "head_dim": dim,
        "num_key_value_heads": min(sliding or full),
        "num_global_key_value_heads": min(full or sliding),
        "attention_k_eq_v": has_shared_projection,
    }


def proportional_rope(keys: GGUFKeys, head_dim: int) -> dict[str, Any]:
    """Return the table of proportional rope from the divisors of frequencies: 1 for the first pairs of a head, without end for the
    others. Raises CheckpointError for other divisors."""
    divisors = keys.file.read(ROPE_FACTORS)
    num_pairs = int((divisors == 1).sum())
    if divisors.shape != (head_dim // 2,) or not num_pairs or not (divisors[num_pairs:] >= _UNROTATED).all():
        raise CheckpointError(
            f"{keys.file.path}: tensor '{ROPE_FACTORS}': expected {head_dim // 2} divisors, the first of them 1 and all others from "
            f"{_UNROTATED:g} on, found {np.unique(divisors)[:4].tolist()}"
        )
    # The fraction is rounded down when read.
    return {"rope_type": "proportional", "partial_rotary_factor": math.nextafter(2 * num_pairs / head_dim, 1.0)}
