"""Split matrices that a checkpoint stores together into one tensor each.

Tables whose rows are stored in several tensors (Qwen4-Exp), and norms of heads (StableLM 2 12B), become one each.

Rows of fused QKV and gate-up matrices (Phi-3) are stacked, those of QKV also in groups (`QKVRows`). Some checkpoints stack the experts of a layer, see
`StackedExperts`; quantised matrices of gpt-oss are outputs by inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.family import Family, StackedExperts
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.qkv import QKV, QKVRows, Rows, num_rows
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.errors import CheckpointError
from jaxserve.quant.tensor import Tensor, TensorInfo, as_floats

_GATE_UP: Final = "gate_up_proj"
_STACKED: Final = tuple(f".experts.{part}" for part in (_GATE_UP, "gate_proj", "up_proj", "down_proj"))
_BIAS: Final = "_bias"
_SHARD: Final = re.compile(r"(?P<table>.+)\.shard_(?P<number>\d+)\.weight")
_NORM: Final = re.compile(r"(?P<table>.+\.[qk]_norm)\.norms\.(?P<number>\d+)\.weight")
_VECTORS: Final = (".e_score_correction_bias", ".A_log", ".act_fn.beta", ".act_fn.eps")
_HEAD_NORMS: Final = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")


def split_fused(checkpoint: Checkpoint, family: Family | None = None) -> Checkpoint:
    """Replace fused QKV and gate-up matrices by their parts. family: says how the rows of QKV are ordered; None: one part after the
    other.

    Matrices whose sizes are not those of the config stay as they are: the loader then names what is missing.
    """
    tensors, readers = dict(checkpoint.tensors), {}
    if family is None:
        qkv = _qkv_parts(checkpoint.config, QKVRows())
    else:
        config = family.shapes(with_our_keys(checkpoint.config, family.key_names))
        qkv = _qkv_parts(config, family.qkv_rows)
    for name in [name for name in tensors if f".{QKV}." in name or f".{_GATE_UP}." in name]:
        info, fused = tensors[name], QKV if f".{QKV}." in name else _GATE_UP
        parts = qkv if fused == QKV else _halves(info.shape[0])
        count = num_rows(parts)
        if info.shape[:1] != (count,):
            continue
        del tensors[name]
        for part, rows in parts.items():
            own, own_rows = name.replace(f".{fused}.", f".{part}."), num_rows({part: rows})
            size = info.num_stored_bytes * own_rows // count
            tensors[own] = replace(info, name=own, shape=(own_rows, *info.shape[1:]), num_stored_bytes=size)
            readers[own] = partial(_read_rows, name, rows)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _read_rows(stored: str, rows: Rows, inner: Checkpoint) -> Tensor:
    return inner.read(stored)[rows]


def _halves(count: int) -> Mapping[str, Rows]:
    """Return the rows of gate and up."""
    return {"gate_proj": slice(0, count // 2), "up_proj": slice(count // 2, 2 * (count // 2))}


def _qkv_parts(config: Mapping[str, Any], rows: QKVRows) -> Mapping[str, Rows]:
    sizes = ("hidden_size", "num_attention_heads")
    hidden, heads = (value if isinstance(value := config.get(key), int) else 0 for key in sizes)
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    head_dim = head_dim if isinstance(head_dim, int) else hidden // max(heads, 1)
    return rows.parts(heads * head_dim, kv_heads * head_dim, kv_heads)


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Rows of a table that several tensors of a checkpoint store one after the other. Only the tensors with these rows are read."""

    checkpoint: Checkpoint
    shards: Sequence[TensorInfo]
    rows: range

    def __getitem__(self, index: slice) -> JoinedRows:
        """Return some of the rows."""
        return replace(self, rows=self.rows[index])

    def columns(self, inputs: range, num_inputs: int) -> None:
        """Return None: only rows are cut."""

    def dequantize(self) -> np.ndarray:
        """Return the rows in the type that they are stored in; in float32 if they are quantised."""
        found, first = [], 0
        for info in self.shards:
            own = range(max(self.rows.start, first) - first, min(self.rows.stop - first, info.shape[0]))
            if own:
                found.append(as_floats(self.checkpoint.read(info.name))[own.start : own.stop])
            first += info.shape[0]
        return np.concatenate(found)


def with_joined_tables(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with one tensor for each table that is stored in shards of its rows, numbered from 0, and with one
    vector for norms of query or key heads that are stored apart."""
    tensors, shards = dict(checkpoint.tensors), dict[str, dict[int, TensorInfo]]()
    for name, info in checkpoint.tensors.items():
        found = _NORM.fullmatch(name) if len(info.shape) == 1 else _SHARD.fullmatch(name)
        if found is not None and len(info.shape) in (1, 2):
            shards.setdefault(f"{found['table']}.weight", {})[int(found["number"])] = tensors.pop(name)
    if not shards:
        return checkpoint
    readers: dict[str, Callable[[Checkpoint], Tensor]] = {}
    for table, numbered in shards.items():
        own = [numbered[number] for number in sorted(numbered)]
        first = own[0]
        if [*sorted(numbered)] != [*range(len(own))] or any(
            (each.shape[1:], each.stored_dtype) != (first.shape[1:], first.stored_dtype) for each in own
        ):
            raise CheckpointError(
                f"{first.file}: tensor {first.name!r}: shards numbered from 0, alike but for their rows, expected"
            )
        shape = (sum(each.shape[0] for each in own), *first.shape[1:])
        size = sum(each.num_stored_bytes for each in own)
        tensors[table] = replace(first, name=table, shape=shape, num_stored_bytes=size, is_quantized=False)
        joined = partial(JoinedRows, shards=own, rows=range(shape[0]))
        readers[table] = joined if len(shape) > 1 else partial(_read_joined, joined)
    return CheckpointView(checkpoint, tensors, readers)


def _read_joined(joined: Callable[[Checkpoint], JoinedRows], inner: Checkpoint) -> Tensor:
    return joined(inner).dequantize()


def with_transposed(checkpoint: Checkpoint, modules: Collection[str]) -> Checkpoint:
    """Return the checkpoint with outputs by inputs for the matrices of modules that are stored the other way. modules: last
    components of their names; quantised matrices are outputs by inputs already."""
    tensors, readers = dict(checkpoint.tensors), {}
    for name, info in checkpoint.tensors.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in modules and len(info.shape) == 2 and not info.is_quantized:
            tensors[name], readers[name] = replace(info, shape=info.shape[::-1]), partial(_read_transposed, name)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _read_transposed(stored: str, inner: Checkpoint) -> Tensor:
    return np.asarray(inner.read(stored)).T


def with_flat_vectors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with vectors for what is stored with further axes of one number, or with none: routers' correction
    biases (1, E) of ERNIE 4.5, rates of decays (1, 1, N, 1) of Kimi Linear, and numbers () of xIELU; and with one vector for weights
    (heads, H) of norms of query or key heads (Command R+)."""
    tensors, readers = dict(checkpoint.tensors), {}
    for name, info in checkpoint.tensors.items():
        own = tuple(size for size in info.shape if size != 1) or (1,)
        if is_norm := name.endswith(_HEAD_NORMS) and len(info.shape) == 2:
            own = (math.prod(info.shape),)
        if (is_norm or name.endswith(_VECTORS)) and len(own) == 1 and own != tuple(info.shape):
            tensors[name] = replace(info, shape=own)
            readers[name] = partial(_read_flat, name)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _read_flat(stored: str, inner: Checkpoint) -> Tensor:
    return np.asarray(inner.read(stored)).reshape(-1)


def with_each_expert(checkpoint: Checkpoint, layout: StackedExperts) -> Checkpoint:
    """Return the checkpoint with a matrix and a bias for each expert."""
    if layout == "rows_by_width":
        checkpoint = _with_expert_axis(checkpoint)
    tensors: dict[str, TensorInfo] = {}
    readers: dict[str, Callable[[Checkpoint], Tensor]] = {}
    for name, info in checkpoint.tensors.items():
        is_bias = name.endswith(_BIAS)
        if name.removesuffix(_BIAS).endswith(_STACKED) and len(info.shape) == (2 if is_bias else 3):
            is_by_outputs = _is_by_outputs(name, info, layout, checkpoint.config.get("hidden_size"))
            _add_experts(name, info, layout, tensors, readers, is_by_outputs=is_by_outputs)
        else:
            tensors[name] = info
    return CheckpointView(checkpoint, tensors, readers)


def _with_expert_axis(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with an axis of experts for matrices that have the rows of all experts; routers say how many there are."""
    tensors, readers = dict(checkpoint.tensors), {}
    for name, info in checkpoint.tensors.items():
        router = tensors.get(f"{name.partition('.experts.')[0]}.gate.weight")
        if name.endswith(_STACKED) and router is not None and info.shape[0] % router.shape[0] == 0:
            shape = (router.shape[0], info.shape[0] // router.shape[0], *info.shape[1:])
            tensors[name] = replace(info, shape=shape)
            readers[name] = partial(_read_reshaped, name, shape)
    return CheckpointView(checkpoint, tensors, readers)


def _read_reshaped(stored: str, shape: tuple[int, ...], inner: Checkpoint) -> Tensor:
    return np.asarray(inner.read(stored)).reshape(shape)


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
    if layout == "rows_by_width":
        return not name.endswith("down_proj")
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
