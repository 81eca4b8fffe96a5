"""Latent attention (MLA) in GGUF files: sizes and scaling in the metadata, and the matrices that make keys and values.

Files have one matrix `attn_kv_b` as Hugging Face does, or since llama.cpp absorbs the matrices, for each head the
transposed matrix that makes keys, `attn_k_b` (N, C, P), and the one that makes values, `attn_v_b` (N, V, C). N: heads,
C: rank, P: dimensions of a key that do not rotate, V: width of a value. Keys and values of absorbed attention have the
widths C + rotating dimensions and C, so such files name those of a head by keys of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.architecture import LOG_MULTIPLIER, GGUFKeys
from jaxserve.checkpoint.gguf.joined import Pair, with_joined
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.quant.tensor import as_floats

TENSOR_NAMES: Final[Mapping[str, str]] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""Hugging Face's names by llama.cpp's. It has none for `k_b_proj` and `v_b_proj`."""
_MATRICES: Final = Pair(".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight")


def latent_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for latent attention, and `rope_scaling` with the factors on scores.

    config: the keys that all files have. Raises CheckpointError for a value out of range.
    """
    rope_dim, own = config["head_dim"], "_mla" if keys.has("attention.key_length_mla") else ""
    query_rank = "attention.q_lora_rank"
    found = {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.integer(query_rank) if keys.get(query_rank) else None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys.integer(f"attention.key_length{own}", minimum=rope_dim + 1) - rope_dim,
        "v_head_dim": keys.integer(
            f"attention.value_length{own}", config["hidden_size"] // config["num_attention_heads"]
        ),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in keys.file.tensors,
    }
    scaling = config.get("rope_scaling")
    if scaling is None or not keys.get(LOG_MULTIPLIER):
        return found
    # A tenth of mscale_all_dim. No key has mscale, which is the same in every published model.
    factor = float(f"{10 * keys.number(LOG_MULTIPLIER):.6g}")
    return found | {"rope_scaling": {**scaling, "mscale": factor, "mscale_all_dim": factor}}


def with_joined_latents(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with one matrix that makes keys and values of latents, in float32, in place of two.

    Raises CheckpointError if one of the two is missing or their shapes do not fit.
    """
    wanted = "expected tensors attn_k_b and attn_v_b of (heads, rank, key) and (heads, value, rank), and no attn_kv_b"
    return with_joined(checkpoint, _MATRICES, _shape_of, _read_joined, wanted)


def _shape_of(keys: tuple[int, ...], values: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of the matrix that two of these shapes make, or None if they do not fit each other."""
    if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
        return None
    return keys[0] * (keys[2] + values[1]), keys[1]


def _read_joined(module: str, inner: Checkpoint) -> np.ndarray:
    """Return each head's matrix of keys, then of values."""
    keys, values = (inner.read(module + part) for part in _MATRICES[:2])
    num_heads, rank, _ = inner.tensors[module + _MATRICES.first].shape
    heads = [
        np.concatenate([as_floats(keys[head]).astype(np.float32).T, as_floats(values[head]).astype(np.float32)])
        for head in range(num_heads)
    ]
    return np.stack(heads).reshape(-1, rank)
