"""The plan as data: all that is known before a server starts. The JSON of `to_json` is a public format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from jaxserve.tools.planning.advice import Advice
from jaxserve.tools.planning.collectives import Collective
from jaxserve.tools.planning.compiler import ProgramMemory
from jaxserve.tools.planning.devices import Rates
from jaxserve.tools.planning.roofline import DecodeBound, PrefillBound

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The model of the checkpoint."""

    path: str
    num_parameters: int
    num_layers: int
    max_position: int
    stored_bytes: int | None
    stored_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DevicePart:
    """One of `count` devices."""

    name: str
    title: str
    count: int
    memory_bytes: int
    limit_bytes: int
    """Part of `memory_bytes` that the runtime allocates from."""
    rates: Rates | None
    num_hosts: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class CachePart:
    """The KV cache, over all devices."""

    dtype: str
    bytes_per_token: int
    bytes_per_block: int
    block_size: int
    num_blocks: int
    num_tokens: int
    """Tokens that fit, without the null page."""
    windows: tuple[tuple[int, int], ...] = ()
    """Tokens and pages of each sliding window whose layers keep only the window's pages."""
    num_state_slots: int = 0
    """Slots of recurrent states, with the zero slot."""
    state_slot_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One memory: of one device, or of the whole CPU."""

    limit_bytes: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    """Memory beyond weights, KV and embeddings of images: temporaries, code, inputs, slots of running requests, padding of the layout."""
    workspace_is: Literal["compiled", "estimated"]
    free_bytes: int
    """Bytes left; negative if the engine does not fit."""
    image_bytes: int = 0
    """Embeddings of images; 0 for a model that is served for texts."""
    draft_bytes: int = 0
    """Weights of the draft model or the MTP layer; 0 without one. `kv_bytes` are those of both."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Limits of one step, and the compiled shapes."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests of one length that run at the same time."""

    length: int
    num_requests: int
    limited_by: Literal["kv", "max_num_seqs"]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The collectives of one step, counted from shapes."""

    step: str
    collectives: tuple[Collective, ...]
    seconds: float
    """Bytes sent, over the published bandwidth of the links they pass: a lower bound, without latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan. Parts that exist only for an engine that fits are None or empty."""

    format_version: int = FORMAT_VERSION
    task: Literal["generate", "embed"] = "generate"
    """embed: one vector per text; without a cache, concurrency and speeds."""
    model: ModelPart
    device: DevicePart
    weights_stored_as: str
    """A dtype, or the name of a quantisation."""
    arithmetic: str
    """Dtype of the matmuls."""
    weights_bytes: int
    """Bytes on one device."""
    kv_bytes_per_token: int
    """Bytes over all devices."""
    fits: bool = False
    reason: str | None = None
    """Reason why the engine does not fit; None if it does."""
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...]
    memory: MemoryPart | None = None
    cache: CachePart | None = None
    step: StepPart | None = None
    concurrency: tuple[Concurrency, ...] = ()
    programs: tuple[ProgramMemory, ...] = ()
    exchanges: tuple[Exchanges, ...] = ()
    """Largest decode step and largest mixed step; empty on one device."""
    decode: tuple[DecodeBound, ...] = ()
    prefill: tuple[PrefillBound, ...] = ()


def to_json(plan: object) -> bytes:
    """Return a plan, of one model or of a server, as indented JSON. Within one `format_version` fields are added, never renamed."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"
