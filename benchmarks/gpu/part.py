"""The process of one part: `python -m benchmarks.gpu.part ORDERS`, a line of JSON, started by `processes.py`."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.context import Bounds, Context
from benchmarks.gpu.records import DeviceLostError, Recorder, one_line

RESERVE_S = 5.0
"""Before the process is killed, in which it may end by itself."""
LAST_WORDS_S = 3.0


def main(words: Sequence[str]) -> int:
    orders = json.loads(words[0])
    faulthandler.dump_traceback_later(max(0.1, orders["seconds"] - LAST_WORDS_S))  # where it hangs, in the log
    recorder = Recorder(
        Path(orders["records"]),
        time.monotonic() + orders["seconds"] - RESERVE_S,
        settled=orders["settled"],
        is_device_well=_is_device_well,
    )
    bounds = orders["bounds"]
    context = Context(
        platform=orders["platform"],
        is_quick=orders["is_quick"],
        seed=orders["seed"],
        bounds=None if bounds is None else Bounds(**bounds),
        attention_backend=orders["attention_backend"],
        folder=Path(orders["folder"]),
        results=Path(orders["results"]),
        recorder=recorder,
        is_restarted=orders["is_restarted"],
    )
    try:
        import_module(orders["module"]).run(context)
    except DeviceLostError:  # it is recorded
        return 1
    except Exception as error:  # the boundary: whatever it was, the next part goes on
        traceback.print_exc()
        recorder.problem(orders["module"].rpartition(".")[2], one_line(error))
        return 1
    return 0


def _is_device_well() -> bool:
    from benchmarks.gpu.device import is_well  # imports jax

    return is_well()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads that still compile
