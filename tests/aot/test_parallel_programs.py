"""Steps over one host and two, compiled for accelerators that are not there: collectives as counted, the pool in its place.

The counts that `jaxserve plan` prints are compared with what the compilers of CUDA and TPU make of the server's programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import jax.numpy as jnp
import pytest
from jaxserve_kernels.backend import Backend

from jaxserve.layers.cache import group_shapes, pool_shapes
from jaxserve.layers.policy import Exchange, plain
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.latent import LatentConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.steps import GENERATION, forward, lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.planning.collectives import Collective, compiled_collectives, step_collectives
from jaxserve.tools.planning.sizes import make_sizes
from jaxserve.tools.planning.targets import described_devices
from tests.aot.devices import H200, V5E, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.newest]

DENSE = DecoderConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=2048,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    layers=(LayerConfig(),),
    max_position=4096,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
EXPERTS = ExpertsConfig(num_experts=32, num_per_token=2, intermediate_size=512, is_normalized=True)
MIXTURE = replace(DENSE, layers=(LayerConfig(experts=EXPERTS),))
NUM_PAGES = 512
DECODE, MIXED = Program("decode", 64, 64, 64, num_slots=0), Program("mixed", 128, 64, 64, num_slots=0)


@dataclass(frozen=True)
class Case:
    """A step of one layer on the devices of a shape."""

    target: Target
    model: DecoderConfig
    shape: MeshShape
    program: Program
    exchange: Exchange = "auto"

    def __str__(self) -> str:
        shape = self.shape
        kind = "dense" if self.model is DENSE else self.exchange
        return f"{self.target.name}-t{shape.tensor}-e{shape.expert}-d{shape.data}-{kind}-{self.program.name}"


CASES = [
    Case(H200, DENSE, MeshShape(16), DECODE),  # two hosts; four KV heads, each on four devices
    Case(H200, MIXTURE, MeshShape(8, expert=16, data=2), MIXED, "all-to-all"),
    Case(V5E, DENSE, MeshShape(8, data=2), MIXED),
    Case(V5E, MIXTURE, MeshShape(16, expert=8), DECODE, "all-to-all"),
    Case(V5E, MIXTURE, MeshShape(8, expert=8), DECODE, "all-reduce"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_exchanges_what_the_plan_counts_and_leaves_the_pool_where_it_is(case: Case) -> None:
    if not case.target.has_compiler:
        pytest.skip(f"{case.target.compiler} is not installed: nothing compiled for {case.target.platform}")
    is_gpu, shape = case.target.platform == "gpu", case.shape
    policy = replace(
        plain(jnp.dtype("bfloat16")),
        backend="mosaic_gpu" if is_gpu else "mosaic_tpu",
        fused_for=shape.num_devices if is_gpu else 0,
        mesh=shape,
        exchange=case.exchange,
    )
    model = case.model.for_devices(shape.tensor)
    assert model.num_kv_heads == max(4, shape.tensor)
    skeleton = make_skeleton(model, policy)
    sharding = make_sharding(model, shape, described_devices(case.target.device, shape.num_devices))
    pool_shape = (1, NUM_PAGES * shape.data, model.num_kv_heads, 16, model.head_dim)
    task = replace(GENERATION, step=forward)
    lowered = lower(skeleton, sharding, case.program, pool_shapes(pool_shape, "bfloat16"), task)
    step = lowered.compile({"xla_gpu_autotune_level": 0} if is_gpu else None)
    text, memory = step.as_text(), step.memory_analysis()
    assert text is not None
    assert memory is not None
    counted = step_collectives(make_sizes(skeleton), case.program.num_tokens, num_rows=1)
    assert _sums(compiled_collectives(text)) == _sums(counted)
    array_bytes = prod(sharding.place((None, "pages", "kv_heads")).shard_shape(pool_shape)) * 2
    assert array_bytes == NUM_PAGES * max(1, 4 // shape.tensor) * 16 * 128 * 2, "a KV head, and the pages of one rank"
    assert memory.alias_size_in_bytes >= 2 * array_bytes


def _sums(collectives: Iterable[Collective]) -> Counter[tuple[str, int, int]]:
    """Return the number of collectives by kind, devices and bytes. The rows that a ragged one sends are known when it runs."""
    found = Counter[tuple[str, int, int]]()
    for each in collectives:
        found[each.kind, each.num_devices, 0 if each.kind == "ragged-all-to-all" else each.array_bytes] += each.count
    return found


LATENT = replace(
    DENSE,
    head_dim=64,  # the part that rotates
    layers=(LayerConfig(latent_dim=576),),
    latent=LatentConfig(rank=512, rope_dim=64, plain_dim=128, value_dim=128),
)
"""A layer of DeepSeek-V2-Lite: 16 heads over vectors of 576 numbers."""


@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu"])
@pytest.mark.parametrize("program", [DECODE, MIXED], ids=["decode", "mixed"])
def test_data_ranks_divide_latent_vectors_and_exchange_values_of_heads(backend: Backend, program: Program) -> None:
    """The sums of latent vectors, four times as wide as the values that are made of them, are not exchanged."""
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for {H200.platform}")
    shape = MeshShape(4, data=2)
    skeleton = make_skeleton(LATENT, replace(plain(jnp.dtype("bfloat16")), backend=backend, fused_for=8, mesh=shape))
    sharding = make_sharding(LATENT, shape, described_devices(H200.device, 8))
    pool_shape = (1, 2 * NUM_PAGES, 1, 16, 576)
    pool = group_shapes(LATENT.cache.groups[0], 2 * NUM_PAGES, 16, "bfloat16", "bfloat16")
    lowered = lower(skeleton, sharding, program, (pool,), replace(GENERATION, step=forward))
    step = lowered.compile({"xla_gpu_autotune_level": 0})
    text, memory = step.as_text(), step.memory_analysis()
    assert text is not None
    assert memory is not None
    counted = step_collectives(make_sizes(skeleton), program.num_tokens, num_rows=1)
    assert _sums(compiled_collectives(text)) == _sums(counted)
    own_shape = sharding.place((None, "pages")).shard_shape(pool_shape)
    assert own_shape == (1, NUM_PAGES, 1, 16, 576)
    assert memory.alias_size_in_bytes >= prod(own_shape) * 2
