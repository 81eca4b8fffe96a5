"""All of an engine for vectors that is known before its weights are read: shapes, devices, limits, programs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.sentence import SentenceModules, read_sentence_modules
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.executor.preparation import first_device
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton, make_encoder_skeleton, make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.buckets import embed_buckets, embed_limits
from jaxserve.runner.embed_inputs import embed_programs, pool_pages
from jaxserve.runner.inputs import Program
from jaxserve.runner.limits import kv_cache_dtype, kv_spec, make_encoder_policy, make_policy
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.program_key import host_facts, program_key
from jaxserve.runner.steps import abstract_params, lower_embedding
from jaxserve.runner.warmup import MadeProgram, Progress, compile_all
from jaxserve.scheduler.embed_plan import EmbedBuckets
from jaxserve.sharding.mesh import Sharding, make_sharding
from jaxserve.types import Pooling

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmbedPreparation:
    """One model on one set of devices, without its numbers."""

    device: jax.Device
    skeleton: ModelSkeleton | EncoderSkeleton
    sharding: Sharding
    buckets: EmbedBuckets
    max_model_len: int
    pooling: Pooling
    normalizes: bool
    kv_dtype: jnp.dtype
    page_size: int
    """Tokens; of an encoder, whose pages are only counted, 1."""
    pool_shape: tuple[int, ...] | None
    """Of a decoder's pages; None for an encoder."""

    @property
    def scores_pairs(self) -> bool:
        """Whether it is a cross-encoder: texts are pairs, and their vectors one number."""
        return isinstance(self.skeleton.config, EncoderConfig) and self.skeleton.config.scoring is not None

    @property
    def programs(self) -> tuple[Program, ...]:
        """All that this engine needs, largest first."""
        return embed_programs(self.buckets, -(-self.max_model_len // self.page_size))

    @property
    def summary(self) -> str:
        """What the settings left open, under their names."""
        return (
            f"task=embed pooling={self.pooling} max_num_seqs={self.buckets.max_num_seqs} "
            f"max_num_batched_tokens={max(self.buckets.tokens)} max_model_len={self.max_model_len}"
        )

    def make_programs(self, cache: ProgramCache, num_threads: int, progress: Progress) -> dict[Program, MadeProgram]:
        """Load or compile all of them. Needs no weights."""
        params = abstract_params(self.skeleton, self.sharding)
        key = program_key(
            host_facts(),
            "embed",
            self.pooling,
            self.skeleton.config,
            self.skeleton.policy,
            params,
            self.sharding,
            self.pool_shape,
            self.kv_dtype,
        )

        def lower_one(program: Program) -> jax.stages.Lowered:
            return lower_embedding(self.skeleton, self.sharding, program, self.pooling, self.pool_shape, self.kv_dtype)

        return compile_all(
            lower_one, key, self.sharding, self.programs, cache, num_threads=num_threads, progress=progress
        )


def prepare_embedding(config: Config, model: DecoderConfig | EncoderConfig, path: Path) -> EmbedPreparation:
    """Size the engine. Raises StartupError in one line."""
    size = config.parallel.tensor_parallel_size
    device = first_device(size)
    chip = chip_of(device)
    kv_dtype = kv_cache_dtype(config, device.platform)
    modules = read_sentence_modules(path) if path.is_dir() else None
    skeleton: ModelSkeleton | EncoderSkeleton
    if isinstance(model, EncoderConfig):
        skeleton, page_size = make_encoder_skeleton(model, make_encoder_policy(config, chip)), 1
    else:
        model = model.with_context(config.model.max_model_len)
        model = replace(model, tied_embeddings=True)  # so that no memory goes into a head that nobody asks
        skeleton, page_size = make_skeleton(model, make_policy(config, model, chip)), config.cache.block_size
    limits = embed_limits(device.platform, config.scheduler, config.model.max_model_len)
    buckets = embed_buckets(device.platform, limits)
    pool_shape = None
    if isinstance(model, DecoderConfig):
        spec = kv_spec(config, model, device.platform)
        pool_shape = (spec.num_layers, pool_pages(buckets, page_size), spec.num_kv_heads, page_size, spec.head_dim)
    return EmbedPreparation(
        device=device,
        skeleton=skeleton,
        sharding=make_sharding(model, size),
        buckets=buckets,
        max_model_len=_max_model_len(config, model, modules, limits.max_num_batched_tokens),
        pooling=_pooling(config, model, modules),
        normalizes=modules is None or modules.normalizes,
        kv_dtype=kv_dtype,
        page_size=page_size,
        pool_shape=pool_shape,
    )


def _pooling(config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None) -> Pooling:
    """What is asked for, what the checkpoint says, or what its kind of model is trained for."""
    if isinstance(model, EncoderConfig) and model.scoring is not None:
        if config.model.pooling not in ("auto", "cls"):
            raise ConfigError(f"--pooling {config.model.pooling}: a cross-encoder scores with the first token")
        return "cls"
    if config.model.pooling != "auto":
        return config.model.pooling
    if modules is not None:
        return modules.pooling
    return "mean" if isinstance(model, EncoderConfig) else "last"


def _max_model_len(
    config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None, max_tokens: int
) -> int:
    """The longest text: a step has to hold it whole."""
    wanted, declared = config.model.max_model_len, model.max_position
    if wanted is None:
        trained = declared if modules is None or modules.max_tokens is None else min(declared, modules.max_tokens)
        if trained > max_tokens:
            _LOG.warning("texts may have %d of %d tokens: --max-num-batched-tokens", max_tokens, trained)
        return min(trained, max_tokens)
    if wanted > declared:
        raise ConfigError(f"--max-model-len {wanted} is more than the {declared} tokens the model was made for")
    if wanted > max_tokens:
        raise ConfigError(
            f"--max-model-len {wanted} is more than --max-num-batched-tokens {max_tokens}: a text is embedded in one step"
        )
    return wanted
