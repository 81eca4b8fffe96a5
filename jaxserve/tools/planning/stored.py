"""The bytes of a checkpoint's tensors, from its headers."""

from __future__ import annotations

from collections import Counter

from jaxserve.checkpoint.protocol import Checkpoint


def bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the stored bytes of each type, the one with most bytes first."""
    found: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        found[info.stored_dtype] += info.num_stored_bytes
    return dict(found.most_common())
