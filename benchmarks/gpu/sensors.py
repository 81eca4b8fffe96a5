"""Clocks, power, temperature and throttling of the GPU while parts run, as `nvidia-smi` reports them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from benchmarks.gpu.records import Record

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu", "memory.used")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Names of one field: newer and older drivers."""
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bits of NVML's clocks event reasons that mean lower clocks than the load asks for."""
PERIOD_MS = 500
QUERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading."""

    at_s: float
    """Time of `time.monotonic()`."""
    values: tuple[float, ...]
    """By FIELDS."""
    reasons: int


class Sensors:
    """Readings since the start."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def read(self, lines: Iterator[str]) -> None:
        """Keep every line of numbers; other lines say that the tool cannot read a field."""
        for line in lines:
            words = [word.strip() for word in line.split(",")]
            with suppress(ValueError):
                values = tuple(float(word) for word in words[:-1])
                self._samples.append(Sample(time.monotonic(), values, int(words[-1], 16)))

    def summary(self, part: str, since_s: float) -> Record | None:
        """Return the readings of a part, which began at `since_s`; None without any."""
        samples = [sample for sample in self._samples if sample.at_s >= since_s]
        if not samples:
            return None
        columns = dict(zip(FIELDS, zip(*(sample.values for sample in samples), strict=True), strict=True))
        busy = [sample for sample in samples if sample.values[FIELDS.index("utilization.gpu")] > 0]
        slowed = sorted({name for sample in busy for bit, name in THROTTLING.items() if sample.reasons & bit})
        clocks = [sample.values[0] for sample in busy]
        return Record(
            "figure",
            "device under load",
            {
                "part": part,
                "samples": len(samples),
                "busy_samples": len(busy),
                "sm_mhz_least": min(clocks, default=None),
                "sm_mhz_median": statistics.median(clocks) if clocks else None,
                "memory_mhz": max(columns["clocks.mem"]),
                "most_watts": max(columns["power.draw"]),
                "most_celsius": max(columns["temperature.gpu"]),
                "most_memory_mib": max(columns["memory.used"]),
                "throttled_by": ", ".join(slowed) or "nothing",
            },
        )


@contextmanager
def watched_device(tool: str = "nvidia-smi") -> Iterator[Sensors]:
    """Read the first GPU all the while; without the tool there are no readings."""
    sensors, command = Sensors(), _command(tool)
    if command is None:
        yield sensors
        return
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None, "a pipe"
    thread = threading.Thread(target=sensors.read, args=(iter(process.stdout.readline, ""),), daemon=True)
    thread.start()
    try:
        yield sensors
    finally:
        process.kill()
        process.wait()
        thread.join()
        process.stdout.close()


def _command(tool: str) -> Sequence[str] | None:
    """Return the command that reads for ever; None if this machine's tool cannot."""
    if shutil.which(tool) is None:
        return None
    for reason in REASONS:
        query = [tool, "--id=0", f"--query-gpu={','.join((*FIELDS, reason))}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=False)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode == 0:
            return [*query, f"--loop-ms={PERIOD_MS}"]
    return None
