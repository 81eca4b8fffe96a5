"""Decode steps of a model with experts, compiled for accelerators that are not there: graphs, exchanges, the pool's place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks.gpu.static import THUNKS, outside_graphs
from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import plain
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.steps import GENERATION, forward, lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import H200, V5E, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.newest]

EXPERTS = ExpertsConfig(num_experts=16, num_per_token=4, intermediate_size=256, is_normalized=True)
MODEL = DecoderConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(experts=EXPERTS),),
    max_position=4096,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
POOL = (1, 4096, 8, 16, 128)
DECODE = Program("decode", 8, 8, 64, num_slots=0)
FORWARD = replace(GENERATION, step=forward)
"""Without the sampler, which test_step_programs.py compiles and which takes most of the time."""


@pytest.mark.parametrize(
    ("target", "num_devices", "quantization"),
    [
        pytest.param(H200, 1, "none", marks=pytest.mark.exhaustive),
        (H200, 1, "fp8"),
        pytest.param(H200, 1, "mxfp4-weight-only", marks=pytest.mark.exhaustive),
        (V5E, 4, "none"),
        pytest.param(V5E, 4, "int4-weight-only", marks=pytest.mark.exhaustive),
        pytest.param(V5E, 4, "mxfp4-weight-only", marks=pytest.mark.exhaustive),
    ],
    ids=["h200", "h200-fp8", "h200-mxfp4", "v5e-x4", "v5e-x4-int4", "v5e-x4-mxfp4"],
)
def test_a_decode_step_of_experts_is_one_graph_and_exchanges_two_sums(
    target: Target, num_devices: int, quantization: str, tmp_path: Path
) -> None:
    if not target.has_compiler:
        pytest.skip(f"{target.compiler} is not installed: nothing compiled for {target.platform} (make kernels-check)")
    is_gpu = target.platform == "gpu"
    policy = replace(
        plain(jnp.dtype("bfloat16"), quantization),
        backend="mosaic_gpu" if is_gpu else "mosaic_tpu",
        fused_for=num_devices if is_gpu else 0,
        mesh=MeshShape(num_devices),
    )
    sharding = make_sharding(MODEL, MeshShape(num_devices), target.devices(num_devices))
    dumps = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
    options: dict[str, Any] | None = dumps if is_gpu else None
    lowered = lower(make_skeleton(MODEL, policy), sharding, DECODE, pool_shapes(POOL, "bfloat16"), FORWARD)
    step = lowered.compile(options)
    memory, text = step.memory_analysis(), step.as_text()
    assert memory is not None
    assert text is not None
    array_bytes = 4096 * 8 * 16 * 128 * 2 // num_devices
    assert memory.alias_size_in_bytes >= 2 * array_bytes, "keys and values stay where they are"
    assert memory.temp_size_in_bytes < array_bytes // 2
    exchanges = re.findall(r'= .*? (all-\w+|reduce-scatter|collective-\w+)\(.*op_name="jit\(step\)/[^"]*layer_0', text)
    assert [kind.removesuffix("-start") for kind in exchanges] == ["all-reduce"] * (2 if num_devices > 1 else 0)
    own_calls = re.findall(r"%grouped_matmul\S* = .*tpu_custom_call", text)
    assert len(own_calls) == (3 if not is_gpu and quantization != "none" else 0)
    outside = [kind for file in tmp_path.glob(THUNKS) for kind in outside_graphs(file.read_text(encoding="utf-8"))]
    assert outside == []
    assert kernels_given_parts(text) == []
    assert any(tmp_path.glob(THUNKS)) == is_gpu
