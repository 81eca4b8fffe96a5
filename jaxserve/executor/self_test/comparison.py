"""Compares the kernels of a device with XLA there, for one model's shapes.

A layer of each kind, with random weights in the model's own types, computes a few steps without sampling, with kernels
and without: prompts, rows that decode beside a prompt, rows that only decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import jax
import msgspec
import numpy as np
from jaxserve_kernels.backend import NATIVE, XLA

from jaxserve.config import Config
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import LightningConfig
from jaxserve.models.skeleton import LeafSpec, ModelSkeleton, make_skeleton
from jaxserve.quant.array import QuantArray
from jaxserve.quant.kv_scales import is_kv_scale
from jaxserve.runner.backend import Chip
from jaxserve.runner.buckets import page_tokens, resolve_limits
from jaxserve.runner.inputs import Program, pack
from jaxserve.runner.limits import cache_shapes, make_policy, mesh_shape
from jaxserve.runner.state import StateArrays, new_cache
from jaxserve.runner.steps import GENERATION, forward, lower
from jaxserve.sampling.params import EngineSamplingParams, device_row
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, StepPlan
from jaxserve.sharding.mesh import Sharding, make_sharding
from jaxserve.types import NO_LOGPROBS, ProgramKind, RequestId

MAX_VOCAB: Final = 4096
NUM_ROWS: Final = 8
FEWEST_ROWS: Final = 4
MIXED_TOKENS: Final = 512
CONTEXT: Final = 1024
"""Tokens that a row has pages for."""
TOLERANCE: Final = 0.1
"""Largest allowed distance of a token's vector: the length of the difference over that of the vector. Meant to be far above
rounding (an H200 differs by 0.024 with the layers of Llama-3.1-8B), and far below the distance of a token that saw wrong pages."""

_STEPS: Final[Mapping[ProgramKind, tuple[tuple[tuple[int, int, int], ...], ...]]] = MappingProxyType(
    {
        "mixed": (
            ((0, 0, 330), (1, 0, 150)),
            ((0, 330, 1), (1, 150, 1), (2, 0, 500)),
            ((0, 331, 1), (2, 500, 510)),
        ),
        "decode": (((0, 332, 1), (1, 151, 1), (2, 1010, 1)),),
    }
)
"""Steps of each kind of program. For each row: (request, tokens computed before, tokens that the step computes)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The distance between the results of the kernels and of XLA."""

    largest: float
    """The largest of all tokens, or in a model with experts the largest median of a step; see TOLERANCE."""

    @property
    def error(self) -> str | None:
        """None if the difference is small enough."""
        if self.largest <= TOLERANCE:  # which NaN is not
            return None
        return f"a token's vector differs from XLA's by {self.largest:.3g} of its length, {TOLERANCE:g} are allowed"


def compare(config: Config, decoder: DecoderConfig, chip: Chip, on_reference: Callable[[], None]) -> Difference | None:
    """Return the difference that the kernels make; None if the model would be served without any.

    on_reference: called when everything except the kernels has worked.
    """
    config = _one_rank(config)
    decoder = decoder.with_context(config.model.max_model_len).for_devices(config.parallel.tensor_parallel_size)
    model = replace(decoder, layers=one_of_each_kind(decoder.layers), vocab_size=min(decoder.vocab_size, MAX_VOCAB))
    policy = make_policy(config, model, chip)
    if policy.backend in XLA | NATIVE:
        return None
    return difference(config, model, chip, policy, on_reference)


def one_of_each_kind(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Return the layers that differ. A layer that takes what an earlier one has (keys and values, or the choice of its indexer) takes it from
    one of that kind."""
    kinds: dict[LayerConfig, int] = {}
    places: list[int] = []
    for layer in layers:
        kv, index = (None if source is None else places[source] for source in (layer.kv_source, layer.index_source))
        recurrent = layer.recurrent
        if isinstance(recurrent, LightningConfig):  # every layer has a decay of its own
            recurrent = msgspec.structs.replace(recurrent, decay_scale=1.0)
        # Embeddings of several tokens have large tables, each of another size, and no kernel of their own.
        kind = replace(layer, kv_source=kv, index_source=index, recurrent=recurrent, ngram=None)
        places.append(kinds.setdefault(kind, len(kinds)))
    return tuple(kinds)


def _one_rank(config: Config) -> Config:
    """Return the config without data parallelism: every rank runs the same kernels on pages of its own."""
    parallel = config.parallel
    num_groups = max(1, parallel.expert_parallel_size // parallel.data_parallel_size)
    return replace(config, parallel=replace(parallel, data_parallel_size=1, expert_parallel_size=num_groups))


def difference(
    config: Config, model: DecoderConfig, chip: Chip, policy: DtypePolicy, on_reference: Callable[[], None]
) -> Difference:
    """Return the difference between the backend of `policy` and the reference."""
    sharding = make_sharding(model, mesh_shape(config.parallel))
    plain = make_skeleton(model, replace(policy, backend="reference", attention=None))
    params = random_params(plain, sharding)
    wanted = _vectors(config, plain, sharding, params, chip)
    on_reference()
    found = _vectors(config, make_skeleton(model, policy), sharding, params, chip)
    # A rounding may send a token to another expert, which is no error of a kernel: with experts the median counts.
    of_step = np.max if all(layer.experts is None for layer in model.layers) else np.median
    return Difference(float(np.max([of_step(_distances(*step)) for step in zip(found, wanted, strict=True)])))


def _distances(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the distance of each token; see TOLERANCE."""
    distances: np.ndarray = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return distances


def random_params(skeleton: ModelSkeleton, sharding: Sharding) -> tuple[jax.Array, ...]:
    """Return fixed random leaves in the types that the skeleton declares, large enough that attention matters."""
    experts = 1 if skeleton.config.experts is None else skeleton.config.experts.num_experts
    noise = np.random.default_rng(7).standard_normal(1_000_003, np.float32)  # a prime: no two rows are alike
    return tuple(
        jax.device_put(array, sharding.place(spec.axes))
        for leaf in skeleton.leaves
        for array, spec in zip(_random_arrays(leaf, noise, experts), leaf.arrays, strict=True)
    )


def _random_arrays(leaf: LeafSpec, noise: np.ndarray, num_experts: int) -> tuple[np.ndarray, ...]:
    if isinstance(leaf.declared, QuantArray):
        return leaf.declared.format.random(noise, leaf.declared, 1.3 / leaf.shape[-1] ** 0.5).arrays
    if np.issubdtype(leaf.declared.dtype, np.integer):  # numbers of experts
        return ((np.arange(math.prod(leaf.shape)) % num_experts).reshape(leaf.shape).astype(leaf.declared.dtype),)
    values: np.ndarray = np.resize(noise, leaf.shape)
    is_vector = len(leaf.own_shape) == 1
    if is_kv_scale(leaf.name):
        values = 0.04 + 0.002 * values  # keys and values are around 1
    elif is_vector:
        values = 0.3 * values if leaf.name.endswith("bias") else 1 + 0.2 * values
    else:
        values = 1.3 * values / leaf.shape[-1] ** 0.5
    return (values.astype(leaf.declared.dtype),)


def num_pages(page_size: int) -> int:
    """Return the pages of a row: of its `CONTEXT` tokens, the last page may have room for more."""
    return -(-CONTEXT // page_size)


def _vectors(
    config: Config, skeleton: ModelSkeleton, sharding: Sharding, params: tuple[jax.Array, ...], chip: Chip
) -> list[np.ndarray]:
    """Return the head's input of every token, step by step: float64 [tokens, D]."""
    groups, page_size = skeleton.config.cache.groups, page_tokens(chip.platform, config.cache.block_size)
    pages = num_pages(page_size)
    counts = [1 + 3 * pages if group.has_pages else 1 + NUM_ROWS for group in groups]
    shapes = cache_shapes(config, skeleton.config, skeleton.policy, chip.platform, counts)
    programs = _programs(config, skeleton.config, page_size, chip.platform)
    task = replace(GENERATION, step=forward)
    compiled = [lower(skeleton, sharding, each, shapes, task).compile() for each in programs]
    arrays = [
        jax.device_put(np.zeros(array.shape, array.dtype), sharding.place(array.axes))
        for group in shapes
        for array in group.arrays
    ]
    state = StateArrays(new_cache(shapes, arrays), None)
    vectors = []
    for program, executable in zip(programs, compiled, strict=True):
        for rows in _STEPS[program.kind]:
            plan = _plan(program, rows, pages, skeleton.config.vocab_size)
            state, (hidden,) = executable(params, state, pack(plan, program))
            vectors.append(np.asarray(hidden)[: plan.num_tokens].astype(np.float64))
    return vectors


def _programs(config: Config, decoder: DecoderConfig, page_size: int, platform: str) -> tuple[Program, ...]:
    """Return the tested programs: a mixed one, and the smallest and the largest decode step.

    Page tables are as wide as the server's: kernels depend on it, and on the number of rows.
    """
    limits = resolve_limits(platform, config.scheduler)
    longest, cache = decoder.max_position, decoder.cache
    width = -(-max(CONTEXT, min(longest, config.model.max_model_len or longest)) // page_size)
    sizes_of_cache = len(cache.paged), 1 + NUM_ROWS if cache.states else 0
    mixed = Program("mixed", MIXED_TOKENS, NUM_ROWS, width, 0, 1, *sizes_of_cache)
    sizes = dict.fromkeys((FEWEST_ROWS, max(FEWEST_ROWS, limits.max_num_seqs)))
    return (mixed, *(Program("decode", size, size, width, 0, 1, *sizes_of_cache) for size in sizes))


def _plan(program: Program, rows: tuple[tuple[int, int, int], ...], pages: int, vocab_size: int) -> StepPlan:
    owners, computed, counts = np.array(rows, np.int32).T
    token_ids = np.random.default_rng(rows[0]).integers(0, vocab_size, counts.sum(), np.int32)
    tables = np.zeros((len(rows), program.max_pages), np.int32)
    tables[:, :pages] = 1 + owners[:, None] * pages + np.arange(pages, dtype=np.int32)
    return StepPlan(
        kind=program.kind,
        bucket=program.num_tokens,
        request_ids=tuple(RequestId(f"self-test-{owner}") for owner in owners),
        slots=owners,
        num_scheduled_tokens=counts,
        num_computed_tokens=computed,
        token_ids=token_ids,
        block_tables=np.tile(tables, program.num_tables),
        is_sampling=np.ones(len(rows), np.bool_),
        sampling=np.tile(device_row(EngineSamplingParams(temperature=0.0)), (len(rows), 1)),
        length_limits=np.full(len(rows), np.iinfo(np.int32).max, np.int32),
        stop_token_ids=np.full((len(rows), MAX_STOP_TOKENS), -1, np.int32),
        num_top_logprobs=NO_LOGPROBS,
        state_slots=np.stack([np.where(computed > 0, 1 + owners, 0), 1 + owners], 1).astype(np.int32),
    )
