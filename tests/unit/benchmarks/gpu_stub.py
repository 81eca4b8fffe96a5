"""Parts of a GPU check that need no GPU; the seed selects their behaviour."""

from __future__ import annotations

import os
import threading
from functools import partial

from benchmarks.gpu.context import Context

FINE, WRONG, RAISES, HANGS, ENDS_ONCE, HANGS_ONCE = range(6)


def run(context: Context) -> None:
    if context.seed in (ENDS_ONCE, HANGS_ONCE):
        _attempts(context)
        return
    context.recorder.figure("bounds", bound="copy", rate=2.0)
    context.recorder.figure("bounds", bound="matmul", rate=3.0)
    context.recorder.figure(
        "given",
        left_s=context.recorder.left_s,
        copy=context.share_of_copy(4e9, 1.0),
        attention_backend=context.attention_backend,
    )
    context.recorder.check("sum", passed=context.seed != WRONG, error=0.5)
    if context.seed == RAISES:
        raise ValueError("two\nlines")
    if context.seed == HANGS:
        threading.Event().wait()


def _attempts(context: Context) -> None:
    """Three attempts, the second of which does not end well, and one that is announced only."""
    context.recorder.expect(["first", "second", "third", "never begun"])
    for name in ("first", "second", "third"):
        context.recorder.attempt(name, partial(_attempt, context, name))


def _attempt(context: Context, name: str) -> None:
    if name == "second":
        if context.seed == ENDS_ONCE:
            os._exit(3)
        threading.Event().wait()
    context.recorder.figure("made", attempt=name)
