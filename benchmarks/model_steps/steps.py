"""Compiles decode and mixed steps of a model's layers for described devices, and counts their bytes against the ideal.

Ideal is: every matrix once, of experts those that are chosen if every token chooses at random; keys and values of all rows
once; recurrent states read and written once; all of it divided evenly over the devices. Activations are not counted.
Nothing runs: these are outputs of compilers that had no device to try matmuls on.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve_kernels.latent_attention.gpu import head_tiles
from jaxserve_kernels.latent_attention.tuning import decode_tuning
from jaxserve_kernels.paged_attention.gpu.splits import make_cutting
from jaxserve_kernels.segments import CHUNK

from benchmarks.gpu.static import THUNKS, outside_graphs
from benchmarks.model_steps.shapes import Model
from benchmarks.model_steps.traffic import Course, Dims, Launch, Partial, launches
from jaxserve.config import Config, ModelConfig, ParallelConfig
from jaxserve.layers.cache import CacheShapes
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.inputs import Program
from jaxserve.runner.limits import cache_shapes, make_policy, mesh_shape
from jaxserve.runner.steps import GENERATION, abstract_params, forward, lower
from jaxserve.sharding.mesh import Sharding, make_sharding
from jaxserve.tools.planning.devices import Device
from jaxserve.tools.planning.fit import planned_chip
from jaxserve.tools.planning.targets import described_devices
from jaxserve.types import ProgramKind

NUM_ROWS, NUM_MIXED_TOKENS, CONTEXT = 32, 256, 1000
"""Rows of both steps, tokens of the mixed one, and tokens that a row has."""
LONGEST = 8192
"""Tokens of the longest context."""
NUM_PAGES, NUM_STATES = 9001, 1 + 3 * 256
"""More than fits the VMEM of a TPU, and numbers that no other array has."""
_ROWS_OF_TILE = 16
"""Rows of a tile of few rows (`grouped_matmul/gpu/small.py`)."""
_KEYS_OF_BLOCK = 64
"""Keys of a block of XLA's attention in a decode step of so many rows (`paged_attention/reference.py`)."""


_BRANCHES = {"paged_attention/cond": 1, "latent_attention/cond": 1}
"""The second bucket of context: 513 to 1,024 tokens."""


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """The bytes that one layer of a kind moves on one device."""

    index: int
    launches: tuple[Launch, ...]
    cache_bytes: float
    """Keys and values, or latent vectors, that attention reads from their pages: launches do not count them."""
    ideal_bytes: float

    @property
    def moved_bytes(self) -> float:
        return sum(each.moved_bytes for each in self.launches) + self.cache_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """A compiled step."""

    layers: tuple[LayerTraffic, ...]
    outside_graphs: tuple[str, ...]
    """For GPUs: work that is in no CUDA graph."""
    num_loops: int
    text: str

    @property
    def ratio(self) -> float:
        """Bytes of the layers together over the ideal: a TPU fetches weights of one layer while it computes another."""
        return sum(layer.moved_bytes for layer in self.layers) / sum(layer.ideal_bytes for layer in self.layers)


@dataclass(frozen=True)
class Case:
    """A step of one layer of each kind, without the sampler, as the server would compile it."""

    skeleton: ModelSkeleton
    sharding: Sharding
    shapes: CacheShapes
    program: Program
    device: Device

    def compile(self) -> tuple[str, tuple[str, ...]]:
        """Return the compiled program's text, and on GPUs its work outside of graphs.

        Call it in a process with JAX_PLATFORMS=cpu and `targets.TPU_ENVIRONMENT`, for one kind of GPU.
        """
        is_gpu = self.device.platform == "gpu"
        with tempfile.TemporaryDirectory() as dumps:
            options: dict[str, Any] = {"xla_dump_to": dumps, "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
            first = self.sharding.mesh.devices.flat[0]
            with jax.default_device(first) if is_gpu else nullcontext():  # Mosaic GPU asks it for the architecture
                task = replace(GENERATION, step=forward)
                lowered = lower(self.skeleton, self.sharding, self.program, self.shapes, task)
            compiled = lowered.compile(options if is_gpu else None)
            thunks = [file.read_text(encoding="utf-8") for file in Path(dumps).glob(THUNKS)]
        text = compiled.as_text()
        assert text is not None, "these compilers print their programs"
        return text, tuple(kind for each in thunks for kind in outside_graphs(each))

    def step(self, text: str, outside: tuple[str, ...]) -> Step:
        """Count the bytes of the compiled program."""
        counting = _Counting(self.skeleton, self.sharding, self.shapes, self.program)
        return Step(counting.layers(text), outside, len(re.findall(r" while\(", text)), text)


def make_case(
    model: Model,
    device: Device,
    num_devices: int,
    kind: ProgramKind,
    data_size: int = 1,
    *,
    num_mixed_tokens: int = NUM_MIXED_TOKENS,
) -> Case:
    """Prepare a step of `model` on devices that split experts by expert parallelism, and heads by tensor parallelism.

    data_size: groups of these devices, each of which has the requests, the cache and the heads of its own (data parallelism).
    """
    tensor_size = num_devices // data_size
    decoder = model.decoder(tensor_size)
    expert_size = 1 if decoder.experts is None else num_devices
    config = Config(
        model=ModelConfig(model="any", dtype="bfloat16", quantization=model.quantization),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor_size, data_parallel_size=data_size, expert_parallel_size=expert_size
        ),
    )
    skeleton = make_skeleton(decoder, make_policy(config, decoder, planned_chip(device)))
    sharding = make_sharding(decoder, mesh_shape(config.parallel), described_devices(device, num_devices))
    counts = [NUM_PAGES * data_size if group.has_pages else NUM_STATES for group in decoder.cache.groups]
    shapes = cache_shapes(config, decoder, skeleton.policy, device.platform, counts)
    max_pages = LONGEST // page_tokens(device.platform, None)
    num_tokens = NUM_ROWS if kind == "decode" else num_mixed_tokens
    sizes = decoder.cache.num_tables, NUM_STATES if decoder.cache.states else 0
    return Case(skeleton, sharding, shapes, Program(kind, num_tokens, NUM_ROWS, max_pages, 0, 1, *sizes), device)


@dataclass(frozen=True)
class _Counting:
    """The rules by which the bytes of a compiled step count."""

    skeleton: ModelSkeleton
    sharding: Sharding
    shapes: CacheShapes
    program: Program

    @property
    def num_devices(self) -> int:
        return self.skeleton.policy.mesh.num_devices

    @property
    def decoder(self) -> DecoderConfig:
        return self.skeleton.config

    def layers(self, text: str) -> tuple[LayerTraffic, ...]:
        found = launches(text, self._partial(text), Course(self._trips(), _BRANCHES))
        return tuple(
            LayerTraffic(
                index,
                tuple(each for each in found if f"layer_{index}/" in each.scope),
                self._cache_bytes(layer),
                self._ideal_bytes(index, layer),
            )
            for index, layer in enumerate(self.decoder.layers)
        )

    def _partial(self, text: str) -> Partial:
        counted = self._tiles(text) | self._parts()
        for group, own in zip(self.decoder.cache.groups, self.shapes, strict=True):
            for array in own.arrays:
                place = self.sharding.place(array.axes)
                dims = place.shard_shape(array.shape)
                row_bytes = math.prod(dims[2:]) * jnp.dtype(array.dtype).itemsize
                counted[_without_ones(dims)] = 0.0 if group.has_pages else NUM_ROWS * row_bytes
        for leaf in abstract_params(self.skeleton, self.sharding):
            if len(leaf.shape) == 3 and leaf.sharding is not None:  # weights of experts
                dims = leaf.sharding.shard_shape(leaf.shape)
                counted[_without_ones(dims)] = self._active * math.prod(dims) * leaf.dtype.itemsize
        return Partial(counted)

    def _tiles(self, text: str) -> dict[Dims, float]:
        """Return the bytes that count of results of the kernel for small weights of experts, whole tiles: those that exist."""
        experts = self.decoder.experts
        sizes = re.findall(r"= f32\[1,(\d+),(\d+)\]\S* custom-call\(.*grouped_matmul", text)
        if experts is None:
            return {}
        chosen = self._active * experts.num_experts / self.num_devices * _ROWS_OF_TILE
        return {(int(rows), int(outputs)): 4 * min(int(rows), chosen) * int(outputs) for rows, outputs in sizes}

    def _parts(self) -> dict[Dims, float]:
        """Return the bytes that count of parts of rows by the kernel over latent vectors: those that exist."""
        latent, policy = self.decoder.latent, self.skeleton.policy
        if latent is None or policy.attention_backend != "mosaic_gpu":
            return {}
        tuning = decode_tuning("h200", latent.width, 2)
        num_tiles, heads = head_tiles(self.decoder.num_heads // policy.mesh.tensor)
        cutting = make_cutting(tuning, NUM_ROWS, num_tiles, tuning.programs, LONGEST)
        own = jnp.arange(NUM_ROWS) < NUM_ROWS // policy.mesh.data
        parts = cutting.cut(jnp.zeros(NUM_ROWS, jnp.int32), jnp.where(own, -(-CONTEXT // tuning.tile), 0))
        dims = (cutting.num_parts, num_tiles, heads, latent.rank)
        return {_without_ones(dims): float(parts.num_parts[0]) * math.prod(dims[1:]) * 4}

    @property
    def _active(self) -> float:
        """Return the part of the experts that the step's tokens choose."""
        experts = self.decoder.experts
        return (
            1.0 if experts is None else 1 - (1 - experts.num_per_token / experts.num_experts) ** self.program.num_tokens
        )

    def _trips(self) -> Mapping[str, Sequence[int]]:
        """Return how often loops go round: XLA's attention over latent vectors, and chunks of recurrent layers."""
        chunk = self.program.num_tokens - NUM_ROWS + 1
        tiles = -(-chunk // 16)
        if self.program.kind == "decode":
            return {"latent_attention": [-(-CONTEXT // _KEYS_OF_BLOCK)]}
        return {"linear_attention": [-(-chunk // CHUNK)], "latent_attention": [tiles, -(-CONTEXT // 128)]}

    def _keys(self, layer: LayerConfig) -> float:
        return min(CONTEXT, layer.sliding_window or CONTEXT)

    def _cache_bytes(self, layer: LayerConfig) -> float:
        """Return the bytes of keys and values that attention reads on one device, in whole tiles or pages of 64.

        Copies that XLA makes of them are launches.
        """
        if not layer.has_kv:
            return 0.0
        if layer.latent_dim is not None:  # all of its group's on every device
            return NUM_ROWS * -(-CONTEXT // 64) * 64 * 2 * layer.latent_dim / self.skeleton.policy.mesh.data
        heads, dim = self.decoder.kv_shape(layer)
        keys = -(-self._keys(layer) // 64) * 64
        if self.skeleton.policy.attention_backend == "bucketed":
            keys = 1024  # the second bucket, which `Course.branches` takes
        return NUM_ROWS * keys * 2 * 2 * dim * max(1, heads // self.num_devices)

    def _ideal_bytes(self, index: int, layer: LayerConfig) -> float:
        leaves = [leaf for leaf in self.skeleton.leaves if f".layers.{index}." in leaf.name and len(leaf.shape) > 1]
        weights = sum(leaf.num_bytes * (1.0 if leaf.num_experts is None else self._active) for leaf in leaves)
        return (weights + self._cache_ideal(layer)) / self.num_devices

    def _cache_ideal(self, layer: LayerConfig) -> float:
        if layer.latent_dim is not None:
            return NUM_ROWS * CONTEXT * 2 * layer.latent_dim
        states = 0.0
        if layer.recurrent is not None:
            for array in layer.recurrent.arrays:
                states += 2 * math.prod(array.shape) * (4 if array.dtype == "float32" else 2)
        keys = 0.0
        if layer.has_kv:
            heads, dim = self.decoder.kv_shape(layer)
            copies = self.decoder.kv_copies if layer.num_kv_heads is None else layer.kv_copies
            keys = self._keys(layer) * 2 * 2 * dim * heads / copies
        return NUM_ROWS * (states + keys)


def _without_ones(dims: Dims) -> Dims:
    return tuple(size for size in dims if size != 1)
