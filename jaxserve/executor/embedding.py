"""Sizes and pooling of an engine that embeds, from settings, model and the files of sentence-transformers."""

from __future__ import annotations

import logging

from jaxserve.checkpoint.sentence import SentenceModules
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import EmbeddingInfo
from jaxserve.kv.spec import KVSpec
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.runner.buckets import embed_buckets, resolve_embed_limits
from jaxserve.runner.embedding import pool_pages
from jaxserve.runner.limits import Limits, kv_cache_dtype, kv_spec
from jaxserve.types import Pooling

_LOG = logging.getLogger(__name__)
_NO_PAGES = KVSpec(num_layers=0, num_kv_heads=0, head_dim=0, dtype_bytes=0, block_size=1)
"""An encoder's pages: one per token, only counted."""


def embed_limits(
    config: Config, model: DecoderConfig | EncoderConfig, platform: str, modules: SentenceModules | None
) -> Limits:
    """Return the sizes of an engine that embeds. Raises ConfigError."""
    step = resolve_embed_limits(platform, config.scheduler, config.model.max_model_len)
    buckets = embed_buckets(platform, step)
    spec = kv_spec(config, model, platform) if isinstance(model, DecoderConfig) else _NO_PAGES
    return Limits(
        spec=spec,
        kv_dtype=kv_cache_dtype(config, platform),
        num_blocks=pool_pages(buckets, spec.block_size) if spec.num_layers else 0,
        max_model_len=_max_model_len(config, model, modules, step.max_num_batched_tokens),
        buckets=buckets,
    )


def embedding_info(
    config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None
) -> EmbeddingInfo:
    """Describe the vectors of `model`. Raises ConfigError."""
    scores_pairs = isinstance(model, EncoderConfig) and model.scoring is not None
    return EmbeddingInfo(
        size=1 if scores_pairs else model.hidden_size,
        pooling=_pooling(config, model, modules),
        normalizes=modules is None or modules.normalizes,
        scores_pairs=scores_pairs,
    )


def _pooling(config: Config, model: DecoderConfig | EncoderConfig, modules: SentenceModules | None) -> Pooling:
    """Return the pooling of the settings, of the checkpoint, or of the model's kind."""
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
