"""What the planner asks of its compiling process, and what comes back: one line of JSON each."""

from __future__ import annotations

import msgspec

from jaxserve.config import Config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.inputs import Program
from jaxserve.tools.planning.devices import Device


class CompileJob(msgspec.Struct, frozen=True):
    """Programs of one engine that is never started."""

    config: Config
    device: Device
    decoder: DecoderConfig
    kv_dtype: str
    pool_shape: tuple[int, ...]
    programs: tuple[Program, ...]


class ProgramMemory(msgspec.Struct, frozen=True, tag=True):
    """What the compiler says one program needs on one device, in bytes."""

    name: str
    argument_bytes: int
    """Weights, KV pool and packed input, as the device lays them out."""
    output_bytes: int
    aliased_bytes: int
    """Of the output, what lives in the arguments' buffers: the KV pool."""
    temp_bytes: int
    code_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All that is alive while it runs."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temp_bytes + self.code_bytes


class ProgramRefused(msgspec.Struct, frozen=True, tag=True):
    """The compiler would not: most often because memory ran out."""

    name: str
    reason: str
