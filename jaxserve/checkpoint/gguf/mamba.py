"""Mamba mixers of both versions in GGUF files: their sizes and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.gguf.architecture import GGUFKeys

SCAN_NAMES: Final[Mapping[str, str]] = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_out": "mamba.out_proj",
}
"""Hugging Face's names of the first version by llama.cpp's."""
TENSOR_NAMES: Final[Mapping[str, str]] = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""Hugging Face's names of Mamba-2 by llama.cpp's. Of `mamba.dt` there is a bias only."""


def scan_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for mixers of the first version, under Jamba's names.

    Raises CheckpointError for a width that is no multiple of the model's.
    """
    width, hidden_size = keys.integer("ssm.inner_size"), config["hidden_size"]
    if width % hidden_size:
        keys.fail("ssm.inner_size", f"a multiple of embedding_length {hidden_size}", width)
    biases = {name.split(".", 2)[-1] for name in keys.file.tensors if name.endswith(".bias")}
    return {
        "mamba_expand": width // hidden_size,
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel", minimum=2),
        "mamba_dt_rank": keys.integer("ssm.time_step_rank"),
        "mamba_conv_bias": "ssm_conv1d.bias" in biases,
        "mamba_proj_bias": "ssm_in.bias" in biases,
    }


def mamba_config(keys: GGUFKeys) -> dict[str, Any]:
    """Return the keys of `config.json` for Mamba-2 mixers; raise CheckpointError for sizes that do not fit each other."""
    heads, width = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if width % heads:
        keys.fail("ssm.inner_size", f"a multiple of {heads} heads", width)
    biases = {name.split(".", 2)[-1] for name in keys.file.tensors if name.endswith(".bias")}
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in biases,
        "mamba_proj_bias": "ssm_in.bias" in biases,
    }
