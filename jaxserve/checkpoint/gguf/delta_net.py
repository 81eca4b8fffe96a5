"""Gated delta nets in GGUF files: which layers have one, their sizes, and the projection of their inputs.

Files of Qwen3-Next have one matrix `ssm_in` as Hugging Face does: for each key head its query, its key, and the values and
gates of its value heads. Since llama.cpp splits it, `attn_qkv` has all queries, then all keys and all values, and `attn_gate` the gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.architecture import GGUFKeys
from jaxserve.checkpoint.gguf.joined import Pair, with_joined
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.quant.tensor import as_floats

_COMMON_NAMES: Final[Mapping[str, str]] = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
"""Hugging Face's names by llama.cpp's, of parts that Qwen3-Next and Qwen3.5 share. Of `dt` there is a bias only."""
FUSED_NAMES: Final[Mapping[str, str]] = {
    **_COMMON_NAMES,
    "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": "linear_attn.in_proj_inputs",
    "attn_gate": "linear_attn.in_proj_gates",
    "ssm_ba": "linear_attn.in_proj_ba",
}
"""Hugging Face's names of Qwen3-Next by llama.cpp's. It has none for `in_proj_inputs` and `in_proj_gates`."""
TENSOR_NAMES: Final[Mapping[str, str]] = {
    **_COMMON_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
"""Hugging Face's names of Qwen3.5 by llama.cpp's."""
_PROJECTIONS: Final = Pair(".in_proj_inputs.weight", ".in_proj_gates.weight", ".in_proj_qkvz.weight")


def delta_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for gated delta nets, and `layer_types` by the file's tensors.

    config: the keys that all files have. Raises CheckpointError for sizes that do not fit each other.
    """
    heads, width, key_heads = (keys.integer(f"ssm.{size}") for size in ("time_step_rank", "inner_size", "group_count"))
    if heads % key_heads:
        keys.fail("ssm.time_step_rank", f"a multiple of {key_heads} key heads", heads)
    if width % heads:
        keys.fail("ssm.inner_size", f"a multiple of {heads} heads", width)
    mixers = [f"blk.{layer}.ssm_conv1d.weight" in keys.file.tensors for layer in range(config["num_hidden_layers"])]
    return {
        "layer_types": ["linear_attention" if is_mixer else "full_attention" for is_mixer in mixers],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", minimum=2),
    }


def with_joined_gates(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with one projection of queries, keys, values and gates, in float32, in place of two.

    Raises CheckpointError if one of the two is missing or their shapes do not fit.
    """
    if not any(name.endswith(_PROJECTIONS[:2]) for name in checkpoint.tensors):
        return checkpoint
    num_keys, num_values = _rows(checkpoint.config)
    hidden_size = checkpoint.config["hidden_size"]
    expected = [(2 * num_keys + num_values, hidden_size), (num_values, hidden_size)]
    whole = (2 * (num_keys + num_values), hidden_size)

    def shape_of(inputs: tuple[int, ...], gates: tuple[int, ...]) -> tuple[int, ...] | None:
        return whole if [inputs, gates] == expected else None

    wanted = f"expected tensors attn_qkv and attn_gate of shapes {expected[0]} and {expected[1]}, and no ssm_in"
    return with_joined(checkpoint, _PROJECTIONS, shape_of, _read_joined, wanted)


def _read_joined(module: str, inner: Checkpoint) -> np.ndarray:
    """Return for each key head its query, its key, its values and its gates."""
    num_keys, _ = _rows(inner.config)
    inputs, gates = (as_floats(inner.read(module + part)).astype(np.float32) for part in _PROJECTIONS[:2])
    parts = [*np.split(inputs, [num_keys, 2 * num_keys]), gates]
    by_head = [part.reshape(inner.config["linear_num_key_heads"], -1, part.shape[-1]) for part in parts]
    return np.concatenate(by_head, 1).reshape(-1, inputs.shape[-1])


def _rows(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of rows of all keys, and of all values."""
    keys, values = ((config[f"linear_num_{of}_heads"], config[f"linear_{of}_head_dim"]) for of in ("key", "value"))
    return keys[0] * keys[1], values[0] * values[1]
