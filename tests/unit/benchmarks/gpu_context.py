"""The orders of one part of the GPU check, on a CPU and with tiny sizes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Recorder


def make_context(folder: Path, left_s: float = 600.0, **changes: Any) -> Context:
    """Return orders with `folder` for every file, and `left_s` of time; `changes`: other fields."""
    fields: dict[str, Any] = {
        "platform": "cpu",
        "is_quick": True,
        "seed": 0,
        "bounds": None,
        "attention_backend": "auto",
        "recorder": Recorder(folder / "records", time.monotonic() + left_s),
    }
    return Context(folder=folder, results=folder, **fields | changes)
