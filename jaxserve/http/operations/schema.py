"""Replies to those who run the server: health, readiness, start, version."""

from __future__ import annotations

import msgspec


class Healthy(msgspec.Struct, tag_field="status", tag="ok"):
    pass


class Unhealthy(msgspec.Struct, tag_field="status", tag="unhealthy"):
    reason: str


class Ready(msgspec.Struct, tag_field="status", tag="ready"):
    pass


class Draining(msgspec.Struct, tag_field="status", tag="draining"):
    """Requests under way are answered, new ones are refused."""


class Loading(msgspec.Struct, tag_field="status", tag="loading"):
    phase: str
    """Of the phases that overlap, the one that will take longest."""
    done: int
    """Units of the phase that are done, of `total`."""
    total: int
    eta_seconds: float | None
    """At the pace so far; null before the first unit is done."""


class StartupPhase(msgspec.Struct):
    phase: str
    start_seconds: float
    """Since the first phase began."""
    end_seconds: float
    seconds: float


class StartupProgram(msgspec.Struct):
    name: str
    source: str
    """`compiled` or `cache`."""
    seconds: float
    """Several programs are made at the same time."""


class Started(msgspec.Struct, tag_field="status", tag="started"):
    """What the start took, once it is over."""

    start: str
    """cold: every program was compiled; warm: every one came from the cache; else partly warm."""
    total_seconds: float
    """Less than the sum of the phases, which overlap."""
    phases: list[StartupPhase]
    programs: list[StartupProgram]


class VersionReply(msgspec.Struct):
    version: str


class Obeyed(msgspec.Struct, tag_field="status", tag="done"):
    """The engine has done it."""
