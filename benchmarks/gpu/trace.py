"""Reads a device's seconds by operation from the trace of a JAX profile."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """All calls of operations that differ by a number at the end of their names."""

    name: str
    num_calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Operations of one device, or of the threads that act as one."""

    operations: tuple[Operation, ...]
    """The longest first."""
    busy_s: float
    """With something under way."""
    span_s: float
    """From the first begin to the last end."""


def read_trace(folder: Path) -> DeviceTime | None:
    """Read the newest trace below `folder`; None if it has no operation."""
    file = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(file, "rt", encoding="utf-8") as text:
        return device_time(json.load(text)["traceEvents"])


def device_time(events: Iterable[Event]) -> DeviceTime | None:
    """Return the time of GPU streams, if the trace has them, else of all events that name an operation of a program."""
    events = list(events)
    names = {
        _place(each): each["args"]["name"] for each in events if each.get("name") in ("process_name", "thread_name")
    }
    spans = [each for each in events if each.get("ph") == "X"]
    of_device = [each for each in spans if _is_on_stream(each, names)]
    spans = of_device or [each for each in spans if "hlo_op" in each.get("args", {})]
    if not spans:
        return None
    seconds: dict[str, list[float]] = {}
    for each in spans:
        seconds.setdefault(re.sub(r"([._]\d+)+$", "", each["name"]), []).append(each["dur"] * 1e-6)
    found = (Operation(name, len(calls), sum(calls)) for name, calls in seconds.items())
    busy_us, span_us = _covered([(each["ts"], each["ts"] + each["dur"]) for each in spans])
    operations = tuple(sorted(found, key=lambda each: -each.seconds))
    return DeviceTime(operations, busy_us * 1e-6, span_us * 1e-6)


def _place(event: Event) -> tuple[int, int | None]:
    return event["pid"], None if event["name"] == "process_name" else event["tid"]


def _is_on_stream(event: Event, names: dict[tuple[int, int | None], str]) -> bool:
    """Other lines of a device tell the same once more, by program and by scope."""
    process, thread = names.get((event["pid"], None), ""), names.get((event["pid"], event["tid"]), "")
    return process.startswith("/device:GPU") and thread.startswith("Stream")


def _covered(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """The length of their union, and from the first begin to the last end."""
    covered, reached = 0.0, min(begin for begin, _ in intervals)
    first = reached
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered, reached - first
