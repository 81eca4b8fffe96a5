"""Sparse attention by XLA, compiled for accelerators without one: memory. Says nothing about speed or numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from jaxserve_kernels.backend import Backend

from tests.aot.devices import H200, V5P, Target
from tests.kernels.sparse_steps import DONATED, KEY_WIDTH, POOL, WIDTH, operands, sparse_step

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), (512, 4)])
@pytest.mark.parametrize(("target", "backend"), [(H200, "bucketed"), (V5P, "reference")], ids=["h200", "v5p"])
def test_scores_of_long_contexts_are_never_in_memory_together(
    target: Target, backend: Backend, tokens: int, rows: int
) -> None:
    """TPUs lay out a pool of 576 numbers anew where nothing but this layer says how it comes: its copy is not counted."""
    if not target.has_compiler:
        pytest.skip(f"no compiler for {target.name}: {target.compiler} is not installed")
    shapes = operands(tokens, rows, "bfloat16", SingleDeviceSharding(target.devices(1)[0]))
    step = jax.jit(sparse_step(tokens, rows, backend), donate_argnums=DONATED)
    memory = step.lower(*shapes).compile().memory_analysis()
    pools = 2 * int(np.prod(POOL)) * (KEY_WIDTH + WIDTH)
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < (128 << 20) + (pools if target.platform == "tpu" else 0)
