"""Replies to those who run the server: health, readiness, start, version."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Alive(msgspec.Struct, tag_field="status", tag="alive"):
    pass


class Healthy(msgspec.Struct, tag_field="status", tag="ok"):
    pass


class Unhealthy(msgspec.Struct, tag_field="status", tag="unhealthy"):
    reason: str
    model: Annotated[str | msgspec.UnsetType, Meta(description="Name of the model, if several are served.")] = (
        msgspec.UNSET
    )


class Ready(msgspec.Struct, tag_field="status", tag="ready"):
    pass


class Draining(msgspec.Struct, tag_field="status", tag="draining"):
    """Requests under way are answered, new ones are refused."""


class FlightRecords(msgspec.Struct, tag_field="status", tag="done"):
    files: Annotated[list[str], Meta(description="A file of each engine, on its host.")]


class Loading(msgspec.Struct, tag_field="status", tag="loading"):
    phase: Annotated[str, Meta(description="The longest of the running phases.")]
    done: Annotated[int, Meta(description="Units of the phase that are done, out of `total`.")]
    total: int
    eta_seconds: Annotated[
        float | None, Meta(description="Estimate from the pace so far; null before the first unit is done.")
    ]
    model: Annotated[str | msgspec.UnsetType, Meta(description="Name of the model, if several are served.")] = (
        msgspec.UNSET
    )


class Restarting(Loading, tag_field="status", tag="restarting"):
    """Another engine starts after the end of one that has served."""


class StartupPhase(msgspec.Struct):
    phase: str
    start_seconds: Annotated[float, Meta(description="Start of the phase, in seconds after the first phase began.")]
    end_seconds: float
    seconds: float


class StartupProgram(msgspec.Struct):
    name: str
    source: Annotated[
        str,
        Meta(
            description="`compiled`, `cache`, or after readiness `cache_later` (from the cache) or `later` (compiled)."
        ),
    ]
    seconds: Annotated[float, Meta(description="Wall time; several programs compile at the same time.")]


class Started(msgspec.Struct, tag_field="status", tag="started"):
    """The start-up report, once the start is over."""

    start: Annotated[
        str,
        Meta(
            description="`cold`: no program came from the cache. `warm`: every program came from the cache. Otherwise `partly warm`."
        ),
    ]
    total_seconds: Annotated[float, Meta(description="Wall time; phases overlap, so it is less than their sum.")]
    phases: list[StartupPhase]
    programs: list[StartupProgram]


class RoutingState(msgspec.Struct):
    """Load and cached pages, for a router that chooses among servers."""

    queued_tokens: Annotated[int, Meta(description="Prompt tokens of requests that have no output yet.")]
    num_sequences: Annotated[int, Meta(description="Sequences that run and wait.")]
    max_num_seqs: Annotated[int, Meta(description="Sequences that can run at the same time.")]
    block_size: Annotated[int, Meta(description="Tokens per page.")]
    pages: Annotated[
        str,
        Meta(
            description="Base64 of the first 8 bytes of the hash of each page in the prefix cache (--publish-pages). A hash is "
            "sha256 over the hash of the page before it and the page's tokens as little-endian int32."
        ),
    ]


class VersionReply(msgspec.Struct):
    version: str


class CommandResult(msgspec.Struct, tag_field="status", tag="done"):
    """The engine ran the command."""


class ControlResult(msgspec.Struct, tag_field="status", tag="done"):
    """The engine ran the command."""

    weight_version: Annotated[int, Meta(description="Number of updates of the weights since the engine's start.")]


class Paused(msgspec.Struct):
    is_paused: bool


class Sleeping(msgspec.Struct):
    is_sleeping: bool
