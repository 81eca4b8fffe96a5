"""Split matrices that a checkpoint stores together into one tensor each.

Fused QKV and gate-up matrices (Phi-3) are stacked by rows. Some checkpoints stack the experts of a layer, see
`StackedExperts`; quantised matrices of gpt-oss are outputs by inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.family import StackedExperts
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.quant.tensor import Tensor, TensorInfo

_GATE_UP: Final = "gate_up_proj"
_STACKED: Final = tuple(f".experts.{part}" for part in (_GATE_UP, "gate_proj", "up_proj", "down_proj"))
_BIAS: Final = "_bias"
_VECTORS: Final = (".e_score_correction_bias", ".A_log")


def split_fused(checkpoint: Checkpoint) -> Checkpoint:
    """Replace fused QKV and gate-up matrices by their parts.

    Matrices whose sizes are not those of the config stay as they are: the loader then names what is missing.
    """
    tensors, readers = dict(checkpoint.tensors), {}
    for fused, parts in _fused_parts(checkpoint.config).items():
        for name in [name for name in tensors if f".{fused}." in name]:
            info, ends = tensors[name], list(itertools.accumulate(parts.values(), initial=0))
            if fused == _GATE_UP:  # a shared expert has a width of its own
                ends = [0, info.shape[0] // 2, info.shape[0]]
            if info.shape[:1] != (ends[-1],):
                continue
            del tensors[name]
            for part, (start, end) in zip(parts, itertools.pairwise(ends), strict=True):
                own = name.replace(f".{fused}.", f".{part}.")
                size = info.num_stored_bytes * (end - start) // ends[-1]
                tensors[own] = replace(info, name=own, shape=(end - start, *info.shape[1:]), num_stored_bytes=size)
                readers[own] = partial(_read_rows, name, slice(start, end))
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _read_rows(stored: str, rows: slice, inner: Checkpoint) -> Tensor:
    return inner.read(stored)[rows]


def _fused_parts(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    sizes = ("hidden_size", "num_attention_heads", "intermediate_size")
    hidden, heads, width = (value if isinstance(value := config.get(key), int) else 0 for key in sizes)
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    head_dim = head_dim if isinstance(head_dim, int) else hidden // max(heads, 1)
    kv_rows = kv_heads * head_dim
    return {
        "qkv_proj": {"q_proj": heads * head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": width, "up_proj": width},
    }


def with_flat_vectors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with vectors for what is stored with further axes of one number: routers' correction biases (1, E)
    of ERNIE 4.5, and rates of decays (1, 1, N, 1) of Kimi Linear."""
    tensors, readers = dict(checkpoint.tensors), {}
    for name, info in checkpoint.tensors.items():
        own = tuple(size for size in info.shape if size != 1) or (1,)
        if name.endswith(_VECTORS) and len(own) == 1 < len(info.shape):
            tensors[name] = replace(info, shape=own)
            readers[name] = partial(_read_flat, name)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _read_flat(stored: str, inner: Checkpoint) -> Tensor:
    return np.asarray(inner.read(stored)).reshape(-1)


def with_each_expert(checkpoint: Checkpoint, layout: StackedExperts) -> Checkpoint:
    """Return the checkpoint with a matrix and a bias for each expert."""
    tensors: dict[str, TensorInfo] = {}
    readers: dict[str, Callable[[Checkpoint], Tensor]] = {}
    for name, info in checkpoint.tensors.items():
        if any(part in name for part in _STACKED):
            is_by_outputs = _is_by_outputs(name, info, layout, checkpoint.config.get("hidden_size"))
            _add_experts(name, info, layout, tensors, readers, is_by_outputs=is_by_outputs)
        else:
            tensors[name] = info
    return CheckpointView(checkpoint, tensors, readers)


def _add_experts(
    name: str,
    info: TensorInfo,
    layout: StackedExperts,
    tensors: dict[str, TensorInfo],
    readers: dict[str, Callable[[Checkpoint], Tensor]],
    *,
    is_by_outputs: bool,
) -> None:
    above, _, last = name.rpartition(".")
    is_bias = last.endswith(_BIAS)
    count, *own_shape = info.shape if is_by_outputs else (info.shape[0], *info.shape[:0:-1])
    for part, outputs in _expert_parts(last.removesuffix(_BIAS), own_shape[0], layout):
        rows = len(range(own_shape[0])[outputs])
        size = info.num_stored_bytes * rows // (own_shape[0] * count)
        for expert in range(count):
            own = f"{above}.{expert}.{part}.{'bias' if is_bias else 'weight'}"
            tensors[own] = replace(info, name=own, shape=(rows, *own_shape[1:]), num_stored_bytes=size)
            readers[own] = partial(_read_expert, name, expert, outputs, is_by_outputs)


def _is_by_outputs(name: str, info: TensorInfo, layout: StackedExperts, hidden_size: int | None) -> bool:
    """Return True if the axis of outputs comes before that of inputs, or if the tensor holds biases."""
    if name.endswith(_BIAS) or info.is_quantized or layout == "halves":
        return True
    # transformers saves outputs by inputs, and reads both: it compares shapes, so a square matrix is outputs by inputs.
    axis = -1 if name.endswith(_GATE_UP) else -2
    return layout == "halves_of_either_order" and len(info.shape) == 3 and info.shape[axis] == hidden_size


def _expert_parts(name: str, num_outputs: int, layout: StackedExperts) -> tuple[tuple[str, slice], ...]:
    """Return the parts of a stacked tensor and the outputs of each."""
    if name != "gate_up_proj":
        return ((name, slice(None)),)
    half = num_outputs // 2
    ends = (slice(0, None, 2), slice(1, None, 2)) if layout == "interleaved" else (slice(half), slice(half, None))
    return tuple(zip(("gate_proj", "up_proj"), ends, strict=True))


def _read_expert(stored: str, expert: int, outputs: slice, is_by_outputs: bool, inner: Checkpoint) -> Tensor:
    whole = inner.read(stored)
    if isinstance(whole, np.ndarray) and not is_by_outputs:
        return whole[expert, :, outputs].T
    return whole[expert][outputs]
