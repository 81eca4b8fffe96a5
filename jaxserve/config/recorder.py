"""Settings of the flight recorder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxserve.config.option import option

DEFAULT_FLIGHT_DIRECTORY: Final = "~/.cache/jaxserve/flight"
"""The directory of flight records that no setting and no variable names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecorderConfig:
    """The flight recorder: the scheduler's last decisions, for `jaxserve replay`."""

    flight_recorder_steps: int = option(
        512,
        ge=0,
        le=1 << 20,
        help="steps whose scheduling decisions are kept in memory at least, without texts and tokens; 0: none",
    )
    flight_recorder_dir: str | None = option(
        None,
        unit="path",
        help="directory for the records of engines that crash, and of /dump_flight_record; the last 8 stay (default: "
        "jaxserve/flight in $XDG_CACHE_HOME or ~/.cache)",
    )
