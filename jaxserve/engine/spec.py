"""What an engine process is told at birth: one line of JSON on its stdin."""

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
    """Resolved: a file or directory that exists."""
    address: str
    """Where to listen, from `ipc.address.new_address`."""
    executor: Literal["local", "fake"] = "local"
    fake: FakeOptions = FakeOptions()
    phases: list[PhaseSpan] = []
    """What the start took before the engine: part of its report."""

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def parse_spec(line: bytes) -> EngineSpec:
    """The spec in a line; ConfigError when it is none."""
    try:
        return msgspec.json.decode(line, type=EngineSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the engine process got no valid specification on stdin: {error}") from error
