"""Block sizes of kernels per kind of device, kept as data in `tuning/<device>.json` of an op's folder."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def load(package: str, device: str) -> dict[str, Any]:
    """Return the sizes that an op's package has for a device: the content of its file. Raises FileNotFoundError."""
    text = (resources.files(package) / "tuning" / f"{device}.json").read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    return known
