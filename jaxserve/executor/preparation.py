"""An engine before its weights are read: the model's shape, the devices, the limits, the programs.

Starting an engine and filling a compile cache for another machine both begin here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxserve.checkpoint.sentence.modules import SentenceModules
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.device import first_device
from jaxserve.executor.embedding import embed_limits, embedding_info, make_embedding_skeleton
from jaxserve.executor.hosts.agreement import ONE_HOST, Hosts, agree_smallest
from jaxserve.executor.routed_experts import routed_experts_info
from jaxserve.ipc.messages import EmbeddingInfo
from jaxserve.layers.cache import CacheShapes
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.skeleton import (
    DecoderSkeleton,
    EncoderSkeleton,
    ModelSkeleton,
    make_skeleton,
)
from jaxserve.models.step_work import step_work
from jaxserve.quant.array import array_bytes
from jaxserve.runner.backend import chip_of
from jaxserve.runner.buckets import resolve_limits
from jaxserve.runner.cache_sizes import with_cache_groups
from jaxserve.runner.determinism import check_deterministic
from jaxserve.runner.embedding import embedding_task
from jaxserve.runner.host.cores import num_cores
from jaxserve.runner.images.encoder import ImageShape, encoder_bytes, image_settings, image_step_tokens, rows_shape
from jaxserve.runner.images.parts import EncoderParts, SharedParams, part_ends
from jaxserve.runner.images.programs import with_images
from jaxserve.runner.inputs import Program, StepTask
from jaxserve.runner.kv_scales.measurement import KVScaleMeasurement, make_measurement
from jaxserve.runner.limits import Limits, context_notes, kv_context_bytes, make_limits, make_policy, mesh_shape
from jaxserve.runner.memory import kv_cache_bytes
from jaxserve.runner.pages import page_batches
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.program_key import host_key_parts
from jaxserve.runner.slots import slots_bytes
from jaxserve.runner.speculation.model import make_draft_model, with_drafter
from jaxserve.runner.speculation.task import engine_task
from jaxserve.runner.state import StateProgram, StateShapes
from jaxserve.runner.steps import GENERATION, abstract_params
from jaxserve.runner.warmup import MadeProgram, Progress, cached_programs, make_programs, make_state_programs
from jaxserve.sharding.mesh import Sharding, host_devices, make_sharding
from jaxserve.sharding.rules import cache_shards

MAX_COMPILE_THREADS = 8
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Preparation:
    """One model on one set of devices, without its weights."""

    device: jax.Device
    skeleton: ModelSkeleton | EncoderSkeleton
    sharding: Sharding
    limits: Limits
    task: StepTask[Any, Any] = GENERATION
    embedding: EmbeddingInfo | None = None
    """None: the engine generates."""
    has_tiers: bool = False
    """True if pages are copied between the pool and the host."""
    images: ImageShape | None = None
    """None: the model reads tokens only."""
    encoder_parts: EncoderParts = ()
    """Numbers of patches and the ends of the parts of encoder calls: see `ImageInfo.encoder_parts`."""
    held_bytes: int = 0
    """Bytes of weights, slots and embeddings of images: on each device, or on this host if that is a CPU."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every program that this engine needs, largest first."""
        own = self.task.programs(self.limits.buckets, *self.limits.program_sizes)
        return own if self.images is None else with_images(own, self.images)

    @property
    def shared_params(self) -> SharedParams | None:
        """Parameters of the programs that layers of the image encoder share; None if there are none."""
        return None if self.images is None or self.images.tiles is None else SharedParams(self.skeleton)

    @property
    def summary(self) -> str:
        """The values that the settings left open, by setting."""
        pooling = "" if self.embedding is None else f"task=embed pooling={self.embedding.pooling} "
        images = ""
        if self.images is not None:
            images = f" max_image_patches={self.images.max_patches}" if self.images.buckets else ""
            images += f" {'image' if images else 'prompt'}_embeddings={self.images.num_rows}"
        return pooling + self.limits.summary + images

    def key_parts(self) -> dict[str, str]:
        """Return everything that the cache keys of the programs depend on, by name."""
        limits, policy = self.limits, self.skeleton.policy
        adapters = self.skeleton.adapters
        model = hashlib.sha256(repr((self.skeleton.config, self.skeleton.leaves)).encode()).hexdigest()[:16]
        return (
            host_key_parts()
            | {
                "task": self.task.name,
                "model config": model,
                "dtype policy": str(policy),
                "adapters": "none" if adapters is None else f"{adapters.count} of rank {adapters.rank}",
                "devices": " ".join(f"{axis}={size}" for axis, size in self.sharding.rules.sizes),
                "KV dtype": str(limits.kv_dtype),
                "KV page tokens": str(limits.spec.block_size),
                "KV pages": " ".join(map(str, limits.cache.num_blocks)),
                "state slots": str(limits.cache.num_state_slots),
                "pages per request": str(limits.max_pages),
                "decode buckets": " ".join(map(str, limits.buckets.decode)),
                "mixed buckets": " ".join(map(str, limits.buckets.mixed)),
                "requests at a time": str(limits.buckets.max_num_seqs),
                "burst": str(limits.buckets.max_decode_steps),
            }
            | ({} if self.images is None else {"images": str(self.images)})
        )

    @property
    def state_shapes(self) -> StateShapes:
        return StateShapes(
            self.limits.shapes,
            self.limits.buckets.max_num_seqs if self.embedding is None else 0,
            self.skeleton.config.vocab_size,
            self.limits.max_pages if self.task.keeps_tables else 0,
            self.skeleton.policy.backend,
            page_batches(self.limits.cache.page_bytes) if self.has_tiers else (),
            self.images,
            self.skeleton.policy.activations,
            0 if self.task.draft_model is None else self.task.draft_model.num_drafts,
        )

    def make_programs(
        self, cache: ProgramCache, progress: Progress, late: Collection[Program] = ()
    ) -> dict[Program, MadeProgram]:
        """Load or compile the step programs but the late ones. Needs no weights."""
        wanted = [program for program in self.programs if program not in late]
        num_threads = min(num_cores(), MAX_COMPILE_THREADS)
        return make_programs(*self._shapes, wanted, cache, num_threads=num_threads, progress=progress)

    def make_program(self, program: Program, cache: ProgramCache) -> MadeProgram:
        """Load or compile one step program."""
        return make_programs(*self._shapes, [program], cache, num_threads=1, progress=lambda *_: None)[program]

    def cached_programs(self, cache: ProgramCache, wanted: Sequence[Program]) -> frozenset[Program]:
        """Return those of the wanted step programs that the cache of this host has."""
        return cached_programs(*self._shapes, wanted, cache)

    @property
    def _shapes(self) -> tuple[StepTask[Any, Any], ModelSkeleton | EncoderSkeleton, Sharding, CacheShapes | None]:
        return self.task, self.skeleton, self.sharding, self.limits.shapes

    def make_kv_scales(self, cache: ProgramCache) -> KVScaleMeasurement | None:
        """Load or compile the program that measures scales of the KV cache; None if none are measured."""
        if not isinstance(self.skeleton, ModelSkeleton):
            return None
        return make_measurement(self.skeleton, self.sharding, self.limits.num_ranks, cache)

    def make_state_programs(self, cache: ProgramCache) -> dict[StateProgram, MadeProgram]:
        """Load or compile the state programs."""
        return make_state_programs(self.state_shapes, self.sharding, cache)


def resolve_task(config: ModelConfig, model: DecoderConfig | EncoderConfig) -> Literal["generate", "embed"]:
    """Return the task that `config` asks for, or that `model` is made for. Raises ConfigError if `model` cannot do it."""
    only_embeds = isinstance(model, EncoderConfig) or model.is_bidirectional or model.head is not None
    if config.task == "generate" and only_embeds:
        raise ConfigError(
            "--task generate: this model is an encoder, or scores texts: it makes no text; use embed or auto"
        )
    if config.task != "embed" and not only_embeds and config.classifier_from_token is None:
        config.check_generates()
        return "generate"
    return "embed"


def prepare(
    config: Config,
    model: DecoderConfig | EncoderConfig,
    adapters: AdaptersConfig | None = None,
    modules: SentenceModules | None = None,
    hosts: Hosts = ONE_HOST,
    draft: DecoderConfig | None = None,
) -> Preparation:
    """Size an engine for `model` and its `adapters`. Raises StartupError in one line, also when memory does not suffice.

    modules: how the checkpoint says that texts become vectors. hosts: those that the devices are divided over. draft: its
    draft model.
    """
    device = first_device(config.parallel.num_devices // config.hosts.num_hosts)
    if isinstance(model, EncoderConfig) or resolve_task(config.model, model) == "embed":
        return _prepare_embedding(config, model, modules, device)
    routed_experts_info(config, model)  # refuses a model without experts
    for note in context_notes(config, model):
        _LOG.info(note)
    shape = mesh_shape(config.parallel)
    model = model.with_context(config.model.max_model_len).for_devices(shape.tensor)
    model = with_cache_groups(config, model)
    model = model if draft is None else with_drafter(config, model, draft)
    config = image_settings(config, model, device.platform)
    policy = make_policy(config, model, chip_of(device))
    skeleton = make_skeleton(model, policy, adapters)
    check_deterministic(config, skeleton)
    sharding = make_sharding(model, shape, host_devices(shape.num_devices, config.hosts.num_hosts))
    kv_shards = cache_shards(model, sharding.rules)
    num_slots = resolve_limits(device.platform, config.scheduler).max_num_seqs
    itemsize = policy.activations.itemsize
    work = (
        image_step_tokens(device.platform, config.images) * step_work(skeleton).num_layer_weights // shape.num_devices
    )
    images = rows_shape(model, config.images, device.platform, itemsize, work)
    held_bytes = _weight_bytes(skeleton, sharding) + slots_bytes(num_slots, model.vocab_size)
    held_bytes += 0 if images is None else images.num_bytes(itemsize)
    if images is not None and model.vision is not None:
        held_bytes += encoder_bytes(model.vision, images.max_patches, itemsize)
    draft_model = None if draft is None else make_draft_model(config, model, draft, chip_of(device))
    held_bytes += 0 if draft_model is None else _weight_bytes(draft_model.skeleton, sharding)
    held_bytes *= shape.num_devices // config.hosts.num_hosts if device.platform == "cpu" else 1
    whole = kv_context_bytes(config, model, policy, device.platform, draft_model)
    own_bytes = kv_cache_bytes(config.cache, device, kv_shards, held_bytes, whole, config.parallel.replicas)
    kv_bytes = agree_smallest(hosts, "KV cache bytes", own_bytes)
    limits = make_limits(config, model, policy, device.platform, kv_bytes, draft_model)
    parts: EncoderParts = ()
    if model.vision is not None and images is not None and images.tiles is not None:
        parts = tuple(part_ends(model.vision, images.tiles, images.buckets, work))
    task = engine_task(config, model, device.platform, draft_model)
    return Preparation(
        device,
        skeleton,
        sharding,
        limits,
        task,
        has_tiers=config.tiers.has_stores,
        images=images,
        encoder_parts=parts,
        held_bytes=held_bytes,
    )


def _prepare_embedding(
    config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None, device: jax.Device
) -> Preparation:
    skeleton = make_embedding_skeleton(config, model, chip_of(device), modules)
    limits = embed_limits(config, skeleton, device.platform, modules)
    check_deterministic(config, skeleton)
    model_info = embedding_info(config, skeleton.config, modules)
    return Preparation(
        device,
        skeleton,
        make_sharding(
            skeleton.config,
            mesh_shape(config.parallel),
            host_devices(config.parallel.num_devices, config.hosts.num_hosts),
        ),
        limits,
        embedding_task(model_info.pooling, limits.spec.block_size, limits.max_model_len),
        model_info,
    )


def _weight_bytes(skeleton: DecoderSkeleton, sharding: Sharding) -> int:
    """Return the bytes of the weights on each device."""
    total = 0
    for leaf in abstract_params(skeleton, sharding):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        total += array_bytes(shape, leaf.dtype)
    return total
