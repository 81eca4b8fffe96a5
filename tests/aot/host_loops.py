"""Loops of compiled programs for GPUs whose condition the host reads before each round: those without a known number of rounds."""

from __future__ import annotations

import re


def host_read_loops(text: str) -> list[str]:
    """Return the scopes of the loops whose number of rounds depends on data. The host waits for the device before each round."""
    loops = [line for line in text.splitlines() if re.search(r"= .*\bwhile\(", line)]
    unknown = [line for line in loops if "known_trip_count" not in line]
    return [found[1] if (found := re.search(r'op_name="([^"]*)"', line)) else "" for line in unknown]


def rounds(text: str) -> list[int]:
    """Return the numbers of rounds of the other loops."""
    return [int(count) for count in re.findall(r'known_trip_count":\{"n":"(\d+)"', text)]
