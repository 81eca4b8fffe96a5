"""Checks that end as kernels on a device may: right, wrong, raising, with a device that is lost, dead, or never."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from benchmarks.gpu import crew, device
from benchmarks.gpu.context import Context


def checks(context: Context) -> Mapping[str, crew.Check]:
    return {
        "first": _well,
        "raises": _raises,
        "after an error": _well,
        "loses the device": _loses_the_device,
        "after a lost device": _well,
        "dies": _dies,
        "hangs": _hangs,
        "last": _well,
    }


def _well(bench: crew.Bench) -> None:
    bench.recorder.check(f"{bench.seed} in {os.getpid()}", passed=True)


def _raises(bench: crew.Bench) -> None:
    raise ValueError("it was refused")


def _loses_the_device(bench: crew.Bench) -> None:
    device.is_well = lambda: False
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def _dies(bench: crew.Bench) -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def _hangs(bench: crew.Bench) -> None:
    bench.tell("runs")
    threading.Event().wait()
