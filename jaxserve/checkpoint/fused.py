"""Split QKV and gate-up matrices that a checkpoint stores fused (Phi-3) into one tensor each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.quant.tensor import Tensor


@dataclass(frozen=True, slots=True)
class SplitCheckpoint(CheckpointView):
    """A checkpoint with tensors that are rows of stored ones."""

    rows: Mapping[str, tuple[str, slice]]
    """Stored tensor and rows of each such tensor."""

    def read(self, name: str) -> Tensor:
        if name not in self.rows:
            return self.inner.read(name)
        whole, rows = self.rows[name]
        return self.inner.read(whole)[rows]


def split_fused(checkpoint: Checkpoint) -> Checkpoint:
    """Replace fused QKV and gate-up matrices by their parts.

    Matrices whose sizes are not those of the config stay as they are: the loader then names what is missing.
    """
    tensors, rows = dict(checkpoint.tensors), {}
    for fused, parts in _parts(checkpoint.config).items():
        for name in [name for name in tensors if f".{fused}." in name]:
            info, ends = tensors[name], list(itertools.accumulate(parts.values(), initial=0))
            if info.shape[:1] != (ends[-1],):
                continue
            del tensors[name]
            for part, (start, end) in zip(parts, itertools.pairwise(ends), strict=True):
                own = name.replace(f".{fused}.", f".{part}.")
                size = info.num_stored_bytes * (end - start) // ends[-1]
                tensors[own] = replace(info, name=own, shape=(end - start, *info.shape[1:]), num_stored_bytes=size)
                rows[own] = (name, slice(start, end))
    return SplitCheckpoint(checkpoint, tensors, rows) if rows else checkpoint


def _parts(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the rows of each part, by fused module."""
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
