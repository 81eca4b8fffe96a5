"""Matmuls with the weights of experts for TPUs: interpreted against float64, and compiled without a TPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve_kernels.grouped_matmul import grouped_matmul, tpu
from jaxserve_kernels.grouped_matmul.cases import Case, error, operands

from tests.aot.devices import V5E, V5P, V6E, V7X, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow]


@pytest.mark.parametrize("case", [Case((3, 0, 1, 4), 128, 256, padding=8), Case((0, 17, 130), 128, 128)], ids=str)
def test_the_kernel_for_tpus_equals_the_matmul_in_float64(case: Case) -> None:
    given = operands(case)
    assert error(case, given, tpu.grouped_matmul(*map(jnp.asarray, given[:3]), is_emulated=True)) <= 1


@dataclass(frozen=True)
class Matmul:
    """The matmul of one device's share."""

    num_rows: int
    num_experts: int
    num_outputs: int
    num_inputs: int
    weights: str
    group: int = 0
    scales: str = "bfloat16"
    dynamic: bool = False

    def __str__(self) -> str:
        shape = f"{self.num_rows}x{self.num_inputs}x{self.num_experts}x{self.num_outputs}"
        return f"{shape}-{self.weights}{self.group or ''}{'-mxfp4' if self.scales == 'uint8' else ''}{'-dynamic' if self.dynamic else ''}"

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        return self.num_experts, self.num_outputs, self.num_inputs

    def compile(self, target: Target) -> jax.stages.Compiled:
        if not target.has_compiler:
            pytest.skip(f"{target.compiler} is not installed: nothing compiled for {target.name} (make kernels-check)")
        mesh = Mesh(np.array(target.devices(1)), ("model",))
        sharding, scales = NamedSharding(mesh, PartitionSpec()), []
        if self.group:
            scales = [((self.num_experts, self.num_inputs // self.group, self.num_outputs), self.scales)]
        elif self.weights != "bfloat16":
            scales = [((self.num_experts, self.num_outputs), "float32")]
        x, sizes = ((self.num_rows, self.num_inputs), "bfloat16"), ((self.num_experts,), "int32")
        shapes = [x, (self.weight_shape, self.weights), sizes, *scales]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(name), sharding=sharding) for shape, name in shapes]
        multiply = partial(grouped_matmul, dynamic=self.dynamic, backend="mosaic_tpu")
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(lambda *each: multiply(*each)).lower(*arrays).compile()


LARGE = Matmul(256, 128, 1536, 2048, "bfloat16")
QWEN = Matmul(64, 128, 1536, 2048, "int8", dynamic=True)
QUARTER = Matmul(4096, 128, 2048, 192, "int4", group=64)
GPT_OSS = Matmul(8, 32, 2880, 2880, "float8_e4m3fn")
MXFP4 = Matmul(128, 32, 5760, 2880, "int4", group=32, scales="uint8")
MXFP4_QUARTER = Matmul(512, 32, 2880, 720, "int4", group=16, scales="uint8")
MIXTRAL = Matmul(2048, 8, 4096, 14336, "int4", group=128)
DEEPSEEK = Matmul(256, 32, 4096, 7168, "float8_e4m3fn", group=128, scales="float32")
DEEPSEEK_DOWN = Matmul(256, 32, 7168, 2048, "float8_e4m3fn", group=128, scales="float32")
DYNAMIC = Matmul(512, 8, 7168, 4096, "float8_e4m3fn", dynamic=True)
MATMULS = [
    *[(target, LARGE) for target in (V5E, V6E)],
    *[(target, case) for target in (V5E, V7X) for case in (QWEN, QUARTER, GPT_OSS, MIXTRAL)],
    *[(V5P, case) for case in (QWEN, QUARTER)],
    *[(V6E, case) for case in (GPT_OSS, MIXTRAL)],
    *[(target, MXFP4) for target in (V5E, V6E, V7X)],
    *[(target, MXFP4_QUARTER) for target in (V5E, V5P)],
    *[(target, DYNAMIC) for target in (V5P, V7X)],
    *[(target, case) for target in (V6E, V7X) for case in (DEEPSEEK, DEEPSEEK_DOWN)],
]

IN_EVERY_LANE = [(V5E, LARGE), (V5P, QWEN), (V6E, GPT_OSS), (V7X, MIXTRAL), (V5E, MXFP4), (V7X, DEEPSEEK)]
"""Each device, and each format of weights."""


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(*case, id=f"{case[0].name}-{case[1]}", marks=[] if case in IN_EVERY_LANE else [pytest.mark.newest])
        for case in MATMULS
    ],
)
def test_weights_are_read_where_they_are(target: Target, case: Matmul) -> None:
    """Whatever XLA would do with all of them, if the kernel took them in another order."""
    compiled = case.compile(target)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    experts, *matrix = case.weight_shape
    shape = "|".join(f"{experts},{a},{b}" for a, b in (matrix, matrix[::-1]))
    assert re.findall(rf"= \(?\w+\[(?:{shape})\]\S* (?:copy|copy-start|transpose|convert|pad|fusion)\(", text) == []
    assert memory.temp_size_in_bytes < 16 << 20


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_weights_that_fit_vmem_are_not_fetched_before_experts_are_chosen(weights: str) -> None:
    """Two matmuls: while it computes the first, XLA would copy the weights of all experts of the second."""
    first, second = Matmul(256, 32, 512, 2048, weights), Matmul(256, 32, 2048, 512, weights)
    if not V6E.has_compiler:
        pytest.skip(f"{V6E.compiler} is not installed: nothing compiled for {V6E.name} (make kernels-check)")
    mesh = Mesh(np.array(V6E.devices(1)), ("model",))
    place = NamedSharding(mesh, PartitionSpec())

    def described(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    def compute(x: jax.Array, sizes: jax.Array, *operands: tuple[jax.Array, ...]) -> jax.Array:
        for weight, *scales in operands:
            y = grouped_matmul(x, weight, sizes, *scales, dynamic=bool(scales), backend="mosaic_tpu")
            x = y.astype(x.dtype)
        return x

    operands = [
        (described(each.weight_shape, weights), *[described(each.weight_shape[:2], "float32")] * (weights == "int8"))
        for each in (first, second)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        x, sizes = described((256, 2048), "bfloat16"), described((32,), "int32")
        text = jax.jit(compute).lower(x, sizes, *operands).compile().as_text()
    assert text is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert re.findall(r"\[32,(?:512,2048|2048,512)\]\S*S\(1\)", text) == []
