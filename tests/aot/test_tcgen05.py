"""Attention on `tcgen05`, compiled for a B200 without one: machine code, and a step as CUDA graphs.

Says nothing about speed. Numbers are those of tests/ptx.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.aot.blackwell import LAUNCHES, LAUNCHES_OF_B300
from tests.aot.devices import B200, SM_103, Target
from tests.e2e.http_server import ROOT, SOURCES

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.newest]

MOST_REGISTERS = 168
"""Registers of a thread that three warpgroups can start with."""


@pytest.fixture
def compiled() -> dict[str, Any]:
    return _compiled_for(B200)


@cache
def _compiled_for(target: Target) -> dict[str, Any]:
    if not B200.has_compiler:
        pytest.skip(f"{B200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": SOURCES}
    command = [sys.executable, "-m", "tests.aot.blackwell", target.name]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if "Skipped: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", LAUNCHES)
def test_nothing_is_spilled(compiled: dict[str, Any], name: str) -> None:
    kernels = compiled[name]
    assert kernels["architectures"] == ["100a"]
    assert kernels["kernels"] in (2, 3), "decode rows, segments, and the join of parts unless it is compiled already"
    assert kernels["spilled_bytes"] == 0
    assert max(kernels["registers"]) <= MOST_REGISTERS


@pytest.mark.parametrize("name", LAUNCHES)
def test_matmuls_are_those_of_tensor_memory(compiled: dict[str, Any], name: str) -> None:
    # Matmuls, bulk copies, loads and stores of tensor memory, arrivals of matmuls.
    assert compiled[name]["instructions"] == ["UTCHMMA", "UTMALDG", "LDTM", "STTM", "UTCBAR"]


def test_the_kernels_are_assembled_for_a_b300_too() -> None:
    found = _compiled_for(SM_103)
    assert list(found) == list(LAUNCHES_OF_B300)
    for name, kernels in found.items():
        assert (kernels["architectures"], kernels["spilled_bytes"]) == (["103a"], 0), name
        assert kernels["kernels"] in (2, 3), name


def test_a_mixed_step_is_one_cuda_graph_without_a_loop(compiled: dict[str, Any]) -> None:
    assert compiled["step"] == {"outside_graphs": [], "loops": 0, "kernels": 3}
