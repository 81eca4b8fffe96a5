"""Computes if an engine with given settings fits a device, with the engine's arithmetic on a described device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from jaxserve.checkpoint.source import resolve, resolve_model
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import DoesNotFitError
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_draft, read_mtp_layer
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.backend import Chip
from jaxserve.runner.buckets import resolve_limits
from jaxserve.runner.cache_sizes import CacheSizes, with_cache_groups
from jaxserve.runner.images.encoder import ImageShape, encoder_bytes, image_settings, image_step_tokens, rows_shape
from jaxserve.runner.inputs import DraftModel, Program, programs
from jaxserve.runner.limits import Limits, kv_context_bytes, make_limits, make_policy
from jaxserve.runner.memory import DeviceMemory, kv_bytes_left
from jaxserve.runner.slots import slots_bytes
from jaxserve.runner.speculation.model import draft_source, make_draft_model, with_drafter
from jaxserve.tools.planning.adapters import planned_adapters
from jaxserve.tools.planning.devices import Device
from jaxserve.tools.planning.sizes import Sizes, estimate_workspace, make_sizes, sharded_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """An engine that fits. Bytes are those of one memory: of one device, or of the whole CPU."""

    limits: Limits
    limit_bytes: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    """Estimated, with the slots of running requests."""
    images: ImageShape | None = None
    """None: the model is served for texts."""
    image_bytes: int = 0
    """Embeddings of images."""
    draft_bytes: int = 0
    """Weights of the draft model or the MTP layer, whose KV is part of `kv_bytes`."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are in use between steps, apart from slots."""
        return self.weights_bytes + self.draft_bytes + self.kv_bytes + self.image_bytes


def planned_policy(config: Config, decoder: DecoderConfig, device: Device) -> DtypePolicy:
    """Return the dtypes that the engine would choose."""
    return make_policy(config, decoder, planned_chip(device))


def planned_chip(device: Device) -> Chip:
    """Return the chip that the engine would find."""
    return Chip(device.platform, device.cuda.capability if device.cuda else None)


def model_sizes(config: Config, decoder: DecoderConfig, device: Device) -> Sizes:
    """Return the model's sizes in the dtypes and on the devices of `config`."""
    decoder = decoder.for_devices(config.parallel.tensor_parallel_size)
    policy = planned_policy(config, decoder, device)
    # The table of per-layer embeddings has a width for each layer, and adapters name the layers that they change.
    needs_all = policy.quant.plain_matrices or policy.quant.stored_kinds or decoder.per_layer_dim is not None
    layers = decoder.layers if needs_all or config.model.adapters else tuple(dict.fromkeys(decoder.layers))
    shown = replace(decoder, layers=layers)
    return make_sizes(_skeleton(shown, policy, planned_adapters(config, shown)), decoder)


def make_fit(config: Config, decoder: DecoderConfig, device: Device) -> Fit:
    """Divide the memory as the engine would. Raises DoesNotFitError, or another StartupError, with one line."""
    decoder = with_cache_groups(config, decoder.for_devices(config.parallel.tensor_parallel_size))
    config = image_settings(config, decoder, device.platform)
    sizes = model_sizes(config, decoder, device)
    weights = held_bytes(device, sizes, sizes.weights_bytes)
    draft = planned_draft(config, decoder, device)
    decoder = decoder if draft is None else with_drafter(config, decoder, draft.skeleton.config)
    drafting = 0 if draft is None else held_bytes(device, sizes, sharded_bytes(draft.skeleton))
    if weights + drafting >= device.limit_bytes:
        drafter = "draft model" if config.scheduler.speculative_method == "auto" else "MTP layer"
        both = f" and those of the {drafter} ({gib(drafting)})" if drafting else ""
        raise DoesNotFitError(
            f"the weights alone ({gib(weights)} in {sizes.stored_as}){both} are more than the {gib(device.limit_bytes)} "
            f"that {device.title} gives"
        )
    images = planned_images(config, decoder, device, sizes)
    embeddings = encoder = 0
    if images is not None:
        embeddings = images.num_bytes(sizes.activation_itemsize)
    if images is not None and decoder.vision is not None:
        encoder = encoder_bytes(decoder.vision, images.max_patches, sizes.activation_itemsize)
    kv_total, policy = config.cache.kv_cache_memory, planned_policy(config, decoder, device)
    if kv_total is None:
        num_slots = resolve_limits(device.platform, config.scheduler).max_num_seqs
        others = slots_bytes(num_slots, decoder.vocab_size) + embeddings + encoder
        memory = DeviceMemory(limit=device.limit_bytes, in_use=weights + drafting + held_bytes(device, sizes, others))
        whole = kv_context_bytes(config, decoder, policy, device.platform, draft)
        kv_total = kv_bytes_left(config.cache, device.platform, memory, sizes.kv_shards, whole)
    limits = make_limits(config, decoder, policy, device.platform, kv_total, draft)
    fit = Fit(
        limits=limits,
        limit_bytes=device.limit_bytes,
        weights_bytes=weights,
        kv_bytes=cache_bytes(device, sizes, limits.cache),
        workspace_bytes=held_bytes(device, sizes, _workspace(sizes, limits, encoder)),
        images=images,
        image_bytes=held_bytes(device, sizes, embeddings),
        draft_bytes=drafting,
    )
    if fit.held_bytes + fit.workspace_bytes > fit.limit_bytes:
        rows = f"embeddings of images or prompts ({gib(fit.image_bytes)}), " if fit.image_bytes else ""
        raise DoesNotFitError(
            f"weights ({gib(fit.weights_bytes + fit.draft_bytes)}), KV cache ({gib(fit.kv_bytes)}), {rows}and workspace "
            f"({gib(fit.workspace_bytes)}, estimated) are more than the {gib(fit.limit_bytes)} that {device.title} gives"
        )
    return fit


def planned_draft(config: Config, decoder: DecoderConfig, device: Device) -> DraftModel | None:
    """Return the draft model or the MTP layer of an engine; None without one. Tokenizers are not compared. Raises StartupError."""
    name = draft_source(config)
    if name is None:
        return None
    is_mtp = config.scheduler.speculative_method == "mtp"
    draft = _read_draft(name, config.model if is_mtp else None)
    return make_draft_model(config, decoder, draft, planned_chip(device))


@lru_cache(maxsize=2)
def _read_draft(name: str, model: ModelConfig | None) -> DecoderConfig:
    """Return the config of the draft model `name`, or of the MTP layer of `model`."""
    if model is None:
        return read_draft(resolve(name, weights=False))
    return read_mtp_layer(resolve_model(model, weights=False))[0]


def planned_images(config: Config, decoder: DecoderConfig, device: Device, sizes: Sizes) -> ImageShape | None:
    """Return the sizes of the image encoder's programs and embeddings; None if the model reads tokens only."""
    work = image_step_tokens(device.platform, config.images) * sizes.num_layer_weights // sizes.num_devices
    return rows_shape(decoder, config.images, device.platform, sizes.activation_itemsize, work)


def held_bytes(device: Device, sizes: Sizes, bytes_per_device: int) -> int:
    """Return the bytes in one memory: the "devices" of a CPU share one."""
    return bytes_per_device * (sizes.num_devices if device.platform == "cpu" else 1)


def cache_bytes(device: Device, sizes: Sizes, cache: CacheSizes) -> int:
    """Return the bytes of the cache in one memory."""
    return held_bytes(device, sizes, cache.num_bytes // sizes.kv_shards)


def gib(num_bytes: float) -> str:
    """Return bytes as text with a unit."""
    if num_bytes < 1 << 20:
        return f"{num_bytes / (1 << 10):,.1f} KiB"
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):,.1f} MiB"
    return f"{num_bytes / (1 << 30):,.2f} GiB"


def _workspace(sizes: Sizes, limits: Limits, encoder: int) -> int:
    slots = slots_bytes(limits.buckets.max_num_seqs, sizes.decoder.vocab_size)
    return slots + max(
        encoder,
        *(
            estimate_workspace(sizes, *_step_tokens(program))
            for program in programs(limits.buckets, *limits.program_sizes)
        ),
    )


def _step_tokens(program: Program) -> tuple[int, int]:
    """Return the tokens of a step, and those after which it samples."""
    if program.kind != "speculate":
        return program.num_tokens, program.num_rows
    return program.num_rows * program.max_steps, program.num_rows * program.max_steps


@lru_cache(maxsize=64)  # candidates of an advice, and models that a server has together
def _skeleton(decoder: DecoderConfig, policy: DtypePolicy, adapters: AdaptersConfig | None) -> ModelSkeleton:
    return make_skeleton(decoder, policy, adapters)
