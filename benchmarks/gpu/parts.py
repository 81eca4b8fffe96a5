"""The parts of a run, in order, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A module with `run(context)`, in a process of its own."""

    name: str
    budget_s: float
    """Seconds; what the parts before it did not use comes on top."""
    is_check: bool
    """Whether the run fails when this part does."""
    title: str

    @property
    def module(self) -> str:
        return f"benchmarks.gpu.{self.name}"


PARTS = (
    Part("machine", 35, False, "versions, and the bounds of the device"),
    Part("kernels", 60, True, "every op against numpy in float64"),
    Part("models", 55, True, "tiny models: against the CPU, and alone against in a batch"),
    Part("attention", 60, False, "attention, KV writes and products alone"),
    Part("engine", 130, False, "steps of a random Llama-3.1-8B, bfloat16"),
    Part("int8", 40, False, "the same with int8 weights"),
    Part("server", 95, False, "start-up and HTTP, random Llama-3.2-1B shape"),
    Part("peers", 55, False, "torch and transformers on the same device"),
)
"""Together less than nine minutes."""


def total_budget_s() -> float:
    return sum(part.budget_s for part in PARTS)
