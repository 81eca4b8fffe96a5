"""The draft model of an engine, and the settings that it works with."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.backend import Chip
from jaxserve.runner.inputs import DraftModel
from jaxserve.runner.limits import make_policy


def make_draft_model(config: Config, decoder: DecoderConfig, draft: DecoderConfig, chip: Chip) -> DraftModel:
    """Declare the draft model `draft` for the model `decoder`. All of its layers keep the keys of the whole text.

    Raises ConfigError.
    """
    check_draft_model(config, decoder, draft)
    draft = replace(draft.with_context(config.model.max_model_len), splits_windows=False, vision=None)
    return DraftModel(make_skeleton(draft, make_policy(config, draft, chip)), config.scheduler.num_speculative_tokens)


def check_draft_model(config: Config, decoder: DecoderConfig, draft: DecoderConfig) -> None:
    """Raise ConfigError for a draft model that is not served, or for a setting that does not work with one."""
    name = f"--speculative-model {config.scheduler.speculative_model}"
    if not config.scheduler.num_speculative_tokens:
        raise ConfigError(f"{name}: set --num-speculative-tokens, the tokens of a draft; 3 is a good start")
    others = {
        "--num-hosts": config.hosts.num_hosts,
        "--tensor-parallel-size": config.parallel.tensor_parallel_size,
        "--data-parallel-size": config.parallel.data_parallel_size,
        "--expert-parallel-size": config.parallel.expert_parallel_size,
    }
    for flag, value in others.items():
        if value > 1:
            raise ConfigError(f"{name}: not with {flag} {value}; a draft model runs on one device")
    if config.tiers.has_stores:
        raise ConfigError(
            f"{name}: not with {', '.join(config.tiers.settings)}: keys of the draft model are not stored"
        )
    if config.compile.deterministic:
        raise ConfigError(f"{name}: not with --deterministic, with which it was not tested")
    if decoder.vision is not None:
        raise ConfigError(
            f"{name}: not with a model that reads images; --limit-mm-per-prompt image=0 serves it for text"
        )
    if decoder.cache.states:
        raise ConfigError(f"{name}: not with a model with recurrent states, which cannot go back")
    if draft.cache.states:
        raise ConfigError(f"{name}: a draft model with recurrent states is not served; choose one with attention only")
