"""What the engine measures of its steps between two `EngineStats`."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from jaxserve.engine.protocol import Plan, Result
from jaxserve.ipc.messages import EngineStats


@dataclass(slots=True)
class StepMeter:
    """Increments; replaced by a fresh one when they are reported."""

    num_steps: int = 0
    num_calls: int = 0
    bucket_steps: dict[str, int] = field(default_factory=dict)
    padding_tokens: dict[str, int] = field(default_factory=dict)
    step_tokens: list[int] = field(default_factory=list)
    device_step_seconds: list[float] = field(default_factory=list)
    host_gap_seconds: list[float] = field(default_factory=list)

    def record(self, plan: Plan, result: Result, host_gap_seconds: float | None) -> None:
        """A call is done, of one step or of a burst of them.

        host_gap_seconds: how long the device waited for its plan at most, if it had work before.
        """
        program, num_steps = f"{plan.kind}/{plan.bucket}", result.num_steps
        self.num_calls += 1
        self.num_steps += num_steps
        self.bucket_steps[program] = self.bucket_steps.get(program, 0) + num_steps
        padding = self.padding_tokens.get(plan.kind, 0)
        self.padding_tokens[plan.kind] = padding + num_steps * plan.num_padding_tokens
        self.step_tokens += [plan.num_tokens] * num_steps
        self.device_step_seconds += [result.device_seconds / num_steps] * num_steps
        if host_gap_seconds is not None:
            self.host_gap_seconds.append(host_gap_seconds)

    def add_to(self, stats: EngineStats, compilations: dict[str, int]) -> EngineStats:
        """`stats` of the scheduler, completed."""
        return msgspec.structs.replace(
            stats,
            num_steps=self.num_steps,
            num_calls=self.num_calls,
            bucket_steps=self.bucket_steps,
            padding_tokens=self.padding_tokens,
            step_tokens=self.step_tokens,
            device_step_seconds=self.device_step_seconds,
            host_gap_seconds=self.host_gap_seconds,
            compilations=compilations,
        )
