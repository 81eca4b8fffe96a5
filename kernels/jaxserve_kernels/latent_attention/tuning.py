"""Block sizes of the kernel per kind of device, kept as data in `tuning/<device>.json`.

Sizes of tiles depend on the width of a vector and on the bytes of a number in the pool: "576/2" is bfloat16 with 576.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from jaxserve_kernels.paged_attention.tuning import DecodeTuning


def decode_tuning(device: str, width: int, itemsize: int) -> DecodeTuning:
    """Return the sizes for a width and a number of bytes. Raises KeyError for a combination that has no kernel."""
    sizes = dict(load(device))
    tiles: dict[str, int] = sizes.pop("tiles")[f"{width}/{itemsize}"]
    return DecodeTuning(**sizes, **tiles)


@functools.cache
def load(device: str) -> dict[str, Any]:
    """Return the sizes that are known for a device: the content of its file. Raises FileNotFoundError."""
    text = (resources.files(__package__) / "tuning" / f"{device}.json").read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    return known
