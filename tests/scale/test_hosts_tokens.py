"""Tokens of several worker processes joined by gloo: those of transformers, for a dense model and one with experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.hosts import golden_tokens, greedy_tokens, running_hosts
from tests.models.goldens import golden_checkpoint
from tests.programs import shared_programs

pytestmark = [pytest.mark.slow, pytest.mark.scale]

NUM_TOKENS = 48


@pytest.fixture(scope="session")
def programs() -> Path:
    return shared_programs()


@pytest.mark.parametrize("model", ["llama3_tiny", "qwen3_moe_tiny"])
@pytest.mark.parametrize(("num_hosts", "num_devices"), [(2, 8), (4, 4)])
def test_tokens_equal_those_of_one_process(model: str, num_hosts: int, num_devices: int, programs: Path) -> None:
    golden = golden_checkpoint(model)
    with running_hosts(golden, num_hosts, num_devices, programs=programs) as replica:
        assert greedy_tokens(replica.server, golden, NUM_TOKENS) == golden_tokens(golden, NUM_TOKENS)
        assert replica.stop() == [0] * num_hosts
        assert "Traceback" not in replica.server.output
