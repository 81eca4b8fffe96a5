"""Programs that embed, compiled by the compilers of accelerators that are not there: of a decoder and of an encoder."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import plain
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.skeleton import make_encoder_skeleton, make_skeleton
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.embedding import embedding_task
from jaxserve.runner.inputs import Program
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import H200, V6E, Target
from tests.aot.test_step_programs import SMALL

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.newest]

MINILM = EncoderConfig(30522, 384, 1536, 12, 2, 512, 2, 1e-12)  # two of its layers
ONE_LAYER = replace(SMALL, layers=SMALL.layers[:1])
BFLOAT16 = plain(jnp.dtype("bfloat16"))
TARGETS = [
    pytest.param(H200, "mosaic_gpu", id="h200"),
    pytest.param(V6E, "mosaic_tpu", id="v6e", marks=pytest.mark.exhaustive),
]


def require_compiler(target: Target) -> None:
    if not target.has_compiler:
        pytest.skip(f"{target.compiler} is not installed: nothing compiled for {target.platform} (make kernels-check)")


@pytest.mark.parametrize(("target", "backend"), TARGETS)
def test_a_decoder_keeps_its_pages_in_place(target: Target, backend: Any) -> None:
    require_compiler(target)
    sharding = make_sharding(ONE_LAYER, MeshShape(), target.devices(1))
    skeleton = make_skeleton(ONE_LAYER, replace(BFLOAT16, backend=backend))
    page_size = page_tokens(target.platform, None)
    shape = (ONE_LAYER.num_layers, 1024, ONE_LAYER.num_kv_heads, page_size, ONE_LAYER.head_dim)
    program = Program("embed", 512, 32, 32, 0)
    step = lower(
        skeleton, sharding, program, pool_shapes(shape, "bfloat16"), task=embedding_task("last", page_size, 512)
    ).compile()
    memory = step.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * 2 * prod(shape)
    assert memory.temp_size_in_bytes < 2 * prod(shape) // ONE_LAYER.num_layers
    assert kernels_given_parts(step.as_text() or "") == []


@pytest.mark.parametrize(("target", "backend"), TARGETS)
def test_an_encoder_needs_room_for_a_block_of_queries_not_for_all_pairs(target: Target, backend: Any) -> None:
    require_compiler(target)
    num_tokens = 4096 if target is H200 else 1024  # the compiler of TPUs takes a minute for so many
    skeleton = make_encoder_skeleton(MINILM, BFLOAT16)
    sharding = make_sharding(MINILM, MeshShape(), target.devices(1))
    program = Program("embed", num_tokens, num_tokens // 16, num_tokens // 16, 0)
    step = lower(skeleton, sharding, program, None, task=embedding_task("mean", 1, 512)).compile()
    memory = step.memory_analysis()
    assert memory is not None
    pairs_bytes = 2 * MINILM.num_heads * num_tokens**2
    assert memory.temp_size_in_bytes < pairs_bytes // 4
