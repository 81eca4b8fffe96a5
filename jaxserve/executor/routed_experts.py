"""Decides whether an engine returns the experts that tokens chose, and says how many a token has."""

from __future__ import annotations

from typing import Final

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig

_FLAG: Final = "--enable-return-routed-experts"


def routed_experts_info(config: Config, model: DecoderConfig | EncoderConfig) -> RoutedExpertsInfo | None:
    """Return the sizes of a token's experts; None if they are not returned. Raises ConfigError if they cannot be."""
    if not config.model.enable_return_routed_experts:
        return None
    if not isinstance(model, DecoderConfig) or config.model.task == "embed":
        raise ConfigError(f"{_FLAG}: a model that embeds returns no experts")
    if model.experts is None:
        raise ConfigError(f"{_FLAG}: this model has no experts")
    return RoutedExpertsInfo(model.num_expert_layers, model.experts.num_per_token, model.experts.num_experts)
