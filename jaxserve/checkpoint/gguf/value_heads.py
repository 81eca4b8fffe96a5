"""Value heads of gated delta nets (Qwen3.5) in GGUF files, which llama.cpp stores in an order of its own.

A key head serves a group of value heads. Hugging Face stores the first key head's group, then the second's. llama.cpp stores the
first value head of every group, then the second of every group (tiled), because its operations repeat key heads in this order.
Files of Qwen3-Next have Hugging Face's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.header import GGML_TYPES
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.quant.stored_blocks import StoredBlocks
from jaxserve.quant.tensor import Tensor, TensorInfo, as_floats

_INPUTS: Final = ".linear_attn.in_proj_qkv.weight"
_WITH_KEYS: Final = ("in_proj_qkv.weight", "conv1d.weight")
"""Tensors whose rows are all queries, all keys and all values."""
_PER_VALUE: Final = ("in_proj_z.weight",)
_PER_HEAD: Final = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
_OUTPUT: Final = "out_proj.weight"
"""The matrix whose columns are the values."""
_BLOCK_ELEMENTS: Final[Mapping[str, int]] = {kind.name: kind.block_elements for kind in GGML_TYPES.values()}


def with_grouped_values(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the value heads of Qwen3.5's gated delta nets in Hugging Face's order.

    An output projection whose blocks are wider than a head, or lie across two, is dequantised.
    """
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    modules = [name.removesuffix(_INPUTS) + ".linear_attn." for name in tensors if name.endswith(_INPUTS)]
    if not modules or config["linear_num_key_heads"] == config["linear_num_value_heads"]:
        return checkpoint
    width = config["linear_value_head_dim"]
    num_key_rows = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    orders = {
        **dict.fromkeys(_WITH_KEYS, stored_rows(config, width, num_key_rows)),
        **dict.fromkeys(_PER_VALUE, stored_rows(config, width)),
        **dict.fromkeys(_PER_HEAD, stored_rows(config, 1)),
    }
    readers = {module + part: partial(_read_rows, module + part, orders[part]) for module in modules for part in orders}
    for name in [module + _OUTPUT for module in modules if module + _OUTPUT in tensors]:
        tensors[name] = _output(tensors[name], width)
        readers[name] = partial(_read_output, name)
    return CheckpointView(checkpoint, tensors, readers)


def stored_rows(config: Mapping[str, Any], width: int, num_before: int = 0) -> np.ndarray:
    """Return for each row of a tensor of Hugging Face its row in the file.

    width: rows of a value head. num_before: rows before those of the first value head, which keep their places.
    """
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    tiled = np.arange(num_values * width).reshape(num_values // num_keys, num_keys, width)
    return np.concatenate([np.arange(num_before), num_before + tiled.swapaxes(0, 1).reshape(-1)])


def _output(info: TensorInfo, width: int) -> TensorInfo:
    if not info.is_quantized or width % _BLOCK_ELEMENTS[info.stored_dtype] == 0:
        return info
    return replace(info, stored_dtype="F32", is_quantized=False)


def _read_rows(name: str, order: np.ndarray, inner: Checkpoint) -> Tensor:
    return inner.read(name)[order]


def _read_output(name: str, inner: Checkpoint) -> Tensor:
    stored, width = inner.read(name), inner.config["linear_value_head_dim"]
    if isinstance(stored, StoredBlocks) and width % stored.block_inputs == 0:
        by_block = stored.blocks.reshape(len(stored.blocks), -1, stored.block_bytes)
        moved = by_block.take(stored_rows(inner.config, width // stored.block_inputs), 1)
        return replace(stored, blocks=moved.reshape(stored.blocks.shape))
    return as_floats(stored).take(stored_rows(inner.config, width), 1)
