"""Messages between the planner and its compiling process: one line of JSON each."""

from __future__ import annotations

import msgspec

from jaxserve.config import Config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.inputs import Program
from jaxserve.tools.planning.devices import Device


class CompileJob(msgspec.Struct, frozen=True):
    """Programs to compile for an engine that is not started."""

    config: Config
    device: Device
    decoder: DecoderConfig
    kv_dtype: str
    pool_shape: tuple[int, ...]
    programs: tuple[Program, ...]


class ProgramMemory(msgspec.Struct, frozen=True, tag=True):
    """Bytes that one program needs on one device, from the compiler."""

    name: str
    argument_bytes: int
    """Weights, KV pool and packed input in the device's layout."""
    output_bytes: int
    aliased_bytes: int
    """Part of the output that reuses the arguments' buffers: the KV pool."""
    temp_bytes: int
    code_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Memory that is in use while the program runs."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temp_bytes + self.code_bytes


class ProgramRefused(msgspec.Struct, frozen=True, tag=True):
    """A program that the compiler rejected, most often because memory ran out."""

    name: str
    reason: str
