"""Attention to what indexers choose, by XLA, compiled for accelerators without one: loops and memory. Says nothing about speed or numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from jaxserve_kernels.backend import Backend

from tests.aot.devices import H200, V5P, Target
from tests.aot.host_loops import host_read_loops
from tests.kernels.chosen_steps import ChosenStep, lower_blocks, lower_compressed, lower_pooled
from tests.kernels.sparse_steps import DONATED, KEY_WIDTH, POOL, WIDTH, operands, sparse_step

pytestmark = [pytest.mark.aot, pytest.mark.slow]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), (512, 4)])
@pytest.mark.parametrize(("target", "backend"), [(H200, "bucketed"), (V5P, "reference")], ids=["h200", "v5p"])
def test_scores_of_long_contexts_are_never_in_memory_together(
    target: Target, backend: Backend, tokens: int, rows: int
) -> None:
    """TPUs lay out a pool of 576 numbers anew where nothing but this layer says how it comes: its copy is not counted."""
    _require(target)
    shapes = operands(tokens, rows, "bfloat16", SingleDeviceSharding(target.devices(1)[0]))
    step = jax.jit(sparse_step(tokens, rows, backend), donate_argnums=DONATED).lower(*shapes).compile()
    memory = step.memory_analysis()
    pools = 2 * int(np.prod(POOL)) * (KEY_WIDTH + WIDTH)
    assert memory.alias_size_in_bytes >= pools
    if target.platform == "tpu":
        assert memory.temp_size_in_bytes < (128 << 20) + pools
        return
    assert memory.temp_size_in_bytes < 192 << 20
    text = step.as_text()
    assert text is not None
    if tokens == rows:
        assert len(host_read_loops(text)) == 1, "over the keys that are scored"


@pytest.mark.parametrize(
    ("lower", "most_mib"),
    [
        pytest.param(lower_blocks, 48, id="minimax-m3"),
        pytest.param(lower_pooled, 64, id="qwen4-exp", marks=pytest.mark.exhaustive),
        pytest.param(lower_compressed, 96, id="deepseek-v4"),
    ],
)
def test_a_decode_step_waits_for_no_loop_but_the_one_that_scores_keys(
    lower: Callable[[ChosenStep, Any], Any], most_mib: int
) -> None:
    """Rows have up to 131,072 tokens; nothing of a pool but what rows choose is copied."""
    _require(H200)
    step = lower(ChosenStep(32, 32, 16, "bucketed"), SingleDeviceSharding(H200.devices(1)[0])).compile()
    assert len(host_read_loops(step.as_text())) == 1
    assert step.memory_analysis().temp_size_in_bytes < most_mib << 20


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tokens", "rows"), [(32, 32), (512, 4)])
@pytest.mark.parametrize(
    "lower", [lower_blocks, lower_pooled, lower_compressed], ids=["minimax-m3", "qwen4-exp", "deepseek-v4"]
)
def test_tpus_compile_steps_that_copy_no_pool(lower: Callable[[ChosenStep, Any], Any], tokens: int, rows: int) -> None:
    _require(V5P)
    step = lower(ChosenStep(tokens, rows, 64, "reference"), SingleDeviceSharding(V5P.devices(1)[0])).compile()
    memory = step.memory_analysis()
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes // 4


def _require(target: Target) -> None:
    if not target.has_compiler:
        pytest.skip(f"no compiler for {target.name}: {target.compiler} is not installed")
