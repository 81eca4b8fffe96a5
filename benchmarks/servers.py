"""Servers in processes of their own, for benchmarks; `python -m benchmarks.servers CONFIG FAKE [PROFILE]` has a fake engine."""

from __future__ import annotations

import contextlib
import cProfile
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from jaxserve.config import Config
from jaxserve.ipc.engine_spec import FakeOptions
from jaxserve.runtime.server import run_serve

TOKENIZER: Final = Path(__file__).parents[1] / "tests" / "fixtures" / "tokenizers" / "byte_level"
_STOP_TIMEOUT_S: Final = 120


@contextlib.contextmanager
def served(*words: str) -> Iterator[tuple[int, int]]:
    """Run `jaxserve serve` with these words on a free port for the block; yields the port and the process id."""
    flags = ("--port", "0", "--log-level", "warning")
    with _started("jaxserve.cli.main", "serve", *words, *flags) as found:
        yield found


@contextlib.contextmanager
def served_fake(config: Config, fake: FakeOptions, profile: str | None = None) -> Iterator[tuple[int, int]]:
    """Run a server with a fake engine on a free port for the block; yields the port and the process id.

    profile: file for a cProfile of the API process.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as sockets:
        server = replace(config.server, port=0, uds_dir=sockets, log_level="warning")
        parts = (replace(config, server=server), fake)
        words = [msgspec.json.encode(part).decode() for part in parts]
        with _started("benchmarks.servers", *words, *filter(None, [profile])) as found:
            yield found


@contextlib.contextmanager
def _started(module: str, *words: str) -> Iterator[tuple[int, int]]:
    """Run a module for the block; yields the port that it announces, and its process id."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None, "stdout is a pipe"
            ready = re.search(r"is ready at https?://[^ ]*:(\d+) ", process.stdout.readline())
            if ready is None:
                raise SystemExit("the server did not start")
            yield int(ready[1]), process.pid
        finally:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)


def main(config: str, fake: str, profile: str | None = None) -> int:
    """Be the server with a fake engine."""
    with contextlib.ExitStack() as stack:
        if profile is not None:
            profiler = stack.enter_context(cProfile.Profile())
            stack.callback(profiler.dump_stats, profile)
        settings, options = msgspec.json.decode(config, type=Config), msgspec.json.decode(fake, type=FakeOptions)
        return run_serve(settings, executor="fake", fake=options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
