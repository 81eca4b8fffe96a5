"""Counts of function calls: the cost of a piece of code in units that neither the processor nor other load changes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any


class CallCounts(Counter[str]):
    """Calls that this thread made inside `with` blocks, by qualified name; Python's functions and C's alike.

    Garbage is not collected meanwhile: its finalizers would be counted, too.
    """

    def __enter__(self) -> CallCounts:
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self.subtract(["setprofile"])  # the call that ended the counting

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            self[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self[function.__qualname__] += 1
