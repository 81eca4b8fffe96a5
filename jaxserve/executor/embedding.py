"""The parts of an engine that embeds: its model with the layers after the pooling, its sizes, and the description of its vectors."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from jaxserve.checkpoint.sentence.modules import SentenceModules, read_sentence_modules
from jaxserve.checkpoint.sentence.texts import TextSettings
from jaxserve.checkpoint.sentence.tokens import token_ids
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.routed_experts import routed_experts_info
from jaxserve.ipc.messages import EmbeddingInfo
from jaxserve.kv.spec import KVSpec
from jaxserve.layers.cache import CacheShapes
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton, make_encoder_skeleton, make_skeleton
from jaxserve.runner.backend import Chip
from jaxserve.runner.buckets import embed_buckets, resolve_embed_limits
from jaxserve.runner.cache_sizes import CacheSizes, slot_bytes
from jaxserve.runner.embedding import pool_pages
from jaxserve.runner.limits import Limits, cache_shapes, kv_cache_dtype, kv_specs, make_encoder_policy, make_policy
from jaxserve.scheduler.plan import Buckets
from jaxserve.types import Pooling

_LOG = logging.getLogger(__name__)


def read_modules(config: ModelConfig, path: Path) -> SentenceModules | None:
    """Read what comes after the model at `path`: its files of sentence-transformers, and the tokens that the settings name.

    None if neither says anything. Raises CheckpointError, and ConfigError for tokens that the model does not have.
    """
    modules = read_sentence_modules(path) if path.is_dir() else None
    if config.classifier_from_token is None:
        return modules
    names = [name.strip() for name in config.classifier_from_token.split(",")]
    tokens = token_ids(path, names)[::-1]  # that of a match comes last in the setting
    return replace(modules or SentenceModules(None, False, None), logit_tokens=tokens)


def make_embedding_skeleton(
    config: Config, model: DecoderConfig | EncoderConfig, chip: Chip, modules: SentenceModules | None = None
) -> ModelSkeleton | EncoderSkeleton:
    """Declare the model of an engine that embeds. Raises ConfigError for settings that such an engine cannot have."""
    routed_experts_info(config, model)
    config.check_embeds()
    model = _with_head(model, modules)
    if isinstance(model, EncoderConfig):
        return make_encoder_skeleton(model, make_encoder_policy(config, chip))
    model = model.with_context(config.model.max_model_len).for_devices(config.parallel.tensor_parallel_size)
    model = replace(model, tied_embeddings=True)  # no memory goes into an unused head
    return make_skeleton(model, make_policy(config, model, chip))


def _with_head(model: DecoderConfig | EncoderConfig, modules: SentenceModules | None) -> DecoderConfig | EncoderConfig:
    """Return the config with the layers that come after the pooling. Raises ConfigError if they do not fit the model."""
    if modules is None:
        return model
    if model.head is not None and model.head.labels:
        activation = modules.texts.activation if len(model.head.labels) == 1 else None
        return model if activation is None else replace(model, head=replace(model.head, activation=activation))
    if modules.logit_tokens:
        return _with_head(replace(model, head=_logit_head(model, modules.logit_tokens)), modules)
    if not modules.dense:
        return model
    before = () if model.head is None else model.head.layers
    width = model.hidden_size if model.head is None else model.head.size
    for layer in modules.dense:
        if layer.in_dim != width:
            raise ConfigError(f"{layer.name}: takes {layer.in_dim} numbers, and what is before it makes {width}")
        width = layer.out_dim
    return replace(model, head=EmbeddingHead((*before, *modules.dense)))


def _logit_head(model: DecoderConfig | EncoderConfig, tokens: tuple[int, ...]) -> EmbeddingHead:
    """Return the head whose score is the difference of two tokens' logits after the text, or one token's, through a sigmoid."""
    setting = "scores from the logits of tokens"
    if isinstance(model, EncoderConfig) or model.is_bidirectional:
        raise ConfigError(f"{setting}: an encoder has none")
    if max(tokens) >= model.vocab_size:
        raise ConfigError(f"{setting}: token {max(tokens)} is not one of the {model.vocab_size} of this model")
    if model.logit_softcap is not None or model.logit_layer or model.lm_head_bias or model.logit_scale != 1:
        raise ConfigError(f"{setting}: not for models that scale or cap their logits, or add a bias")
    layer = HeadLayer("output head", model.hidden_size, 1, has_bias=False, token_ids=tokens)
    return EmbeddingHead((layer,), "last", ("LABEL_0",), "sigmoid")


_NO_PAGES = KVSpec(num_layers=0, num_kv_heads=0, head_dim=0, dtype_bytes=0, block_size=1)
"""An encoder's pages: one per token, only counted."""


def embed_limits(
    config: Config, skeleton: ModelSkeleton | EncoderSkeleton, platform: str, modules: SentenceModules | None
) -> Limits:
    """Return the sizes of an engine that embeds. Raises ConfigError."""
    if isinstance(skeleton, ModelSkeleton) and skeleton.config.has_whole_prompts:
        raise ConfigError("this model sees prompts whole: it generates, and embeds no texts")
    step = resolve_embed_limits(platform, config.scheduler, config.model.max_model_len)
    buckets = embed_buckets(platform, step)
    cache, shapes = CacheSizes((_NO_PAGES,), (0,)), None
    if isinstance(skeleton, ModelSkeleton):
        cache, shapes = _embed_cache(config, skeleton, platform, buckets)
    max_model_len = _max_model_len(config, skeleton.config, modules, step.max_num_batched_tokens)
    return Limits(
        cache=cache,
        shapes=shapes,
        kv_dtype=kv_cache_dtype(config, platform),
        max_model_len=max_model_len,
        max_pages=-(-max_model_len // cache.specs[0].block_size),
        buckets=buckets,
    )


def _embed_cache(
    config: Config, skeleton: ModelSkeleton, platform: str, buckets: Buckets
) -> tuple[CacheSizes, CacheShapes]:
    """Return the pages that hold any step in each group, and the one state slot that all texts begin at."""
    decoder, policy = skeleton.config, skeleton.policy
    specs, states = kv_specs(config, decoder, platform), decoder.cache.states
    num_blocks, num_slots = pool_pages(buckets, specs[0].block_size), 1 if states else 0
    num_blocks = 1 if decoder.is_bidirectional else num_blocks  # nothing is written
    held = slot_bytes(decoder, policy.activations, policy.rules)
    counts = [num_blocks if group.has_pages else num_slots for group in decoder.cache.groups]
    sizes = CacheSizes(specs, (num_blocks,) * len(specs), held, num_slots)
    return sizes, cache_shapes(config, decoder, policy, platform, counts)


def embedding_info(
    config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None
) -> EmbeddingInfo:
    """Describe the vectors of `model`. Raises ConfigError."""
    texts = TextSettings() if modules is None else modules.texts
    return EmbeddingInfo(
        size=model.hidden_size if model.head is None else model.head.size,
        pooling=_pooling(config, model, modules),
        normalizes=modules is None or modules.normalizes,
        prompts=dict(texts.prompts),
        default_prompt=texts.default_prompt,
        lowers_texts=texts.is_lowered,
        labels=() if model.head is None else model.head.labels,
        activation="none" if model.head is None else model.head.activation,
    )


def _pooling(config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None) -> Pooling:
    """Return the pooling of the settings, of the checkpoint, or of the model's kind."""
    if model.head is not None and model.head.pooling is not None:
        if config.model.pooling not in ("auto", model.head.pooling):
            raise ConfigError(f"--pooling {config.model.pooling}: this model scores with {model.head.pooling}")
        return model.head.pooling
    if config.model.pooling != "auto":
        return config.model.pooling
    if modules is None:
        return "mean" if isinstance(model, EncoderConfig) or model.is_bidirectional else "last"
    if modules.pooling is None:
        raise ConfigError("--pooling auto: modules.json lists no Pooling; name one: last, mean or cls")
    return modules.pooling


def _max_model_len(
    config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None, max_tokens: int
) -> int:
    """Return the tokens of the longest text: one step must hold it."""
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
