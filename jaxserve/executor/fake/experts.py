"""The experts that tokens of the fake model choose: they depend on all tokens up to their own, so that a wrong page shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.scheduler.plan import StepPlan

FAKE_EXPERTS = RoutedExpertsInfo(num_layers=3, num_per_token=2, num_experts=300)


def fake_experts(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the experts `[L, k]` of the last of these tokens, the first of a text."""
    values = np.asarray(tokens, np.int64)
    total = int(values @ np.arange(3, len(values) + 3))
    info = FAKE_EXPERTS
    return ((total + 7 * np.arange(np.prod(info.shape))) % info.num_experts).reshape(info.shape).astype(info.dtype)


class StepExperts:
    """The experts of one step's tokens; those that were not computed are out of range."""

    def __init__(self, plan: StepPlan, num_steps: int) -> None:
        shape = num_steps, plan.num_tokens, *FAKE_EXPERTS.shape
        self.array = np.full(shape, FAKE_EXPERTS.num_experts, FAKE_EXPERTS.dtype)
        self._starts = np.cumsum(plan.num_scheduled_tokens) - plan.num_scheduled_tokens

    def note(self, step: int, row: int, past: np.ndarray, count: int = 1) -> None:
        """Set the experts of a row's last `count` tokens, which `past` ends with."""
        for ahead in range(count):
            text = past[: len(past) - count + 1 + ahead]
            self.array[step, self._starts[row] + ahead] = fake_experts(text)
