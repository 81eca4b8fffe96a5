"""`--deterministic`: the configurations in which a reply has the same bits whatever else runs."""

from __future__ import annotations

from typing import Final

from jaxserve_kernels.backend import NATIVE

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig

_FORMATS: Final = frozenset({"none", "int8", "mxfp4-weight-only", "nvfp4-weight-only"})
"""Formats whose matmuls were compared bit by bit among batches of all sizes."""


def check_deterministic(config: Config, model: DecoderConfig | EncoderConfig, policy: DtypePolicy) -> None:
    """Raise ConfigError if `--deterministic` is set and this engine's steps may round a row by its neighbours."""
    if config.compile.deterministic and (reason := _obstacle(model, policy)) is not None:
        raise ConfigError(f"--deterministic: {reason}")


def _obstacle(model: DecoderConfig | EncoderConfig, policy: DtypePolicy) -> str | None:
    """Return the reason why replies may differ with what else runs; None if they do not."""
    if policy.backend not in NATIVE:
        return "only with the native kernels of one CPU device: the matmuls of XLA round a row by the number of rows"
    name = policy.quant.name
    if name not in _FORMATS or not policy.is_native:
        known = "none with float32, int8, mxfp4-weight-only or nvfp4-weight-only"
        return f"not with {policy.matrices} weights of --quantization {name}; use {known}"
    if not isinstance(model, DecoderConfig):
        return "only for models that generate"
    if any(layer.recurrent is not None or layer.latent_dim is not None for layer in model.layers):
        return "not with recurrent layers or latent attention, which were not tested"
    return None
