"""Runs `jaxserve convert` once for each point at which it is to be killed, each in a process of its own.

    python -m tests.engine.killed_conversions MODEL FOLDER POINT...

The process for POINT kills itself with SIGKILL at that point, converting to FOLDER/POINT. Processes are forked before jax has a
backend: importing all of it takes seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxserve.executor.convert as conversion
from jaxserve.cli.main import main

POINTS = ("copying", "arrays", "committing", "manifest", "renaming", "renamed")
"""While files are copied; before arrays are written; when they are, and Orbax renames them; before the manifest is written;
before the folder is renamed; and after it."""


def killing(function: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """Return `function`, which kills this process instead of a call for which `when` is true."""

    def checked(*args: Any, **options: Any) -> Any:
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    return checked


def arm(point: str, output: Path) -> None:
    """Have this process killed at `point`."""
    match point:
        case "copying":
            shutil.copyfile = killing(shutil.copyfile, lambda source, *_: Path(source).name == "tokenizer.json")
        case "arrays":
            conversion.save_arrays = killing(conversion.save_arrays, lambda *_: True)
        case "committing":
            for name in ("rename", "replace"):
                checked = killing(getattr(os, name), lambda source, *_: "orbax-checkpoint-tmp" in str(source))
                setattr(os, name, checked)
        case "manifest":
            Path.write_bytes = killing(Path.write_bytes, lambda path, *_: path.name == conversion.MANIFEST_FILE)  # type: ignore[method-assign]
        case "renaming":
            Path.rename = killing(Path.rename, lambda path, target: target == output)  # type: ignore[method-assign]
        case "renamed":
            conversion._sync = killing(conversion._sync, lambda path: path == output.parent)
        case _:
            raise ValueError(point)


if __name__ == "__main__":
    import orbax.checkpoint  # noqa: F401  # in the parent, for all of them

    model, folder, *points = sys.argv[1:]
    for point in points:
        output = Path(folder) / point
        child = os.fork()
        if child == 0:
            arm(point, output)
            os._exit(main(["convert", model, str(output), "--dtype", "float32", "--max-model-len", "128"]))
        _, status = os.waitpid(child, 0)
        print(point, os.waitstatus_to_exitcode(status), flush=True)
