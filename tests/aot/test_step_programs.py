"""The server's own step programs, compiled by the compilers of accelerators that are not there.

Shows that every program compiles, that the KV pool stays where it is, and what devices say to each other.
Says nothing about speed or numbers. A pool is two arrays `[L, P, K, S, H]`; sizes are those of one device.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.backend import Backend

from jaxserve.layers.numerics import plain
from jaxserve.models.config import DecoderConfig, LayerConfig, RopeScaling
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.slots import slots_bytes
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from tests.aot.devices import A100, B200, H100, H200, V5E, V6E, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow]

PAGE_SIZE = 16

SMALL = DecoderConfig(  # every feature that changes the program, in three layers
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(), LayerConfig(sliding_window=64), LayerConfig(use_rope=False)),
    max_position=4096,
    norm_eps=1e-5,
    rope_theta=10000.0,
    tied_embeddings=True,
    qk_norm=True,
    qkv_bias=True,
)
LLAMA_8B = DecoderConfig(  # Llama 3.1 8B
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(),) * 32,
    max_position=131072,
    norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
)


@dataclass(frozen=True)
class Case:
    """One program of one model on some devices, with a pool far larger than its activations."""

    target: Target
    num_devices: int
    model: DecoderConfig
    num_pages: int
    program: Program
    backend: Backend = "reference"

    @property
    def pool_shape(self) -> tuple[int, ...]:
        return (self.model.num_layers, self.num_pages, self.model.num_kv_heads, PAGE_SIZE, self.model.head_dim)

    @property
    def local_shape(self) -> tuple[int, ...]:
        layers, pages, heads, slots, dim = self.pool_shape
        return (layers, pages, heads // self.num_devices, slots, dim)

    @property
    def array_bytes(self) -> int:
        """Keys, or values, of all layers on one device."""
        return prod(self.local_shape) * 2

    def __str__(self) -> str:
        name = {SMALL: "small", LLAMA_8B: "llama-8b"}[self.model]
        burst = "" if self.program.max_steps == 1 else f"x{self.program.max_steps}"
        return f"{self.target.name}x{self.num_devices}-{name}-{self.program.name}{burst}-{self.backend}"


SMALL_PROGRAMS = [Program("decode", 8, 8, 64, num_slots=8), Program("mixed", 128, 8, 64, num_slots=8)]
BURST = Program("decode", 8, 8, 64, num_slots=8, max_steps=8)
LLAMA_DECODE = Program("decode", 32, 32, 512, num_slots=32)
LLAMA_MIXED = Program("mixed", 512, 32, 512, num_slots=32)
CASES = [  # more steps for TPUs stand in test_tpu_kernels.py
    *[
        Case(target, devices, SMALL, 4096, program, "mosaic_tpu")
        for target, devices in ((V5E, 1), (V6E, 4))
        for program in SMALL_PROGRAMS
    ],
    Case(V5E, 4, SMALL, 4096, BURST),
    *[Case(H200, devices, SMALL, 4096, program, "mosaic_gpu") for devices in (1, 4) for program in SMALL_PROGRAMS],
    Case(H100, 1, SMALL, 4096, SMALL_PROGRAMS[0], "mosaic_gpu"),
    *[Case(target, 1, SMALL, 4096, SMALL_PROGRAMS[0]) for target in (A100, B200)],
    *[Case(H200, 1, LLAMA_8B, 8192, program, "mosaic_gpu") for program in (LLAMA_DECODE, LLAMA_MIXED)],
    Case(V6E, 1, LLAMA_8B, 6144, LLAMA_DECODE, "mosaic_tpu"),
]


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of its work."""

    case: Case
    aliased_bytes: int
    temp_bytes: int
    text: str


@pytest.fixture(scope="module", params=CASES, ids=str)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    case: Case = request.param
    if not case.target.has_compiler:
        pytest.skip(
            f"{case.target.compiler} is not installed: nothing compiled for {case.target.platform} (make kernels-check)"
        )
    sharding = make_sharding(case.model, case.num_devices, case.target.devices(case.num_devices))
    skeleton = make_skeleton(case.model, replace(plain(jnp.dtype("bfloat16")), backend=case.backend))
    step: jax.stages.Compiled = lower(skeleton, sharding, case.program, case.pool_shape).compile()
    memory, text = step.memory_analysis(), step.as_text()
    assert memory is not None
    assert text is not None
    return Compiled(case, memory.alias_size_in_bytes, memory.temp_size_in_bytes, text)


def test_the_pool_comes_back_in_its_own_buffers(compiled: Compiled) -> None:
    case = compiled.case
    slots = slots_bytes(case.program.num_slots, case.model.vocab_size)
    spare = compiled.aliased_bytes - 2 * case.array_bytes - slots
    assert 0 <= spare <= slots, "the slots, as large as the device lays them out"


def test_nothing_as_large_as_the_keys_of_a_layer_is_kept_aside(compiled: Compiled) -> None:
    assert compiled.temp_bytes < compiled.case.array_bytes // compiled.case.model.num_layers


def test_the_pool_is_neither_copied_nor_laid_out_anew(compiled: Compiled) -> None:
    shape = re.escape(f"[{','.join(map(str, compiled.case.local_shape))}]")
    moves = "copy|copy-start|copy-done|transpose|convert|pad|all-gather|all-gather-start|all-to-all"
    assert re.search(shape, compiled.text)
    assert re.findall(rf"= \(?\w+{shape}\S* (?:{moves})\(", compiled.text) == []


def test_a_layer_exchanges_two_sums_and_nothing_else(compiled: Compiled) -> None:
    """Tensor parallelism: one after attention, one after the MLP. One device has nobody to talk to."""
    found = re.findall(
        r"= .*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(.*"
        r'op_name="jit\(step\)/(?:while/body/)?(?:closed_call/)?(\w+)',
        compiled.text,
    )
    exchanges = Counter((where, kind) for kind, where in found if where.startswith("layer_"))
    layers = range(compiled.case.model.num_layers) if compiled.case.num_devices > 1 else ()
    assert exchanges == {(f"layer_{layer}", "all-reduce"): 2 for layer in layers}
