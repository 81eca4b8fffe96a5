"""The plan: everything known before a server starts, as data. `to_json` of it is a public format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from jaxserve.tools.planning.advice import Advice
from jaxserve.tools.planning.devices import Rates
from jaxserve.tools.planning.roofline import DecodeBound, PrefillBound

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What the checkpoint describes."""

    path: str
    num_parameters: int
    num_layers: int
    max_position: int
    stored_bytes: int | None
    stored_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DevicePart:
    """One device, of `count`."""

    name: str
    title: str
    count: int
    memory_bytes: int
    limit_bytes: int
    """What the runtime hands out of it."""
    rates: Rates | None


@dataclass(frozen=True, slots=True)
class CachePart:
    """Keys and values, over all devices."""

    dtype: str
    bytes_per_token: int
    bytes_per_block: int
    block_size: int
    num_blocks: int
    num_tokens: int
    """That fit: without the null page."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One memory: of one device, or of the whole CPU."""

    limit_bytes: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    """Beyond weights and KV as they are counted here: temporaries, code, inputs, the slots of
    running requests, and padding of the layout."""
    workspace_is: Literal["compiled", "estimated"]
    free_bytes: int
    """Negative where it does not fit."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one step may hold, and the shapes that are compiled."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """What the compiler says one program needs on one device, in bytes; `job.ProgramMemory` with its sum."""

    name: str
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temp_bytes: int
    code_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests of one length that run at the same time."""

    length: int
    num_requests: int
    limited_by: Literal["kv", "max_num_seqs"]


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it. Parts that have no meaning where the engine does not fit are None or empty."""

    format_version: int
    model: ModelPart
    device: DevicePart
    weights_stored_as: str
    """A dtype, or the name of a quantisation."""
    arithmetic: str
    """Dtype that matmuls multiply in."""
    weights_bytes: int
    """On one device."""
    kv_bytes_per_token: int
    """Over all devices."""
    fits: bool
    reason: str | None
    """Why it does not fit."""
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    memory: MemoryPart | None = None
    cache: CachePart | None = None
    step: StepPart | None = None
    concurrency: tuple[Concurrency, ...] = ()
    programs: tuple[ProgramPart, ...] = ()
    decode: tuple[DecodeBound, ...] = ()
    prefill: tuple[PrefillBound, ...] = ()


def to_json(plan: Plan) -> bytes:
    """Indented JSON; fields are added, never renamed, under one `format_version`."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"
