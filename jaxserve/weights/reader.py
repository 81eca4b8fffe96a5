"""Reads the parts of a checkpoint's tensors that one device holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.vision_names import VISION
from jaxserve.errors import CheckpointError, shown
from jaxserve.layers.rope import row_order
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.skeleton import LeafSpec
from jaxserve.quant.array import ArraySpec, QuantArray, Ranges
from jaxserve.quant.kv_scales import is_kv_scale
from jaxserve.quant.tensor import Tensor, as_floats
from jaxserve.weights.share import Share, share_of

_ROTATED: Final = ("q_proj", "k_proj", "q_norm", "k_norm")
_OF_KV_HEADS: Final = ("k_proj", "v_proj")
_MIXERS: Final = (".linear_attn.", ".convolved_qkv.", ".indexer.")
"""Recurrent mixers and indexers may have projections and norms with the names of those of attention."""
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_ADDED: Final = ".lora_B"
"""Adapters of queries and keys: their up matrices have rows in the same order."""
_POSITIVE_NAN, _NEGATIVE_NAN = 0x7F, 0xFF
"""Bits of e4m3: the largest signed and unsigned ones."""


class TensorReader:
    """Reads tensors with the rows of query and key heads as kernels rotate them (see `row_order`), and with copies of KV
    heads (see `DecoderConfig.for_devices`).

    Weights, scales, biases and norms are reordered. A tensor that is a view of its file is read where it is indexed. Raises
    CheckpointError for NaN among weights in e4m3.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig | EncoderConfig,
        on_read: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """on_read: called with the stored bytes of each part that is read."""
        self._checkpoint = checkpoint
        self._config = config
        self._on_read = on_read

    def _order(self, name: str) -> np.ndarray | None:
        """Return the order of the rows of each head of a tensor; None: that of the checkpoint."""
        config = self._config
        if not isinstance(config, DecoderConfig) or not _is_rotated(name):
            return None
        found = _LAYER.match(name)
        is_sliding = found is not None and config.layers[int(found[1])].sliding_window is not None
        order = row_order(config, is_sliding=is_sliding)
        if order is None or config.output_gate != "queries" or not _module(name).endswith("q_proj"):
            return order
        return np.concatenate([order, np.arange(config.head_dim, 2 * config.head_dim)])

    def part(self, leaf: LeafSpec, held: Sequence[Ranges]) -> tuple[np.ndarray, ...] | None:
        """Return one device's part of each array of a leaf; None if only the whole leaf can be assembled.

        held: these parts.
        """
        return self._rows(leaf, held[0]) if leaf.is_by_row else self._region(leaf, held)

    def _region(self, leaf: LeafSpec, held: Sequence[Ranges]) -> tuple[np.ndarray, ...] | None:
        """See `part`, of a matrix that the checkpoint stores in the blocks or groups of its format."""
        share = share_of(leaf, held)
        found = None if share is None else share.leaf.part(share.experts, share.outputs)
        if share is None or found is None or not all(self._is_cut(share, name) for name, _ in found[1]):
            return None
        return found[0].assemble(self.read(name, rows, share.inputs) for name, rows in found[1])

    def _is_cut(self, share: Share, name: str) -> bool:
        """Return True if the part's inputs of a stored tensor are kept as they are."""
        if not self._checkpoint.tensors[name].is_quantized:
            return False
        tensor = self._checkpoint.read(name)
        assert not isinstance(tensor, np.ndarray), "it is quantised"
        return share.cutting.takes(tensor) and tensor.columns(share.inputs, share.leaf.shape[-1]) is not None

    def _rows(self, leaf: LeafSpec, ranges: Ranges) -> tuple[np.ndarray, ...] | None:
        """See `part`, of a leaf of rows that are stored one by one. ranges: the part of the first array."""
        experts, own = (None, ranges) if leaf.num_experts is None else (ranges[0], ranges[1:])
        found = leaf.part(experts, own[0])
        if found is None:
            return None
        columns = own[1] if len(own) > 1 else None
        has_scales = not isinstance(leaf.declared, ArraySpec) and len(leaf.arrays) > 1
        read = None if has_scales else columns
        first, *others = found[0].assemble(self.read(name, rows, read) for name, rows in found[1])
        if columns is not None and has_scales:
            others = [_of_columns(each, first, columns) for each in others]
            first = np.ascontiguousarray(first[..., columns.start : columns.stop])
        return first, *others

    def read(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Return some rows of a tensor, and some columns of them; None: all. Rows of KV heads count their copies."""
        copies = kv_copies(name, self._config)
        if is_kv_scale(name) and self._checkpoint.tensors[name].shape == (1,):  # one for all heads
            return np.broadcast_to(np.asarray(self._checkpoint.read(name)), (len(rows),))
        if copies == 1:
            return self._read_stored(name, rows, columns)
        assert isinstance(self._config, DecoderConfig), "only decoders have copies"
        size = self._checkpoint.tensors[name].shape[0] // _kv_heads(name, self._config)[0]
        if rows.start % size or rows.stop % size:
            raise ValueError(f"{name}: rows {rows.start} to {rows.stop} are not whole heads of {size}")
        heads = np.arange(rows.start // size, rows.stop // size) // copies
        own = self._read_stored(name, range(heads[0] * size, (heads[-1] + 1) * size), columns)
        return own[((heads - heads[0])[:, None] * size + np.arange(size)).ravel()]

    def _read_stored(self, name: str, rows: range, columns: range | None) -> Tensor:
        tensor, info = self._checkpoint.read(name), self._checkpoint.tensors[name]
        order = self._order(name)
        step = 1 if order is None else len(order)
        if rows.start % step or rows.stop % step:
            raise ValueError(f"{name}: rows {rows.start} to {rows.stop} are not whole heads of {step}")
        fraction = len(rows) / info.shape[0]
        if len(rows) < info.shape[0]:
            tensor = tensor[rows.start : rows.stop]
        if columns is not None and len(columns) < info.shape[1]:
            own = None if isinstance(tensor, np.ndarray) else tensor.columns(columns, info.shape[1])
            if own is not None or isinstance(tensor, np.ndarray):
                fraction *= len(columns) / info.shape[1]
            tensor = as_floats(tensor)[:, columns.start : columns.stop] if own is None else own
        if order is not None:
            tensor = tensor[(np.arange(0, len(rows), step)[:, None] + order).ravel()]
        if isinstance(tensor, QuantArray) and _has_nan(tensor.values):
            raise CheckpointError(f"{info.file}: tensor {shown(name)}: expected numbers, found NaN")
        self._on_read(round(info.num_stored_bytes * fraction))
        return tensor


def _has_nan(values: np.ndarray) -> bool:
    """Return True if values in e4m3 have NaN, whose bits some kernels multiply as those of 480."""
    if values.dtype != ml_dtypes.float8_e4m3fn:
        return False
    bits = values.view(np.uint8)
    return bool(bits.max(initial=0) == _NEGATIVE_NAN or bits.view(np.int8).max(initial=0) == _POSITIVE_NAN)


def _of_columns(scales: np.ndarray, first: np.ndarray, columns: range) -> np.ndarray:
    """Return the scales of some columns of a matrix: `[..., groups, out]`, of groups that these columns do not cut. Scales of
    whole rows `[..., out]` are those of all columns. first: the matrix."""
    if scales.ndim < first.ndim:
        return scales
    size = first.shape[-1] // scales.shape[-2]
    return np.ascontiguousarray(scales[..., columns.start // size : columns.stop // size, :])


def kv_copies(name: str, config: DecoderConfig | EncoderConfig) -> int:
    """Return the copies of each of a tensor's heads that the model has."""
    if not isinstance(config, DecoderConfig) or name.startswith(VISION) or any(mixer in name for mixer in _MIXERS):
        return 1
    copied = (*_OF_KV_HEADS, "k_norm") if config.qk_norm in ("whole", "each_head") else _OF_KV_HEADS
    return _kv_heads(name, config)[1] if _module(name).endswith(copied) or is_kv_scale(name) else 1


def _kv_heads(name: str, config: DecoderConfig) -> tuple[int, int]:
    """Return the KV heads that the checkpoint has in a tensor's layer, and the copies of each."""
    found = _LAYER.match(name)
    layer = None if found is None else config.layers[int(found[1])]
    if layer is None or layer.num_kv_heads is None:
        return config.num_stored_kv_heads, config.kv_copies
    return layer.num_kv_heads // layer.kv_copies, layer.kv_copies


def _is_rotated(name: str) -> bool:
    return (
        _module(name).endswith(_ROTATED) and not name.startswith(VISION) and not any(mixer in name for mixer in _MIXERS)
    )


def _module(name: str) -> str:
    """Return the module that a tensor belongs to; an adapter's is that of the matrix it changes."""
    return name.rpartition(".")[0].removesuffix(_ADDED)
