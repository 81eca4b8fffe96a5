"""The specification that an engine process gets at its start: one line of JSON on its stdin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Self

import msgspec

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.ipc.report import PhaseSpan

MAX_SPEC_BYTES: Final = 1 << 20
BEAT: Final = b"."
"""Sign of life of a host's worker process."""
SERVING_BEAT: Final = b"s"
"""The sign of life with which it begins to serve."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a fake engine emits after the last cue: after `cue a b c` the script `a b c d` gives `d`."""

    cue: int
    token_ids: tuple[int, ...]

    def next_token(self, past: Sequence[int]) -> int | None:
        """Return the script's token after `past`; None without a cue in `past`, or after the script's end."""
        distance = next((i for i, token in enumerate(reversed(past)) if token == self.cue), len(self.token_ids))
        return self.token_ids[distance] if distance < len(self.token_ids) else None


class FakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of the fake executor, which needs no model (tests)."""

    vocab_size: int = 997
    num_blocks: int = 512
    max_model_len: int = 2048
    eos_token_ids: tuple[int, ...] = (2,)
    device_seconds: float = 0.0
    """Duration of one step; a multi-step decode takes as long for each of its steps."""
    max_decode_steps: int = 1
    """Decode steps that one call may run."""
    fail_at_steps: tuple[int, ...] = ()
    """Steps that raise, counted from 0."""
    script: Script | None = None
    """Tokens to emit instead of the computed ones."""
    embedding_size: int = 8
    """Components of a vector, for the task `embed`."""
    start_error: str | None = None
    """Text of the error with which the start fails."""
    hangs_at_start: bool = False
    """True: the start never ends."""


class _Spec(msgspec.Struct, frozen=True, kw_only=True):
    config: Config
    model_path: str
    """File or directory that exists on the host of the process."""

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Decode the specification in a line. Raises ConfigError."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"a process of the engine got no valid specification on stdin: {error}") from error


class EngineSpec(_Spec, frozen=True, kw_only=True):
    """All that an engine process needs to start."""

    address: str
    """Address to listen on, from `ipc.address.new_address`."""
    executor: Literal["local", "fake"] = "local"
    fake: FakeOptions = FakeOptions()
    publishes_pages: bool = False
    """True if the engine reports which pages its prefix cache holds (`PagesChanged`)."""
    phases: list[PhaseSpan] = []
    """Phases of the start before the engine process, for its report."""


class HostWorkerSpec(_Spec, frozen=True, kw_only=True):
    """All that the worker process of a host other than host 0 needs to start."""

    host_id: str
    """Equal for this worker and those that are started after it, and different on every host."""
    beat_descriptor: int
    """File to write `BEAT` to at every sign of life, and `SERVING_BEAT` once."""
