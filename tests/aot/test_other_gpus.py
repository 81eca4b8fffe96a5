"""Attention on GPUs other than Hopper, compiled for each of them without one: machine code, CUDA graphs, bytes.

Says nothing about speed. Numbers are those of tests/ptx.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.paged_attention import Scoring, bucketed

from benchmarks.gpu.static import branches, launches
from tests.aot.devices import A100, B200, L40S, RTX5090, SM_86, T4, Target
from tests.aot.other_gpus import CORNERS, KERNELS, KV_DTYPES
from tests.e2e.http_server import ROOT, SOURCES

pytestmark = [pytest.mark.aot, pytest.mark.slow]

ARCHITECTURES = [
    pytest.param(A100, "80", id="a100"),
    pytest.param(RTX5090, "120a", id="rtx5090", marks=pytest.mark.newest),
    pytest.param(SM_86, "86", id="sm_86", marks=[pytest.mark.newest, pytest.mark.exhaustive]),
    pytest.param(L40S, "89", id="l40s", marks=[pytest.mark.newest, pytest.mark.exhaustive]),
    pytest.param(B200, "100a", id="b200", marks=[pytest.mark.newest, pytest.mark.exhaustive]),
]
MOST_READ = 1.3
"""Bytes of a layer's launches and of keys and values, over those of weights, keys and values alone."""
MOST_READ_BUCKETED = 3.5
"""Bytes of decode attention alone, over those of keys and values."""


def _compiled_for(target: Target, *steps_of: str) -> dict[str, Any]:
    if not target.has_compiler:
        pytest.skip(f"{target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    command = [sys.executable, "-m", "tests.aot.other_gpus", target.name, *steps_of]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": SOURCES}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if "Skipped: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("target", "architecture"), ARCHITECTURES)
def test_the_kernel_is_assembled_for_each_architecture_kv_cache_and_head_dimension(
    target: Target, architecture: str
) -> None:
    found = _compiled_for(target)
    assert list(found) == list(KERNELS if target is SM_86 else CORNERS)
    for name, kernels in found.items():
        assert kernels["architectures"] == [architecture], name
        assert kernels["launches"] == 4, "decode rows and chunks, and the joins of their parts"
        assert 0 < kernels["kernels"] <= 4, "those that no earlier KV cache or head dimension had"
        assert kernels["spilled_bytes"] == 0, name
        assert max(kernels["registers"]) <= 255, name
        # Tensor cores of a warp, asynchronous copies of a thread, and no conversion of e4m3, which Ampere has not.
        assert kernels["instructions"] == ["HMMA.16816", "LDGSTS"], name


@pytest.mark.newest
@pytest.mark.parametrize(
    "kv_dtype", ["bfloat16", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in KV_DTYPES[1:])]
)
def test_a_decode_step_and_a_mixed_step_of_an_a100_are_one_cuda_graph_that_reads_little_else(kv_dtype: str) -> None:
    found = _compiled_for(A100, kv_dtype)[kv_dtype]
    for kind, kernels in (("decode", 2), ("mixed", 4)):
        step = found[kind]
        assert step["outside_graphs"] == [], kind
        assert step["given_parts"] == [], kind
        assert step["loops"] == 0
        assert step["kernels"] == kernels
        assert all(share <= MOST_READ for share in step["shares"].values()), step["shares"]


@pytest.mark.parametrize("num_pages", [64, 512], ids=["1k", "8k"])
def test_a_gpu_without_a_kernel_reads_pages_in_place_and_without_a_loop(num_pages: int) -> None:
    """A T4 in float16: branches of as many pages as rows may need, of which each is a few launches."""
    if not T4.has_compiler:
        pytest.skip(f"{T4.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    (device,) = T4.devices(1)
    sharding, batch, pool_shape = jax.sharding.SingleDeviceSharding(device), 32, (2, 5000, 8, 16, 128)

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows = array(batch, 32, 128, dtype=jnp.float16), *[array(*pool_shape, dtype=jnp.float16)] * 2, array()
    program = jax.jit(lambda *operands: bucketed.decode_attention(*operands, scoring=Scoring(0.1)))
    text = program.lower(*rows, array(batch, num_pages), array(batch)).compile().as_text()
    assert text is not None
    assert " while(" not in text
    (names,) = branches(text)
    assert len(names) == (2 if num_pages == 64 else 5)
    pool_bytes, own_bytes = 2 * 2 * 5000 * 8 * 16 * 128, 2 * 2 * batch * num_pages * 16 * 8 * 128
    longest = launches(text, pool_bytes, names[-1])
    moved = own_bytes + sum(launch.read_bytes + launch.written_bytes for launch in longest)
    assert len(longest) <= 12
    assert moved <= MOST_READ_BUCKETED * own_bytes
