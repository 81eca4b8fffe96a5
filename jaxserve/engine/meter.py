"""Counts the calls of programs."""

from __future__ import annotations

from jaxserve.ipc.stats import EngineStats
from jaxserve.scheduler.base import Plan, Result


def count_call(stats: EngineStats, plan: Plan, result: Result, host_gap_seconds: float | None) -> None:
    """Count a call that is done, of one or several decode steps.

    host_gap_seconds: the longest time that the device can have waited for the plan; None if it had no work before.
    """
    program, num_steps = f"{plan.kind}/{plan.bucket}", result.num_steps
    stats.program_calls += 1
    stats.bucket_steps[program] = stats.bucket_steps.get(program, 0) + num_steps
    padding = stats.padding_tokens.get(plan.kind, 0)
    stats.padding_tokens[plan.kind] = padding + num_steps * plan.num_padding_tokens
    stats.iteration_tokens_total += [plan.num_tokens] * num_steps
    stats.device_step_seconds += [result.device_seconds / num_steps] * num_steps
    if host_gap_seconds is not None:
        stats.host_gap_seconds.append(host_gap_seconds)
