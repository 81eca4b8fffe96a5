"""Mamba-2 mixers in GGUF files: their sizes and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.gguf.architecture import GGUFKeys

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
