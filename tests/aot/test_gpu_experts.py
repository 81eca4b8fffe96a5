"""Matmuls with the weights of experts for Hopper, compiled without a GPU, at the sizes of models.

Registers, shared memory, instructions; and that whole steps take the kernel, on several devices as well. Says nothing
about speed or numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.grouped_matmul import grouped_matmul
from jaxserve_kernels.grouped_matmul.tiles import most_tiles
from jaxserve_kernels.grouped_matmul.tuning import grouped_tuning
from jaxserve_kernels.nvfp4 import TwoLevelScales

from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import plain
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.aot.devices import H200
from tests.aot.machine_code import MachineCode, machine_code
from tests.aot.test_step_programs import DECODE, SMALL

pytestmark = [pytest.mark.aot, pytest.mark.slow]


@dataclass(frozen=True)
class Matmul:
    """x [R, I] by weight [E, O, I]"""

    num_rows: int
    num_experts: int
    num_outputs: int
    num_inputs: int
    weights: str = "bfloat16"
    """int4, e4m3_groups: with scales of groups of 128 inputs; mxfp4: with exponents of blocks of 32; nvfp4: with scales of 16."""
    dynamic: bool = False

    @property
    def operands(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and types."""
        weight = (self.num_experts, self.num_outputs, self.num_inputs)
        if self.weights == "nvfp4":
            weight = (*weight[:2], self.num_inputs // 2)
        dtype = {"mxfp4": "int4", "e4m3_groups": "float8_e4m3fn", "nvfp4": "uint8"}.get(self.weights, self.weights)
        arrays = [((self.num_rows, self.num_inputs), "bfloat16"), (weight, dtype), (weight[:1], "int32")]
        if self.weights == "mxfp4":
            arrays.append(((self.num_experts, self.num_inputs // 32, self.num_outputs), "uint8"))
        elif self.weights == "nvfp4":
            of_blocks = (self.num_experts, self.num_inputs // 16, self.num_outputs)
            arrays += [(of_blocks, "float8_e4m3fn"), ((self.num_experts, 2, self.num_outputs), "float32")]
        elif self.weights in ("int4", "e4m3_groups"):
            of_scales = "bfloat16" if self.weights == "int4" else "float32"
            arrays.append(((self.num_experts, self.num_inputs // 128, self.num_outputs), of_scales))
        elif self.weights != "bfloat16":
            arrays.append((weight[:2], "float32"))
        return arrays

    @property
    def instruction(self) -> str:
        if not self.dynamic:
            return "HGMMA"
        return "IGMMA" if self.weights == "int8" else "QGMMA"

    @property
    def written_bytes(self) -> int:
        """By the kernel for small weights: whole tiles."""
        if self.weights == "bfloat16":
            return 0
        bits = 4 if self.weights in ("int4", "mxfp4", "nvfp4", "e4m3_groups") else 8  # whose sizes they take
        sizes = grouped_tuning("h200", bits, self.num_rows // self.num_experts)
        tiles = most_tiles(self.num_rows, self.num_experts, sizes.rows, alignment=8)
        return tiles * sizes.rows * self.num_outputs * 4

    def __str__(self) -> str:
        name = f"{self.num_rows}x{self.num_inputs}x{self.num_experts}x{self.num_outputs}-{self.weights}"
        return f"{name}-dynamic" if self.dynamic else name


MATMULS = [
    Matmul(256, 128, 1536, 2048),  # gate and up of Qwen3-30B-A3B: 32 tokens
    Matmul(256, 128, 1536, 2048, "float8_e4m3fn", dynamic=True),
    Matmul(4096, 128, 1536, 2048, "int8"),
    Matmul(4096, 128, 2048, 768, "int4"),
    Matmul(256, 128, 1536, 2048, "nvfp4"),
    Matmul(32, 32, 2880, 2880, "mxfp4"),  # down of gpt-oss-20b: 8 tokens, and the last block of outputs overlaps
    Matmul(4096, 32, 7168, 2048, "e4m3_groups"),  # down of DeepSeek-V3 on eight devices: a prompt
]
NEWEST_MATMULS = [
    Matmul(16_384, 128, 1536, 2048, "nvfp4"),
    Matmul(2, 8, 4096, 14336),  # down of Mixtral 8x7B: one token, and inputs in parts
    Matmul(128, 32, 5760, 2880, "mxfp4"),  # gate and up of gpt-oss-20b: 32 tokens
    Matmul(4096, 8, 28672, 4096, "int8", dynamic=True),
]
MORE_MATMULS = [
    Matmul(4096, 128, 2048, 768, "nvfp4"),
    Matmul(8192, 32, 2880, 2880, "mxfp4"),
    Matmul(256, 128, 1536, 2048, "e4m3_groups"),
    Matmul(4096, 8, 28672, 4096),  # gate and up of Mixtral 8x7B: a prompt
    Matmul(256, 128, 1536, 2048, "float8_e4m3fn"),
    Matmul(4096, 8, 28672, 4096, "float8_e4m3fn"),
    *(Matmul(rows, 8, 28672, 4096, "float8_e4m3fn", dynamic=True) for rows in (256, 4096)),
    Matmul(256, 128, 1536, 2048, "int4"),
    Matmul(4096, 8, 4096, 14336, "int4"),
]


@dataclass(frozen=True)
class Built:
    """A matmul's kernel, and what the tools say of it."""

    case: Matmul
    code: MachineCode


@pytest.fixture(
    scope="module",
    params=[
        *MATMULS,
        *(pytest.param(case, marks=pytest.mark.newest) for case in NEWEST_MATMULS),
        *(pytest.param(case, marks=[pytest.mark.newest, pytest.mark.exhaustive]) for case in MORE_MATMULS),
    ],
    ids=str,
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    case: Matmul = request.param

    def compiled() -> jax.stages.Compiled:
        (device,) = H200.devices(1)
        sharding = jax.sharding.SingleDeviceSharding(device)
        operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(name), sharding=sharding) for shape, name in case.operands]

        def multiply(x: jax.Array, weight: jax.Array, sizes: jax.Array, *scales: jax.Array) -> jax.Array:
            of_weight = TwoLevelScales(*scales) if case.weights == "nvfp4" else next(iter(scales), None)
            return grouped_matmul(x, weight, sizes, of_weight, dynamic=case.dynamic, backend="mosaic_gpu")

        with jax.default_device(device):
            return jax.jit(multiply).lower(*operands).compile()

    return Built(case, machine_code(H200, compiled, tmp_path_factory.mktemp("mosaic")))


def test_no_register_is_spilled(built: Built) -> None:
    assert built.code.spilled_bytes == 0


def test_matmuls_are_those_of_the_tensor_cores_and_weights_come_by_bulk_copies(built: Built) -> None:
    assert built.case.instruction in built.code.instructions
    assert "UTMALDG" in built.code.instructions


def test_what_is_kept_aside_is_small(built: Built) -> None:
    """The rows, padded for whole tiles, and the parts of the result."""
    case = built.case
    x_bytes = 2 * case.num_rows * case.num_inputs
    assert built.code.temp_bytes < case.written_bytes + x_bytes + (16 << 20)


@pytest.mark.parametrize(
    ("quantization", "num_devices"),
    [
        ("none", 4),
        pytest.param("fp8", 1, marks=pytest.mark.newest),
        pytest.param("int8-weight-only", 4, marks=pytest.mark.newest),
        pytest.param("int4-weight-only", 4, marks=pytest.mark.newest),
        pytest.param("fp8-block-weight-only", 1, marks=pytest.mark.newest),
        pytest.param("fp8-block-weight-only", 4, marks=pytest.mark.newest),
        ("mxfp4-weight-only", 1),
        pytest.param("mxfp4-weight-only", 4, marks=pytest.mark.newest),
        ("nvfp4-weight-only", 1),
        pytest.param("nvfp4-weight-only", 4, marks=pytest.mark.newest),
    ],
)
def test_a_step_takes_the_kernels_for_its_experts(quantization: str, num_devices: int) -> None:
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    experts = ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=512, is_normalized=True)
    (layer, *_) = SMALL.layers
    model = replace(SMALL, layers=(replace(layer, experts=experts),))
    sharding = make_sharding(model, MeshShape(num_devices), H200.devices(num_devices))
    policy = replace(
        plain(jnp.dtype("bfloat16"), quantization),
        backend="mosaic_gpu",
        fused_for=num_devices,
        mesh=MeshShape(num_devices),
    )
    pool = (1, 256, model.num_kv_heads, page_tokens("gpu", None), model.head_dim)
    lowered = lower(make_skeleton(model, policy), sharding, DECODE, pool_shapes(pool, "bfloat16")).as_text()
    others = (
        2 if quantization in ("int4-weight-only", "fp8-block-weight-only", "nvfp4-weight-only") else 0
    )  # attention's matmuls
    assert lowered.count("@mosaic_gpu") == 4 + others, "attention, its join, gate and up, down"
