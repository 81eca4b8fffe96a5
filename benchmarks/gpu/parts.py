"""The parts of a run, in order, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A module with `run(context)`, in a process of its own."""

    name: str
    budget_s: float
    """Seconds; what the parts before it did not use comes on top."""
    title: str
    is_check: bool = False
    """True if the run fails when this part fails."""
    is_default: bool = True
    """True if the part runs by default."""

    @property
    def module(self) -> str:
        return f"benchmarks.gpu.{self.name}"


PARTS = (
    Part("machine", 35, "versions, and the bounds of the device"),
    Part("kernels", 60, "every op against numpy in float64", is_check=True),
    Part("models", 50, "tiny models: against the CPU, and alone against in a batch", is_check=True),
    Part("attention", 60, "attention and KV writes alone"),
    Part("products", 40, "products of few tokens"),
    Part("engine", 120, "steps of a random Llama-3.1-8B, bfloat16"),
    Part("int8", 40, "the same with smaller weights: fp8, int4 and int8"),
    Part("server", 80, "start-up and HTTP, random Llama-3.2-1B shape"),
    Part("peers", 50, "torch and transformers on the same device"),
    Part("profile", 240, "where the time of a step goes", is_default=False),
    Part("tune", 240, "block sizes of our attention kernels", is_default=False),
    Part("tune_products", 240, "where our kernel for products is faster", is_default=False),
)
"""Parts of the check; those that run by default take less than nine minutes together."""


def total_budget_s() -> float:
    return sum(part.budget_s for part in PARTS if part.is_default)
