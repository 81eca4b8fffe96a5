"""Tests the kernels of this host's devices: `python -m jaxserve.executor.self_test.process`, started by `check`.

stdin     one SelfTestSpec
stdout    one line per SelfTestReport: there is nothing to test; or everything except the kernels works, then a verdict
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Literal

import msgspec

from jaxserve.config import Config
from jaxserve.executor.device import first_device
from jaxserve.executor.self_test.comparison import compare
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.parent import die_with_parent
from jaxserve.runner.backend import chip_of

_MAX_ERROR = 300
"""Characters."""


class SelfTestSpec(msgspec.Struct, frozen=True):
    """The engine whose kernels are tested."""

    config: Config
    decoder: DecoderConfig


class SelfTestReport(msgspec.Struct, frozen=True):
    """Progress or outcome of a self-test."""

    kind: Literal["nothing", "reference", "verdict"]
    """nothing: there is no kernel to test; reference: everything except the kernels works; verdict: the outcome."""
    device: str
    error: str | None = None
    difference: float | None = None
    """See `comparison.Difference.largest`."""


def run_test(spec: SelfTestSpec, report: Callable[[SelfTestReport], None]) -> None:
    """Compare, and report each stage. Raises errors that come before the first call of a kernel."""
    device = first_device(spec.config.parallel.num_devices)
    name = device.device_kind
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        report(SelfTestReport("reference", name))

    try:
        found = compare(spec.config, spec.decoder, chip_of(device), begin)
    except Exception as error:
        if not has_begun:
            raise
        line = next(iter(str(error).splitlines()), "no details")
        report(SelfTestReport("verdict", name, f"{type(error).__name__}: {line}"[:_MAX_ERROR]))
        return
    if found is None:
        report(SelfTestReport("nothing", name))
    else:
        report(SelfTestReport("verdict", name, found.error, found.largest))


def main() -> int:
    """Read a spec, test, report."""
    die_with_parent()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=SelfTestSpec)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # compilers print to stdout

        def report(line: SelfTestReport) -> None:
            answers.write(msgspec.json.encode(line) + b"\n")
            answers.flush()

        run_test(spec, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
