"""Order of the rows of a matrix that holds queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

Rows = slice | np.ndarray
"""Rows of a tensor: from a first one on, or by their numbers."""
QKV: Final = "qkv_proj"
"""Our name of the module."""


@dataclass(frozen=True, slots=True)
class QKVRows:
    """Groups of rows, each with an equal share of the queries, keys and values."""

    groups: Literal["kv_heads"] | int = 1
    """Number of groups; kv_heads: one for each KV head (GPT-NeoX, Falcon)."""
    order: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The parts of a group."""

    def parts(self, queries: int, kv_rows: int, num_kv_heads: int) -> Mapping[str, Rows]:
        """Return the rows of each part. queries, kv_rows: rows of all queries, and of all keys."""
        groups = num_kv_heads if self.groups == "kv_heads" else self.groups
        counts = {"q_proj": queries, "k_proj": kv_rows, "v_proj": kv_rows}
        if groups < 1 or any(count % groups for count in counts.values()):
            groups = 1
        shares = [counts[name] // groups for name in self.order]
        ends = np.cumsum(shares)
        starts = (ends - shares).tolist()
        if groups == 1:
            return {name: slice(start, int(end)) for name, start, end in zip(self.order, starts, ends, strict=True)}
        numbers = np.arange(groups * int(ends[-1])).reshape(groups, -1)
        return {name: numbers[:, start:end].ravel() for name, start, end in zip(self.order, starts, ends, strict=True)}


def num_rows(parts: Mapping[str, Rows]) -> int:
    """Return the rows of all parts."""
    return sum(rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows in parts.values())
