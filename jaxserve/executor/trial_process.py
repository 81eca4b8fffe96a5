"""Tries the kernels of this host's devices: `python -m jaxserve.executor.trial_process`, started by `executor.trial`.

stdin     one TrialSpec
stdout    a line for each TrialNews: that there is nothing to try; or that all but the kernels works, and a verdict

A process of its own, because a kernel may also crash, or wait for ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Literal

import msgspec

from jaxserve.config import Config
from jaxserve.executor.preparation import first_device
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.parent import die_with_parent
from jaxserve.runner.backend import chip_of
from jaxserve.runner.trial import compare

_MAX_FAULT = 300


class TrialSpec(msgspec.Struct, frozen=True):
    """Whose kernels."""

    config: Config
    decoder: DecoderConfig


class TrialNews(msgspec.Struct, frozen=True):
    """How far a trial is."""

    kind: Literal["nothing", "reference", "verdict"]
    device: str
    fault: str | None = None
    difference: float | None = None


def try_kernels(spec: TrialSpec, tell: Callable[[TrialNews], None]) -> None:
    """What `compare` finds, as news. What goes wrong before the kernels are called is raised."""
    device = first_device(spec.config.parallel.tensor_parallel_size)
    name = device.device_kind
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        tell(TrialNews("reference", name))

    try:
        found = compare(spec.config, spec.decoder, chip_of(device), begin)
    except Exception as error:
        if not has_begun:
            raise
        line = next(iter(str(error).splitlines()), "no details")
        tell(TrialNews("verdict", name, f"{type(error).__name__}: {line}"[:_MAX_FAULT]))
        return
    tell(TrialNews("nothing", name) if found is None else TrialNews("verdict", name, found.fault, found.largest))


def main() -> int:
    """Read a spec, try, tell as it goes."""
    die_with_parent()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialSpec)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer

        def tell(news: TrialNews) -> None:
            answers.write(msgspec.json.encode(news) + b"\n")
            answers.flush()

        try_kernels(spec, tell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
