"""Mamba-2 mixers in GGUF files: which layers have one, their sizes, and their tensors.

llama.cpp stores A itself instead of the logarithm of its negative, A and D as columns, the norm by its groups, and the
convolution without the axis of its one input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.architecture import KV_HEADS, GGUFKeys

TENSOR_NAMES: Final[Mapping[str, str]] = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""Hugging Face's names by llama.cpp's. Of `mamba.dt` there is a bias only."""
LOG_DECAY: Final = ".mamba.A_log"
_CONVOLUTION: Final = ".mamba.conv1d.weight"
_VECTORS: Final = (LOG_DECAY, ".mamba.D", ".mamba.norm.weight")


def mamba_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for Mamba-2 mixers, and `layer_types`.

    config: the keys that all files have. Raises CheckpointError for sizes that do not fit each other.
    """
    heads, width = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if width % heads or width % config["hidden_size"]:
        keys.fail(
            "ssm.inner_size", f"a multiple of {heads} heads and of embedding_length {config['hidden_size']}", width
        )
    kv_heads = keys.get(KV_HEADS)
    counts = kv_heads if isinstance(kv_heads, list) else [kv_heads] * config["num_hidden_layers"]
    biases = {name.split(".", 2)[-1] for name in keys.file.tensors if name.endswith(".bias")}
    return {
        "layer_types": ["full_attention" if count else "linear_attention" for count in counts],
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_expand": width // config["hidden_size"],
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in biases,
        "mamba_proj_bias": "ssm_in.bias" in biases,
        "attention_bias": "attn_q.bias" in biases,
    }


def mixer_shape(name: str, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a mixer's tensor in Hugging Face's checkpoints; None for a tensor that is stored in its own shape."""
    if name.endswith(_VECTORS):
        return (int(np.prod(stored)),)
    if name.endswith(_CONVOLUTION) and len(stored) == 2:
        return (stored[0], 1, stored[1])
    return None
