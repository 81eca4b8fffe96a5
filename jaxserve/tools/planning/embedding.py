"""Plans the memory of an engine that embeds, with the engine's own sizes; its programs are not compiled.

Texts are whole in a step, so there is no KV cache that requests share: a decoder keeps the keys and values of one step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.sentence.modules import SentenceModules
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.executor.embedding import embed_limits, embedding_info, make_embedding_skeleton, read_modules
from jaxserve.executor.preparation import resolve_task
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.registry import only_embeds, read_model_config, text_model
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.quant.names import NO_QUANTIZATION
from jaxserve.runner.limits import Limits
from jaxserve.sharding.rules import cache_shards
from jaxserve.tools.planning.advice import Advice, Attempt, device_counts, other_devices, smaller_dtypes
from jaxserve.tools.planning.devices import Device, Rates
from jaxserve.tools.planning.fit import gib, planned_chip
from jaxserve.tools.planning.plan import DevicePart, MemoryPart, ModelPart, Plan, StepPart
from jaxserve.tools.planning.sizes import estimate_workspace, make_sizes
from jaxserve.tools.planning.stored import bytes_by_dtype


@dataclass(frozen=True, slots=True)
class EmbeddingFit:
    """The sizes of an engine that embeds. Bytes are those of one memory: of one device, or of the whole CPU."""

    skeleton: ModelSkeleton | EncoderSkeleton
    limits: Limits
    weights_bytes: int
    kv_bytes: int
    """Keys and values of one step; 0 for an encoder."""
    workspace_bytes: int
    """Estimated activations of the largest step."""
    limit_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes left; negative if the engine does not fit."""
        return self.limit_bytes - self.weights_bytes - self.kv_bytes - self.workspace_bytes


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """A model that embeds, and the path of its config."""

    path: Path
    config: DecoderConfig | EncoderConfig
    modules: SentenceModules | None
    checkpoint: Checkpoint | None
    """None if there is only a config."""


def is_embedding(config: Config, path: Path) -> bool:
    """Return True if the engine of these settings embeds: by its task, or because the model does nothing else."""
    if config.model.task != "auto" or config.model.classifier_from_token is not None:
        return config.model.task != "generate"
    return (path / "config.json").is_file() and only_embeds(text_model(path, None))


def read_embedding_model(config: ModelConfig, path: Path) -> EmbeddingModel:
    """Read the config, and of weights what `read_model_config` reads. Raises CheckpointError with one line."""
    model, checkpoint = read_model_config(path)
    return EmbeddingModel(path, model, read_modules(config, path), checkpoint)


def plan_embedding(
    config: Config, model: EmbeddingModel, device: Device, rates: Rates | None, notes: Sequence[str] = ()
) -> Plan:
    """Return the plan of an engine that embeds. Raises a StartupError in one line for settings that it cannot have."""
    resolve_task(config.model, model.config)
    fit = fit_embedding(config, model, device)
    policy, limits = fit.skeleton.policy, fit.limits
    pooling = embedding_info(config, model.config, model.modules).pooling
    by_dtype = {} if model.checkpoint is None else bytes_by_dtype(model.checkpoint)
    reason = None
    if fit.free_bytes < 0:
        reason = (
            f"weights ({gib(fit.weights_bytes)}), keys and values of a step ({gib(fit.kv_bytes)}) and workspace "
            f"({gib(fit.workspace_bytes)}, estimated) are more than the {gib(fit.limit_bytes)} that {device.title} gives"
        )
    is_plain = policy.quant.name == NO_QUANTIZATION
    return Plan(
        task="embed",
        model=ModelPart(
            path=str(model.path),
            num_parameters=sum(math.prod(leaf.shape) for leaf in fit.skeleton.leaves),
            num_layers=model.config.num_layers,
            max_position=model.config.max_position,
            stored_bytes=sum(by_dtype.values()) if by_dtype else None,
            stored_dtypes=tuple(by_dtype),
        ),
        device=DevicePart(
            name=device.name,
            title=device.title,
            count=config.parallel.num_devices,
            memory_bytes=device.memory_bytes,
            limit_bytes=device.limit_bytes,
            rates=rates,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
        ),
        weights_stored_as=str(policy.weights) if is_plain else policy.quant.name,
        arithmetic=policy.quant.format.arithmetic or str(policy.activations),
        weights_bytes=fit.weights_bytes,
        kv_bytes_per_token=0,
        fits=reason is None,
        reason=reason,
        advice=() if reason is None else _advice(config, model, device),
        notes=(*notes, f"embeds: one vector per text ({pooling}); its programs are not compiled by `plan`"),
        memory=MemoryPart(
            limit_bytes=fit.limit_bytes,
            weights_bytes=fit.weights_bytes,
            kv_bytes=fit.kv_bytes,
            workspace_bytes=fit.workspace_bytes,
            workspace_is="estimated",
            free_bytes=fit.free_bytes,
        ),
        step=StepPart(
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.buckets.max_num_seqs,
            max_num_batched_tokens=max(limits.buckets.mixed),
            decode_rows=(),
            mixed_tokens=limits.buckets.mixed,
        ),
    )


def fit_embedding(config: Config, model: EmbeddingModel, device: Device) -> EmbeddingFit:
    """Return the sizes of the engine on a device. Raises ConfigError for settings that it cannot have."""
    skeleton = make_embedding_skeleton(config, model.config, planned_chip(device), model.modules)
    limits = embed_limits(config, skeleton, device.platform, model.modules)
    rules = skeleton.policy.rules
    weights = sum(
        array.num_bytes // math.prod(rules.count(axis) for axis in array.axes)
        for leaf in skeleton.leaves
        for array in leaf.arrays
    )
    kv_bytes, num_tokens = limits.cache.num_bytes, max(limits.buckets.mixed)
    if isinstance(skeleton, ModelSkeleton):
        workspace = estimate_workspace(make_sizes(skeleton), num_tokens, 0)
        kv_bytes //= cache_shards(skeleton.config, rules)
    else:  # residual, its norm, and the widest point of a layer before and after its activation
        width = 2 * skeleton.config.hidden_size + 2 * skeleton.config.intermediate_size // rules.count("ffn")
        workspace = num_tokens * width * skeleton.policy.activations.itemsize
    num_in_memory = config.parallel.num_devices if device.platform == "cpu" else 1
    return EmbeddingFit(
        skeleton=skeleton,
        limits=limits,
        weights_bytes=weights * num_in_memory,
        kv_bytes=kv_bytes * num_in_memory,
        workspace_bytes=workspace * num_in_memory,
        limit_bytes=device.limit_bytes,
    )


def _advice(config: Config, model: EmbeddingModel, device: Device) -> tuple[Advice, ...]:
    """Return the smallest change of each kind with which the engine fits."""
    kinds: list[Iterator[Attempt]] = [smaller_dtypes(config, device), other_devices(config, device)]
    if isinstance(model.config, DecoderConfig):
        kinds.append(device_counts(config, device))
    found = (next(_that_fit(kind, model), None) for kind in kinds)
    return tuple(itertools.chain(filter(None, found)))


def _that_fit(attempts: Iterator[Attempt], model: EmbeddingModel) -> Iterator[Advice]:
    for tried in attempts:
        with contextlib.suppress(ConfigError, DoesNotFitError):
            fit = fit_embedding(tried.config, model, tried.device)
            if fit.free_bytes >= 0:
                yield Advice(tried.change, fit.limits.max_model_len, 0)
