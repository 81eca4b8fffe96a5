"""Block sizes of the kernel per kind of device, kept as data in `tuning/<device>.json`.

Sizes of tiles depend on the width of a vector and on the bytes of a number in the pool: "576/2" is bfloat16 with 576.
"""

from __future__ import annotations

from typing import Any

from jaxserve_kernels import tuned_sizes
from jaxserve_kernels.paged_attention.tuning import DecodeTuning


def decode_tuning(device: str, width: int, itemsize: int) -> DecodeTuning:
    """Return the sizes for a width and a number of bytes. Raises KeyError for a combination that has no kernel."""
    sizes = dict(load(device))
    tiles: dict[str, int] = sizes.pop("tiles")[f"{width}/{itemsize}"]
    return DecodeTuning(**sizes, **tiles)


def load(device: str) -> dict[str, Any]:
    """Return the sizes that are known for a device. Raises FileNotFoundError."""
    return tuned_sizes.load(__package__, device)
