"""The server's own step programs, compiled by the compilers of accelerators that are not there.

Shows that every program compiles, that the KV pool stays where it is, and what devices say to each other.
Says nothing about speed or numbers. A pool is two arrays `[L, P, K, S, H]`; sizes are those of one device.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.backend import Backend

from benchmarks.gpu.static import KV_SCALES, THUNKS, launches, outside_graphs
from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.rope import RopeScaling
from jaxserve.model_config.vision import Normalization, VisionConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.compiler_options import compiler_options
from jaxserve.runner.images.encoder import ImageShape
from jaxserve.runner.inputs import Program, StepTask
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.slots import slots_bytes, slots_shape
from jaxserve.runner.steps import GENERATION, abstract_params, forward, generation_task, lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import A100, B200, H100, H200, V5E, V5P, V6E, V7X, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SMALL = DecoderConfig(  # every feature that changes the program, in two layers
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(sliding_window=64), LayerConfig(use_rope=False)),
    max_position=4096,
    norm_eps=1e-5,
    rope_theta=10000.0,
    tied_embeddings=True,
    qk_norm="heads",
    qkv_bias=True,
    norm_placement="sandwich",
    norm_weights="offset",
    sliding_rope_theta=1e3,
    attention_scale=0.1,
    attention_softcap=50.0,
    embedding_scale=22.6,
    residual_scale=0.5,
    logit_scale=0.25,
    logit_softcap=30.0,
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
TOWER = VisionConfig(
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=4,
    patch_size=16,
    norm_eps=1e-6,
    activation="gelu_tanh",
    positions="table",
    positions_per_side=16,
    connector="linear",
    connector_eps=1e-6,
    merge=4,
    output_size=SMALL.hidden_size,
    normalization=Normalization(1 / 255, (0.5,) * 3, (0.5,) * 3),
    image_token_id=3,
    image_patches=256,
    bidirectional_layers="sliding",
)
SEEING = replace(SMALL, vision=TOWER)
"""A model whose layer with a window sees images as a whole; the other one is causal (Gemma 4)."""
ONE_LAYER = replace(LLAMA_8B, layers=LLAMA_8B.layers[:1])  # all the matmuls there are
TWO_LAYERS = replace(LLAMA_8B, layers=LLAMA_8B.layers[:2])


@dataclass(frozen=True)
class Case:
    """One program of one model on some devices, with a pool far larger than its activations."""

    target: Target
    num_devices: int
    model: DecoderConfig
    num_pages: int
    program: Program
    backend: Backend = "reference"
    quantization: str = "none"
    adapters: AdaptersConfig | None = None
    kv_dtype: str = "bfloat16"
    """8-bit numbers have scales."""
    is_sampled: bool = True
    """False: the step up to the head's input. The sampler takes a compiler two to seven times as long as that."""

    @property
    def pool_shape(self) -> tuple[int, ...]:
        page_size = page_tokens(self.target.platform, None)
        return (self.model.num_layers, self.num_pages, self.model.num_kv_heads, page_size, self.model.head_dim)

    @property
    def local_shape(self) -> tuple[int, ...]:
        layers, pages, heads, slots, dim = self.pool_shape
        return (layers, pages, heads // self.num_devices, slots, dim)

    @property
    def policy(self) -> DtypePolicy:
        """Return the dtype policy that the server chooses on such a device."""
        fused_for = self.num_devices if self.target.platform == "gpu" else 0
        return replace(
            plain(jnp.dtype("bfloat16"), self.quantization),
            backend=self.backend,
            fused_for=fused_for,
            mesh=MeshShape(self.num_devices),
            kv_scales=KV_SCALES[self.kv_dtype],
        )

    @property
    def windows(self) -> set[int | None]:
        return {layer.sliding_window for layer in self.model.layers}

    @property
    def task(self) -> StepTask[Any, Any]:
        """Return the task that the server runs on such a device, or its step without the sampler."""
        return generation_task(self.target.platform) if self.is_sampled else replace(GENERATION, step=forward)

    @property
    def state_bytes(self) -> int:
        """Slots, embeddings of images, and the page tables that GPUs keep."""
        if not self.is_sampled:
            return 0
        tables = (self.program.num_slots + 1) * self.program.max_pages if self.target.platform == "gpu" else 0
        images = 0 if self.program.images is None else self.program.images.num_bytes(2)
        return self.slots_bytes + 4 * tables + images

    @property
    def slots_bytes(self) -> int:
        return slots_bytes(self.program.num_slots, self.model.vocab_size) if self.is_sampled else 0

    @property
    def rounds_activations(self) -> bool:
        return self.quantization in ("fp8", "int8")

    @property
    def has_groups(self) -> bool:
        """True if a kernel for Hopper multiplies groups of inputs."""
        return self.quantization in ("int4-weight-only", "fp8-block-weight-only", "nvfp4-weight-only")

    @property
    def array_bytes(self) -> int:
        """Keys, or values, of all layers on one device."""
        return prod(self.local_shape) * jnp.dtype(self.kv_dtype).itemsize

    def __str__(self) -> str:
        name = {SMALL: "small", SEEING: "seeing", ONE_LAYER: "llama-8b-one-layer", TWO_LAYERS: "llama-8b-two-layers"}[
            self.model
        ]
        burst = "" if self.program.max_steps == 1 else f"x{self.program.max_steps}"
        weights = "" if self.quantization == "none" else f"-{self.quantization}"
        adapters = "" if self.adapters is None else "-adapters"
        images = "-whole-images" if self.program.sees_whole_images else ""
        kv = "" if self.kv_dtype == "bfloat16" else f"-kv-{self.kv_dtype}"
        program = f"{self.program.name}{burst}{images}{'' if self.is_sampled else '-forward'}{kv}"
        return f"{self.target.name}x{self.num_devices}-{name}-{program}-{self.backend}{weights}{adapters}"


DECODE = Program("decode", 8, 8, 64, num_slots=8)
MIXED = Program("mixed", 128, 64, 64, num_slots=64)  # prompts are scored in two blocks
BURST = Program("decode", 8, 8, 64, num_slots=8, max_steps=8)
LLAMA_DECODE = Program("decode", 32, 32, 512, num_slots=32)
# A server with default settings: 256 requests of up to 131,072 tokens. Few rows are cut into most parts.
DEFAULT_PAGES = LLAMA_8B.max_position // page_tokens("gpu", None)
FEW_ROWS = Program("decode", 2, 2, DEFAULT_PAGES, num_slots=256)
IMAGES = ImageShape((256,), 16, 192, 512, SMALL.hidden_size, has_rope_positions=False, is_bidirectional=True)
WHOLE_IMAGES = replace(MIXED, images=IMAGES)
ADAPTERS = AdaptersConfig(
    count=4,
    rank=16,
    modules=tuple(
        f"model.layers.{layer}.{name}"
        for layer in range(SMALL.num_layers)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ),
)
PAGES_OF_MOST_MEMORY = 750_000
"""98 GB of keys and values of two layers: they and their copies, which a program does not make, have no room on an H200."""
# Steps without the sampler have no slots.
FORWARD, FORWARD_MIXED = replace(DECODE, num_slots=0), replace(MIXED, num_slots=0)
LLAMA_FORWARD = replace(LLAMA_DECODE, num_slots=0)
CASES = [  # one of each kernel; pairs of a device, a kind of step and a format of weights are below, each of them once
    Case(H200, 4, SMALL, 4096, MIXED, "mosaic_gpu"),
    Case(H200, 1, SMALL, 4096, FORWARD, "mosaic_gpu", adapters=ADAPTERS, is_sampled=False),
    Case(V7X, 1, SMALL, 4096, FORWARD_MIXED, "mosaic_tpu", is_sampled=False),
]
NEWEST_CASES = [
    Case(H200, 1, TWO_LAYERS, PAGES_OF_MOST_MEMORY, FEW_ROWS, "mosaic_gpu"),
    Case(V6E, 1, SMALL, 4096, BURST, "mosaic_tpu"),
    Case(H200, 1, SEEING, 4096, WHOLE_IMAGES, "mosaic_gpu"),
    Case(H200, 1, SMALL, 4096, DECODE, "mosaic_gpu", "fp8"),
    Case(V6E, 4, SMALL, 4096, FORWARD_MIXED, "mosaic_tpu", adapters=ADAPTERS, is_sampled=False),
    Case(V7X, 4, ONE_LAYER, 8192, LLAMA_FORWARD, "mosaic_tpu", "fp8", kv_dtype="float8_e4m3fn", is_sampled=False),
]
MORE_CASES = [
    Case(V5P, 4, SMALL, 4096, DECODE, "mosaic_tpu"),
    Case(V6E, 4, SEEING, 4096, WHOLE_IMAGES, "mosaic_tpu"),
    Case(V5E, 1, SMALL, 4096, FORWARD, quantization="fp8", is_sampled=False),
    Case(B200, 1, SMALL, 4096, FORWARD, quantization="fp8-weight-only", is_sampled=False),
    Case(A100, 1, SMALL, 4096, FORWARD, quantization="fp8", is_sampled=False),
    Case(H100, 4, SMALL, 4096, FORWARD, "mosaic_gpu", "int4-weight-only", is_sampled=False),
    Case(H200, 1, ONE_LAYER, 8192, LLAMA_FORWARD, "mosaic_gpu", "int4-weight-only", kv_dtype="int8", is_sampled=False),
    Case(H200, 1, ONE_LAYER, 8192, LLAMA_FORWARD, "mosaic_gpu", "fp8-block-weight-only", is_sampled=False),
    Case(H200, 1, ONE_LAYER, 8192, LLAMA_FORWARD, "mosaic_gpu", "nvfp4-weight-only", is_sampled=False),
    Case(V6E, 1, ONE_LAYER, 8192, LLAMA_FORWARD, "mosaic_tpu", "fp8-block-weight-only", is_sampled=False),
    Case(V5E, 4, ONE_LAYER, 8192, LLAMA_FORWARD, "mosaic_tpu", "int4-weight-only", kv_dtype="int8", is_sampled=False),
]
"""The sampler is in a step of each kind on each platform: with it everywhere, a compiler took twice as long."""


CUTTING_LAUNCHES, CUTTING_LAUNCHES_OF_LONG_ROWS = 5, 6
"""Launches that cut the rows of a decode step, once for all layers of one window. XLA joins their small sums with others of the program,
or not, so that one more or less depends on what else there is."""
MOST_LINES, MOST_LINES_OF_LAYER = 14000, 800
"""Lines of a compiled program: there are 7,400, and 480 of each layer, for two rows, whose parts are most."""
MOST_CPU_S = 600.0
"""Bound of one layer's program; 32 layers of two rows took a quarter of it. More means that a program has grown by far."""


@dataclass(frozen=True)
class Compiled:
    """The compiler's report on its work."""

    case: Case
    aliased_bytes: int
    temp_bytes: int
    text: str
    outside_graphs: list[str]
    """For GPUs: work that is in no CUDA graph."""
    cpu_s: float
    """Processor seconds of tracing and compiling."""


@pytest.fixture(
    scope="module",
    params=[
        *CASES,
        *(pytest.param(case, marks=pytest.mark.newest) for case in NEWEST_CASES),
        *(pytest.param(case, marks=[pytest.mark.newest, pytest.mark.exhaustive]) for case in MORE_CASES),
    ],
    ids=str,
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    case: Case = request.param
    if not case.target.has_compiler:
        pytest.skip(
            f"{case.target.compiler} is not installed: nothing compiled for {case.target.platform} (make kernels-check)"
        )
    sharding = make_sharding(case.model, MeshShape(case.num_devices), case.target.devices(case.num_devices))
    skeleton = make_skeleton(case.model, case.policy, case.adapters)
    dumps = tmp_path_factory.mktemp("dumps")
    options: dict[str, Any] | None = None
    if case.target.platform == "gpu":  # there is no device to find the fastest matmuls on
        dumped = {"xla_dump_to": str(dumps), "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
        options = (compiler_options("gpu", ProgramCache(None)) or {}) | dumped
    started_s = time.process_time()
    lowered = lower(skeleton, sharding, case.program, pool_shapes(case.pool_shape, case.kv_dtype), task=case.task)
    step: jax.stages.Compiled = lowered.compile(options)
    cpu_s = time.process_time() - started_s
    memory, text = step.memory_analysis(), step.as_text()
    assert memory is not None
    assert text is not None
    outside = [kind for file in dumps.glob(THUNKS) for kind in outside_graphs(file.read_text(encoding="utf-8"))]
    return Compiled(case, memory.alias_size_in_bytes, memory.temp_size_in_bytes, text, outside, cpu_s)


def test_the_pool_comes_back_in_its_own_buffers(compiled: Compiled) -> None:
    case = compiled.case
    spare = compiled.aliased_bytes - 2 * case.array_bytes - case.state_bytes
    assert 0 <= spare <= case.slots_bytes, "the slots, as large as the device lays them out"


def test_the_kernels_of_every_layer_are_inside(compiled: Compiled) -> None:
    case = compiled.case
    in_mixed = {"reference": 0, "mosaic_gpu": 3, "mosaic_tpu": 3}
    in_decode = {"reference": 0, "mosaic_gpu": 2, "mosaic_tpu": 1}
    kernels = (in_decode if case.program.kind == "decode" else in_mixed)[case.backend]
    num_layers = case.model.num_layers
    if case.program.sees_whole_images:  # by XLA's attention
        num_layers = 1 if case.model is SEEING else 0
    if case.target.platform == "gpu" and case.has_groups:
        kernels += 4  # matmuls: attention in and out, MLP in and out
    if case.target.platform == "tpu" and case.quantization == "fp8-block-weight-only":
        kernels += 7  # of queries, keys and values, and of gate and up, each has its own
    found = re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"', compiled.text)
    assert len(found) == kernels * num_layers


def test_nothing_is_computed_twice_to_save_memory(compiled: Compiled) -> None:
    """XLA calls what it repeats by the name of the first, with `remat`."""
    if compiled.case.target.platform == "gpu":
        assert set(re.findall(r"%(\S*remat\S*) = ", compiled.text)) == set()


def test_kernels_are_given_whole_arrays(compiled: Compiled) -> None:
    assert kernels_given_parts(compiled.text) == []


def test_nothing_as_large_as_the_keys_of_a_layer_is_kept_aside(compiled: Compiled) -> None:
    assert compiled.temp_bytes < compiled.case.array_bytes // compiled.case.model.num_layers


def test_the_pool_is_neither_copied_nor_laid_out_anew(compiled: Compiled) -> None:
    shape = re.escape(f"[{','.join(map(str, compiled.case.local_shape))}]")
    moves = "copy|copy-start|copy-done|transpose|convert|pad|all-gather|all-gather-start|all-to-all"
    assert re.search(shape, compiled.text)
    assert re.findall(rf"= \(?\w+{shape}\S* (?:{moves})\(", compiled.text) == []


def test_the_slots_of_all_requests_are_not_copied(compiled: Compiled) -> None:
    case = compiled.case
    if not case.is_sampled:
        pytest.skip("a step without slots")
    shape = re.escape(f"[{','.join(map(str, slots_shape(case.program.num_slots, case.model.vocab_size)))}]")
    assert re.search(shape, compiled.text)
    assert re.findall(rf"= s32{shape}\S* (?:copy|copy-start|transpose)\(", compiled.text) == []


def test_a_step_by_the_kernels_is_one_cuda_graph_and_a_decode_step_one_of_few_launches(compiled: Compiled) -> None:
    """The host starts work outside of graphs piece by piece, and waits for each condition."""
    case = compiled.case
    if case.backend == "mosaic_gpu" and case.num_devices == 1 and not case.program.sees_whole_images:
        assert compiled.outside_graphs == []
        if case.program.kind == "mixed":
            return
        in_layers = [launch for launch in launches(compiled.text, case.array_bytes) if "layer_" in launch.scope]
        most = 20 if case.rounds_activations else 19 if case.has_groups else 16
        most += 3 * len(ADAPTERS.modules) // case.model.num_layers if case.adapters is not None else 0
        cutting = CUTTING_LAUNCHES_OF_LONG_ROWS if case.program.max_pages == DEFAULT_PAGES else CUTTING_LAUNCHES
        assert len(in_layers) <= most * case.model.num_layers + cutting * len(case.windows)


def test_long_contexts_make_no_long_programs(compiled: Compiled) -> None:
    """However many parts a row may be cut into."""
    case = compiled.case
    if case.program.max_pages != DEFAULT_PAGES:
        pytest.skip("a short context")
    assert compiled.text.count("\n") <= MOST_LINES + MOST_LINES_OF_LAYER * case.model.num_layers
    assert compiled.cpu_s <= MOST_CPU_S


def test_a_layer_exchanges_two_sums_and_nothing_else(compiled: Compiled) -> None:
    """Tensor parallelism: one after attention, one after the MLP, in bfloat16, with what adapters add in the same exchange.

    A single device exchanges nothing.
    """
    found = re.findall(
        r"= \(*(\w+)\[.*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(.*"
        r'op_name="jit\(step\)/(?:while/body/)?(?:closed_call/)?(\w+)',
        compiled.text,
    )
    exchanges = Counter(each for each in found if each[-1].startswith("layer_"))
    layers = range(compiled.case.model.num_layers) if compiled.case.num_devices > 1 else ()
    assert exchanges == {("bf16", "all-reduce", f"layer_{layer}"): 2 for layer in layers}


def test_devices_sample_rows_of_their_own(compiled: Compiled) -> None:
    """The logits are exchanged once, columns for rows; then no device waits for another until all have their tokens."""
    if not compiled.case.is_sampled:
        pytest.skip("a step without the sampler")
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf' ({kinds})(?:-start)?\(.*op_name="([^"]*/sample/[^"]*)', compiled.text)
    assert Counter(kind for kind, _ in found)["all-to-all"] == (compiled.case.num_devices > 1)
    assert [where for _, where in found if "cond" in where or "branch" in where] == []


def test_small_weights_are_widened_in_memory_only_where_there_is_no_arithmetic_for_them(compiled: Compiled) -> None:
    case = compiled.case
    if case.quantization == "none":
        pytest.skip("its weights are whole")
    sharding = make_sharding(case.model, MeshShape(case.num_devices), case.target.devices(case.num_devices))
    skeleton = make_skeleton(case.model, case.policy)
    matrices = {
        ",".join(map(str, leaf.sharding.shard_shape(leaf.shape)))
        for leaf in abstract_params(skeleton, sharding)
        if leaf.sharding is not None and len(leaf.shape) == 2 and leaf.dtype.itemsize == 1  # of 4 bits: 1 as well
    }
    kept = compiled.text[compiled.text.index("\nENTRY ") :]  # what is inside of a fusion is never stored
    widened = matrices.intersection(re.findall(r" = (?:bf16|f16|f32)\[([\d,]+)\]", kept))
    assert bool(widened) == (case.target is A100)


def test_matmuls_of_8_bits_take_their_operands_as_they_are(compiled: Compiled) -> None:
    if compiled.case.target is not H200 or compiled.case.quantization != "fp8":
        pytest.skip("other matmuls")
    types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", compiled.text))
    operands = re.findall(r" dot\(%([\w.-]+), %([\w.-]+)\)", compiled.text)
    assert len(operands) >= 4 * compiled.case.model.num_layers + 1, "attention in and out, MLP in and out, head"
    assert {types[name] for pair in operands for name in pair} == {"f8e4m3fn"}
