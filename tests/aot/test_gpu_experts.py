"""Products with the weights of experts for Hopper, compiled without a GPU, at the sizes of models.

Registers, shared memory, instructions; and that whole steps take the kernel, on several devices as well. Says nothing
about speed or numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.grouped_matmul import grouped_matmul

from jaxserve.layers.numerics import plain
from jaxserve.models.config import ExpertsConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from tests.aot.devices import H200
from tests.aot.machine_code import MachineCode, machine_code
from tests.aot.test_step_programs import DECODE, PAGE_SIZE, SMALL

pytestmark = [pytest.mark.aot, pytest.mark.slow]


@dataclass(frozen=True)
class Product:
    """x [R, I] by weight [E, O, I]"""

    num_rows: int
    num_experts: int
    num_outputs: int
    num_inputs: int

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.num_inputs}x{self.num_experts}x{self.num_outputs}"


PRODUCTS = [
    Product(256, 128, 1536, 2048),  # gate and up of Qwen3-30B-A3B: 32 tokens
    Product(4096, 8, 28672, 4096),  # of Mixtral 8x7B: a prompt
    Product(2, 8, 4096, 14336),  # down: one token, and inputs in parts
]


@pytest.fixture(scope="module", params=PRODUCTS, ids=str)
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MachineCode:
    product: Product = request.param

    def compiled() -> jax.stages.Compiled:
        (device,) = H200.devices(1)
        sharding = jax.sharding.SingleDeviceSharding(device)
        weight = (product.num_experts, product.num_outputs, product.num_inputs)
        shapes = ((product.num_rows, product.num_inputs), "bfloat16"), (weight, "bfloat16"), (weight[:1], "int32")
        operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(name), sharding=sharding) for shape, name in shapes]
        multiply = jax.jit(lambda *arrays: grouped_matmul(*arrays, backend="mosaic_gpu"))
        with jax.default_device(device):
            return multiply.lower(*operands).compile()

    return machine_code(H200, compiled, tmp_path_factory.mktemp("mosaic"))


def test_no_register_is_spilled(code: MachineCode) -> None:
    assert code.spilled_bytes == 0


def test_products_are_those_of_the_tensor_cores_and_weights_come_by_bulk_copies(code: MachineCode) -> None:
    assert "HGMMA" in code.instructions
    assert "UTMALDG" in code.instructions


def test_what_is_kept_aside_is_small(code: MachineCode) -> None:
    """The rows, padded for whole tiles, and the parts of the result."""
    assert code.temp_bytes < 64 << 20


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_step_takes_the_kernel_for_its_experts(num_devices: int) -> None:
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    experts = ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=512, is_normalized=True)
    (layer, *_) = SMALL.layers
    model = replace(SMALL, layers=(replace(layer, experts=experts),))
    sharding = make_sharding(model, num_devices, H200.devices(num_devices))
    numerics = replace(
        plain(jnp.dtype("bfloat16")), backend="mosaic_gpu", joined_for=num_devices, num_devices=num_devices
    )
    pool = (1, 256, model.num_kv_heads, PAGE_SIZE, model.head_dim)
    lowered = lower(make_skeleton(model, numerics), sharding, DECODE, pool).as_text()
    assert lowered.count("@mosaic_gpu") == 3, "attention, gate and up, down"
