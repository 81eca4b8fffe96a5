"""Options of an engine for the results of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxserve.types import LogprobsMode


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """The log-probabilities that results have, and whether experts are among them."""

    logprobs_mode: LogprobsMode = "raw_logprobs"
    has_experts: bool = False
    """True: results have the experts that tokens chose."""


PLAIN_RESULTS: Final = ResultOptions()
