"""The largest step: the tokens and rows that a step may have now. Smaller after the device ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.scheduler.plan import Buckets, Plan


@dataclass(slots=True)
class StepLimits:
    """Limits that all parts of a scheduler share."""

    max_tokens: int
    max_rows: int
    """Never more than `max_tokens`: every running request gets a token in each step."""
    _full: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._full = (self.max_tokens, self.max_rows)

    def shrink(self, buckets: Buckets, plan: Plan) -> bool:
        """Allow only programs smaller than that of `plan`. Return False if no limit changes: no program is smaller, or the plan
        exceeded its limit already, for an image whose tokens stay together."""
        before = self.max_tokens, self.max_rows
        has_single_tokens = plan.kind in ("decode", "speculate")
        sizes = buckets.decode if has_single_tokens else buckets.mixed
        smaller = max((size for size in sizes if size < plan.bucket), default=0)
        if not smaller:
            return False
        if not has_single_tokens:
            self.max_tokens = min(self.max_tokens, smaller)
        self.max_rows = min(self.max_rows, smaller)
        return (self.max_tokens, self.max_rows) != before

    def restore(self) -> None:
        """Allow all programs again."""
        self.max_tokens, self.max_rows = self._full
