"""Parts of a GPU check that need no GPU; the seed selects their behaviour."""

from __future__ import annotations

import threading

from benchmarks.gpu.context import Context

FINE, WRONG, RAISES, HANGS = range(4)


def run(context: Context) -> None:
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
