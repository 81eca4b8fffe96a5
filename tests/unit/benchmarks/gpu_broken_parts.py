"""The parts of a GPU check, each with one attempt that fails: it raises, ends its process, or never ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Literal

from benchmarks.gpu import attention_programs, matmul_programs, shapes, timing
from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Recorder

Failure = Literal["raises", "ends", "hangs"]
FAILURES: dict[str, tuple[str, Failure]] = {
    "machine": ("copy", "raises"),
    "kernels": ("", "ends"),
    "models": ("llama", "ends"),
    "attention": ("decode 2 x 64", "hangs"),
    "matmuls": ("attention output, 1 tokens, float32", "raises"),
    "engine": ("mixed, 1 decode", "raises"),
    "int8": ("int4-weight-only", "raises"),
    "server": ("cold start", "raises"),
    "graphs": ("steps, second", "raises"),
    "references": ("XLA, prefill 64", "raises"),
    "peers": ("", "raises"),
}
"""By part: the attempt, empty for the part as a whole, and how it fails."""
CODE = 3


class BrokenRecorder(Recorder):
    """Its failing attempt fails."""

    failing: tuple[str, Failure]

    def attempt(self, name: str, work: Callable[[], None]) -> bool:
        broken = name == self.failing[0]
        return super().attempt(name, (lambda: _fail(self.failing[1])) if broken else work)


def run(context: Context) -> None:
    part = context.folder.name
    name, failure = FAILURES[part]
    if not name:
        _fail(failure)
    _make_small()
    recorder = context.recorder
    recorder.__class__ = BrokenRecorder
    recorder.failing = FAILURES[part]  # type: ignore[attr-defined]
    import_module(f"benchmarks.gpu.{part}").run(context)


def _make_small() -> None:
    """Save most of a dummy run's time: one layer where all are alike, few repetitions, as few samples as there may be."""
    attention_programs.MOST_REPEATS = matmul_programs.MOST_REPEATS = 2
    timing.SAMPLE_S, timing.MAX_SAMPLES = 0.0, timing.MIN_SAMPLES
    num_layers = shapes.TINY["num_hidden_layers"]
    for shape in (shapes.TINY, *shapes.FAMILIES.values()):
        if shape["num_hidden_layers"] == num_layers:
            shape["num_hidden_layers"] = 1


def _fail(failure: Failure) -> None:
    match failure:
        case "raises":
            raise RuntimeError("injected")
        case "ends":
            os._exit(CODE)
        case "hangs":
            threading.Event().wait()
