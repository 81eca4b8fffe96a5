"""The manifest of a compile cache that `jaxserve compile` filled: its programs, and the parts of their keys.

Programs are found by their keys, not by the manifest. It is for people, and for reporting what differs when a shipped
cache does not fit the host that it came to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from jaxserve.runner.program_cache import write_whole

_LOG = logging.getLogger(__name__)

FILE_NAME: Final = "manifest.json"
FORMAT: Final = 1
_SHOWN_CHARACTERS: Final = 60
_SHOWN_WORDS: Final = 6


class ManifestEntry(msgspec.Struct, frozen=True):
    """One program."""

    name: str
    file: str
    num_bytes: int
    compile_seconds: float | None
    """Wall clock, beside other programs; None: it was in the cache already."""


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a directory that `jaxserve compile` filled."""

    format: int
    model: str
    facts: dict[str, str]
    """The parts of the programs' keys, by name."""
    settings: dict[str, str]
    """The settings that decided the rest, to repeat when serving."""
    programs: list[ManifestEntry]


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """Put the list into `directory`; returns the file. Raises OSError."""
    path = directory / FILE_NAME
    write_whole(path, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    return path


def read_manifest(directory: Path) -> Manifest | None:
    """The list in `directory`; None where there is none, or one of another format or damaged."""
    try:
        manifest = msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if manifest.format == FORMAT else None


def explain_misses(directory: Path, facts: Mapping[str, str], num_missing: int) -> None:
    """One warning that says why `num_missing` programs were not found, if `directory` was filled on purpose."""
    manifest = read_manifest(directory)
    if manifest is None or not num_missing:
        return
    reasons = differences(manifest.facts, facts) or ["entries are missing or damaged"]
    _LOG.warning(
        "compile cache %s was filled for another setup, %d programs had to be compiled: %s",
        directory,
        num_missing,
        "; ".join(reasons),
    )


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the parts that differ between `there` and `here`, by name."""
    return [
        f"{name}: {_contrast(there.get(name, ''), here.get(name, ''))}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name, "") != here.get(name, "")
    ]


def _contrast(there: str, here: str) -> str:
    if len(there) <= _SHOWN_CHARACTERS and len(here) <= _SHOWN_CHARACTERS:
        return f"{there or 'none'} there, {here or 'none'} here"
    only_there, only_here = (_some(one, other) for one, other in ((there, here), (here, there)))
    return f"only there {only_there}, only here {only_here}"


def _some(one: str, other: str) -> str:
    """The first words of `one` that `other` lacks."""
    others = set(other.split())
    words = [word for word in one.split() if word not in others]
    more = f" and {len(words) - _SHOWN_WORDS} more" if len(words) > _SHOWN_WORDS else ""
    return " ".join(words[:_SHOWN_WORDS]) + more if words else "nothing"
