"""The draft model of `--speculative-model`: its checkpoint, and its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.source import resolve
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.executor.preparation import Preparation, resolve_task
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.registry import model_of, open_model, read_decoder
from jaxserve.weights.loader import check_tensors, load_params


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """The checkpoint of an engine's draft model; empty for an engine without one."""

    checkpoint: Checkpoint | None = None
    decoder: DecoderConfig | None = None

    def check_tensors(self, prepared: Preparation) -> None:
        """Raise CheckpointError if tensors are missing or have other shapes."""
        if self.checkpoint is not None and prepared.task.draft_model is not None:
            check_tensors(self.checkpoint, prepared.task.draft_model.skeleton)

    def load(self, prepared: Preparation) -> tuple[jax.Array, ...]:
        """Read the parameters onto the device; none without a draft model."""
        model = prepared.task.draft_model
        if self.checkpoint is None or model is None:
            return ()
        return load_params(self.checkpoint, model.skeleton, prepared.sharding, lambda done, total, name: None)


def open_draft_model(config: Config, model: DecoderConfig | EncoderConfig) -> DraftCheckpoint:
    """Open the draft model for `model`. Raises StartupError in one line."""
    name = config.scheduler.speculative_model
    if name is None:
        return DraftCheckpoint()
    if resolve_task(config.model, model) == "embed":
        raise ConfigError(f"--speculative-model {name}: an engine that embeds drafts no tokens")
    checkpoint = open_model(resolve(name, progress=False))
    decoder = model_of(checkpoint)
    if isinstance(decoder, EncoderConfig):
        raise ConfigError(f"--speculative-model {name}: an encoder drafts no tokens")
    return DraftCheckpoint(checkpoint, decoder)


def read_draft_config(config: Config) -> DecoderConfig | None:
    """Return the config of the draft model, of which no weights are needed; None without one. Raises StartupError."""
    name = config.scheduler.speculative_model
    return None if name is None else read_decoder(resolve(name, weights=False, progress=False))[0]
