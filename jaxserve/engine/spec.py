"""The specification that an engine process reads at its start: one line of JSON on stdin."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.executor.fake import FakeOptions
from jaxserve.ipc.report import PhaseSpan

MAX_SPEC_BYTES: Final = 1 << 20


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs to start."""

    config: Config
    model_path: str
    """An existing file or directory."""
    address: str
    """The address to listen on, from `ipc.address.new_address`."""
    executor: Literal["local", "fake"] = "local"
    fake: FakeOptions = FakeOptions()
    phases: list[PhaseSpan] = []
    """Phases of the start before the engine process, for its report."""

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def parse_spec(line: bytes) -> EngineSpec:
    """Return the spec in a line. Raises ConfigError if it is invalid."""
    try:
        return msgspec.json.decode(line, type=EngineSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the engine process got no valid specification on stdin: {error}") from error
