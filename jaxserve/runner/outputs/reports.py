"""Tokens of loops over decode steps for a host that does not wait for their end: on one CPU device with native kernels."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve_kernels import native
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Bool, Int

from jaxserve.layers.policy import DtypePolicy
from jaxserve.runner.inputs import Program


def open_reports(programs: Iterable[Program], policy: DtypePolicy) -> native.Reports | None:
    """Return the reports of this process; None if its programs make none."""
    has_loops = any(program.max_steps > 1 for program in programs)
    return native.Reports() if has_loops and _reports(policy) else None


def reported(
    policy: DtypePolicy, tokens: Int[Array, "B"], step: Int[Array, ""], is_last: Bool[Array, ""]
) -> Int[Array, "B"]:
    """Return the tokens of a step, which are reported where programs of this policy report."""
    return native.report(tokens, step, is_last) if _reports(policy) else tokens


def _reports(policy: DtypePolicy) -> bool:
    return policy.backend in NATIVE and policy.mesh.num_devices == 1
