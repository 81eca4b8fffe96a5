"""Exceptions of the emulator."""

from __future__ import annotations


class Hazard(Exception):
    """Something that a kernel must not do."""


class NotModelled(Exception):
    """Something that the emulator does not know: never passed over."""
