"""Numbers of tokens of prompts and outputs: fixed, or drawn from a log-normal distribution."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed number of tokens."""

    num_tokens: int

    def draw(self, chance: random.Random) -> int:
        del chance
        return self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal:
    """A log-normal number of tokens; values outside the limits are drawn again."""

    median: float
    """Median without the limits."""
    sigma: float
    """Standard deviation of the logarithm."""
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        while True:
            value = round(chance.lognormvariate(math.log(self.median), self.sigma))
            if self.least <= value <= self.most:
                return value


Length = Fixed | LogNormal
