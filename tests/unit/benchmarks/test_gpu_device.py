"""A GPU check knows more of its device than times: bounds, clocks, and the runtime's log of graphs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.gpu.bounds import find_bounds, find_sheet
from benchmarks.gpu.context import MEASURED
from benchmarks.gpu.graphs import logged
from benchmarks.gpu.records import Record
from benchmarks.gpu.sensors import FIELDS, Sensors, watched_device
from jaxserve.tools.planning.devices import ACCELERATORS

COPY = Record("figure", "bounds", {"bound": "copy", "rate": 4000.0})
MATMUL = Record("figure", "bounds", {"bound": "matmul", "rate": 700.0})
READINGS = ["1980, 2619, 690.5, 71, 100, 90000, 0x0000000000000004\n", "345, 2619, 120.0, 40, 0, 500, 0x1\n"]


def test_bound_that_was_not_measured_is_the_data_sheets_and_labelled() -> None:
    sheet = ACCELERATORS["h200"]
    both, only_copy = find_bounds([COPY, MATMUL], sheet), find_bounds([COPY], sheet)
    assert both is not None and only_copy is not None
    assert (both.copy_source, both.matmul_source) == (MEASURED, MEASURED)
    assert (only_copy.copy_bytes_per_s, only_copy.matmul_flops) == (4e12, 989e12)
    assert "4,000 GB/s (measured" in only_copy.label and "989 TFLOP/s (published spec" in only_copy.label
    assert find_bounds([COPY], None) is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ],
)
def test_data_sheet_is_found_by_the_devices_name(kind: str, name: str | None) -> None:
    sheet = find_sheet(None, [Record("figure", "device", {"kind": kind})])
    assert (None if sheet is None else sheet.name) == name
    assert find_sheet("b200", []) is ACCELERATORS["b200"]


def test_throttling_counts_while_the_device_is_busy() -> None:
    sensors = Sensors()
    sensors.read(iter([*READINGS, "[N/A], broken\n"]))
    found = sensors.summary("engine", 0.0)
    assert found is not None
    assert found.values["samples"] == 2 and found.values["busy_samples"] == 1
    assert found.values["sm_mhz_median"] == 1980 and found.values["throttled_by"] == "power cap"
    assert sensors.summary("later", time.monotonic() + 1) is None


def test_the_drivers_tool_is_read_all_the_while_and_ended(tmp_path: Path) -> None:
    """An old driver refuses the newer name of a field."""
    tool, fields = tmp_path / "smi", ",".join((*FIELDS, "clocks_throttle_reasons.active"))
    lines = "".join(f"echo '{line.strip()}'\n" for line in READINGS)
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *{fields}*) ;; *) exit 2 ;; esac\n{lines}'
        'case "$*" in *--loop-ms*) exec sleep 600 ;; esac\n'
    )
    tool.chmod(0o700)
    started_s = time.monotonic()
    with watched_device(str(tool)) as sensors:
        while sensors.summary("part", started_s) is None:
            assert time.monotonic() - started_s < 30
    with watched_device(str(tmp_path / "none")) as sensors:
        assert sensors.summary("part", started_s) is None


def test_messages_of_graphs_are_counted_without_their_numbers() -> None:
    log = """2026 I command_buffer_thunk.cc:301] Update command buffer #1 at 0x7f01
    I command_buffer_thunk.cc:301] Update command buffer #2 at 0xab
    I other.cc:5] Update nothing"""
    assert logged(log) == {"Update command buffer ## at #": 2}
