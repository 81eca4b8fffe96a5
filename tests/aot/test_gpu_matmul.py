"""Matmuls with 8-bit weights for Hopper, compiled without a GPU, at the sizes of Llama-3.1-8B.

By our kernel: registers, shared memory, instructions. By XLA, where the choice falls without a measurement: what it
writes to memory. Says nothing about speed or numbers.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels import nvfp4
from jaxserve_kernels.matmul import matmul, tuning
from jaxserve_kernels.matmul.gpu import grouped_choice
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from benchmarks.gpu.static import launches
from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import DtypePolicy
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.aot.devices import H100, H200, Target
from tests.aot.machine_code import MachineCode, machine_code
from tests.aot.test_step_programs import DECODE, SMALL

pytestmark = [pytest.mark.aot, pytest.mark.slow]

BF16, I8, F8, I4, PACKED = (jnp.dtype(name) for name in ("bfloat16", "int8", "float8_e4m3fn", "int4", "uint8"))
"""PACKED: two numbers of NVFP4 in a byte."""


@dataclass(frozen=True)
class Matmul:
    """x [T, I] @ weight [O, I].T"""

    num_tokens: int
    num_outputs: int
    num_inputs: int
    weights: jnp.dtype = I8
    dtype: jnp.dtype = BF16
    target: Target = H200

    def __str__(self) -> str:
        types = f"{self.weights.name}-{self.dtype.name}"
        return f"{self.target.name}-{self.num_tokens}x{self.num_inputs}x{self.num_outputs}-{types}"

    @property
    def instruction(self) -> str:
        """The tensor cores' matmul of such activations."""
        return {BF16: "HGMMA", I8: "IGMMA", F8: "QGMMA"}[self.dtype]

    @property
    def device(self) -> jax.Device:
        return self.target.devices(1)[0]

    @property
    def weight_bits(self) -> int:
        return 4 if self.weights in (I4, PACKED) else 8

    @property
    def group(self) -> int:
        """Inputs of a group or block of weights in such."""
        return 16 if self.weights == PACKED else 128

    def operands(self, group: int | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """x, weight and scales: of outputs, or of groups of so many inputs; of NVFP4 also those of the matrix."""
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        of_scales = (self.num_outputs,) if group is None else (self.num_inputs // group, self.num_outputs)
        columns, float32 = self.num_inputs // (2 if self.weights == PACKED else 1), jnp.dtype(jnp.float32)
        scale_dtype = {I4: self.dtype, PACKED: F8}.get(self.weights, float32) if group is not None else float32
        shapes = [
            ((self.num_tokens, self.num_inputs), self.dtype),
            ((self.num_outputs, columns), self.weights),
            (of_scales, scale_dtype),
        ]
        if self.weights == PACKED:
            shapes.append(((2, self.num_outputs), float32))
        return tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes)


KERNELS: dict[Matmul, SkinnyTuning | None] = {
    Matmul(1, 6144, 4096): SkinnyTuning(rows=64, tile=128, stages=8, programs=132),
    Matmul(64, 4096, 14336): SkinnyTuning(rows=128, tile=128, stages=4, programs=132),
    Matmul(256, 14336, 4096, I8, I8): SkinnyTuning(rows=64, tile=128, stages=2, programs=132),
    Matmul(40, 6144, 4096, I8, I8): SkinnyTuning(rows=64, tile=128, stages=4, programs=132),
    Matmul(128, 6144, 4096, F8, F8): SkinnyTuning(rows=64, tile=128, stages=4, programs=132),
    Matmul(32, 128256, 4096, F8, BF16, H100): SkinnyTuning(rows=128, tile=128, stages=4, programs=132),
    Matmul(8, 6144, 4096, I4): None,
    Matmul(64, 4096, 14336, I4): None,
    Matmul(128, 28672, 4096, I4): None,
    Matmul(8, 6144, 4096, F8): None,
    Matmul(64, 4096, 14336, F8): None,
    Matmul(128, 28672, 4096, F8): None,
    Matmul(8, 6144, 4096, PACKED): None,
    Matmul(64, 4096, 14336, PACKED): None,
    Matmul(128, 28672, 4096, PACKED): None,
}
"""With their sizes; None: those that the server takes for weights in groups."""
IN_EVERY_LANE = [list(KERNELS)[i] for i in (1, 3, 4, 6, 10, 12)]
"""Both types of weights, rounded activations, and groups in each format."""


@dataclass(frozen=True)
class Built:
    """A kernel, and what the tools say of it."""

    case: Matmul
    workers: int
    code: MachineCode


@pytest.fixture(
    scope="module",
    params=[each if each in IN_EVERY_LANE else pytest.param(each, marks=pytest.mark.newest) for each in KERNELS],
    ids=str,
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    case: Matmul = request.param
    sizes = KERNELS[case]

    def compiled() -> jax.stages.Compiled:
        from jaxserve_kernels.matmul.gpu import skinny

        def multiply(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
            if sizes is None:
                return matmul(x, weight, scales, backend="mosaic_gpu")
            return skinny.matmul(x, weight, tuning=sizes) * scales

        with jax.default_device(case.device):
            if case.weights == PACKED:
                return _compiled_nvfp4(case)
            return jax.jit(multiply).lower(*case.operands(128 if sizes is None else None)).compile()

    code = machine_code(case.target, compiled, tmp_path_factory.mktemp("mosaic"))
    taken = sizes or grouped_choice(*case.operands(case.group)[:3])
    assert taken is not None
    return Built(case, taken.workers, code)


def _compiled_nvfp4(case: Matmul) -> jax.stages.Compiled:
    x, values, *scales = case.operands(case.group)
    multiply = jax.jit(functools.partial(nvfp4.matmul, backend="mosaic_gpu"))
    return multiply.lower(x, values, nvfp4.TwoLevelScales(*scales)).compile()


def test_no_register_is_spilled(built: Built) -> None:
    assert built.code.spilled_bytes == 0


def test_workers_and_the_fetcher_share_the_registers_that_their_threads_begin_with(built: Built) -> None:
    """Workers wait for ever for a register that no thread gave back."""
    from jaxserve_kernels.matmul.gpu.stream import REGISTERS

    (at_start,) = map(int, re.findall(r"Used (\d+) registers", built.code.instructions))
    of_worker, of_fetcher = REGISTERS[built.workers]
    assert at_start * (built.workers + 1) == of_worker * built.workers + of_fetcher


def test_matmuls_are_those_of_the_tensor_cores_and_weights_come_by_bulk_copies(built: Built) -> None:
    assert built.case.instruction in built.code.instructions
    assert "UTMALDG" in built.code.instructions


def test_weights_are_read_from_shared_memory_in_wide_words(built: Built) -> None:
    """Upcast weights are read 128 bits at a time, not a byte or two; others are read by the tensor cores. Of 64 weights in NVFP4
    a thread reads four scales, a byte each."""
    assert ("LDS.128" in built.code.instructions) == (built.case.dtype == BF16)
    assert len(re.findall(r"LDS\.[US]8", built.code.instructions)) == (4 if built.case.weights == PACKED else 0)


def test_weights_in_nvfp4_take_few_instructions(built: Built) -> None:
    """For each of the 64 weights that a thread has in a step; half of the rate have logic, shifts and byte permutations."""
    if built.case.weights != PACKED:
        pytest.skip("other weights")
    opcodes = _step(built.code.instructions)
    assert len(opcodes) <= 3.4 * 64
    assert len([opcode for opcode in opcodes if opcode.startswith(("LOP3", "SHF", "PRMT"))]) <= 1.4 * 64


def _step(instructions: str) -> list[str]:
    """Return the opcodes of one step of a worker: from its wait for the weights to its last matmul."""
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\d+ +)?([A-Z][\w.]+)", instructions)
    matmuls = [place for place, opcode in enumerate(opcodes) if opcode.startswith("HGMMA")]
    wait = max(place for place in range(matmuls[0]) if opcodes[place].endswith("TRYWAIT"))
    return opcodes[wait : matmuls[-1] + 1]


def test_the_parts_of_the_result_are_smaller_than_the_weights(built: Built) -> None:
    case = built.case
    assert built.code.temp_bytes < case.num_inputs * case.num_outputs * case.weight_bits // 8


@pytest.mark.parametrize(
    "case",
    [
        Matmul(1, 4096, 4096),
        Matmul(32, 14336, 4096),
        Matmul(256, 4096, 14336),
        Matmul(8, 6144, 4096, F8),
        Matmul(64, 4096, 14336, I4),
    ],
    ids=str,
)
def test_xla_writes_no_widened_copy_of_the_weights(case: Matmul) -> None:
    """It widens them inside of the matmul (a Triton fusion), unless its autotuner, on a device, finds cuBLAS faster."""
    if not case.target.has_compiler:
        pytest.skip(f"{case.target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    compiled = jax.jit(matmul).lower(*case.operands()).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert "__triton" in text
    assert memory.temp_size_in_bytes < case.num_inputs * case.num_outputs


def test_xla_writes_one_copy_of_weights_in_nvfp4_for_a_prompt() -> None:
    """In bfloat16, by one launch that reads them as they are stored; their scales are transposed by another."""
    case = Matmul(512, 4096, 4096, PACKED)
    if not case.target.has_compiler:
        pytest.skip(f"{case.target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    text, num_weights = _compiled_nvfp4(case).as_text(), case.num_outputs * case.num_inputs
    assert text is not None and "mosaic_gpu" not in text
    constant = 2  # bytes, made by a launch of its own
    large = [launch for launch in launches(text, pool_bytes=0) if launch.written_bytes > constant]
    of_scales, upcast, *rest = large
    assert of_scales.written_bytes == num_weights // 16 * 2
    assert upcast.written_bytes == 2 * num_weights
    assert upcast.read_bytes <= num_weights // 2 + of_scales.written_bytes + constant
    assert len(rest) <= 2, "the matmul, and the scales of the matrix"


@pytest.mark.parametrize("num_outputs", [14336, 4096])
def test_xla_multiplies_eight_bits_by_eight_bits_as_they_are(num_outputs: int) -> None:
    case = Matmul(512, num_outputs, 4096, F8)
    if not case.target.has_compiler:
        pytest.skip(f"{case.target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    dynamic = functools.partial(matmul, dynamic=True)
    text = jax.jit(dynamic).lower(*case.operands()).compile().as_text()
    assert text is not None
    types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    ((x, weight),) = re.findall(r" dot\(%([\w.-]+), %([\w.-]+)\)", text)
    assert (types[x], types[weight]) == ("f8e4m3fn", "f8e4m3fn")


def test_a_decode_step_takes_the_kernel_for_all_of_its_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    sizes = {"rows": 64, "tile": 128, "stages": 4, "programs": 132}
    monkeypatch.setattr(tuning, "load", lambda device: {"int8": {"8": {"1": sizes, "2": sizes}}})
    model = replace(SMALL, layers=SMALL.layers[:1])
    sharding = make_sharding(model, MeshShape(), H200.devices(1))
    skeleton = make_skeleton(model, DtypePolicy(BF16, BF16, QuantPolicy("int8-weight-only"), "mosaic_gpu"))
    pool = (model.num_layers, 256, model.num_kv_heads, page_tokens("gpu", None), model.head_dim)
    lowered = lower(skeleton, sharding, DECODE, pool_shapes(pool, "bfloat16")).as_text()
    assert "@mosaic_gpu" in lowered
    assert "dot_general" not in lowered, "a matmul that is left to XLA"
