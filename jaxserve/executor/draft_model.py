"""The draft model of `--speculative-model`, or a drafter that is no model (`checkpoint.drafters.form`), or the multi-token-prediction layer
of the model: its checkpoint, and its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import jax

from jaxserve.checkpoint.drafters.form import drafter_form
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.source import resolve
from jaxserve.config import Config
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.preparation import Preparation, resolve_task
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.registry import model_of, open_model, read_draft, read_drafter, read_mtp_layer
from jaxserve.runner.speculation.model import draft_source
from jaxserve.weights.loader import check_tensors, load_params

FREE: Final = frozenset({"eos_token_ids", "bos_token_id", "max_position", "stored"})
"""Fields of a DecoderConfig in which new weights may differ. End tokens and the longest context stay those of the start."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """The checkpoint of what drafts in an engine; empty for an engine in which nothing does."""

    checkpoint: Checkpoint | None = None
    decoder: DecoderConfig | None = None
    is_mtp: bool = False
    """True if it is a layer of the model's checkpoint."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoint, if there is one."""
        return [] if self.checkpoint is None else [self.checkpoint]

    def of_model(self, path: Path) -> DraftCheckpoint:
        """Return the draft checkpoint that goes with new weights of the model, at `path`. Raises CheckpointError if the MTP layer is
        missing or another one."""
        if not self.is_mtp:
            return self
        decoder, checkpoint = read_mtp_layer(path)
        assert checkpoint is not None and self.checkpoint is not None and self.decoder is not None, "weights"
        if replace(decoder, **{name: getattr(self.decoder, name) for name in FREE}) != self.decoder:
            raise CheckpointError(
                f"{path}: its multi-token-prediction layer differs from the one that is served in more than weights"
            )
        return DraftCheckpoint(checkpoint, decoder, is_mtp=True)

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


def open_draft_model(config: Config, model: DecoderConfig | EncoderConfig, path: Path) -> DraftCheckpoint:
    """Open what drafts for `model`, whose checkpoint is at `path`. Raises StartupError in one line."""
    name = draft_source(config)
    if name is None:
        return DraftCheckpoint()
    if resolve_task(config.model, model) == "embed":
        config.check_embeds()
    if config.scheduler.speculative_method == "mtp":
        layer, checkpoint = read_mtp_layer(path)
        return DraftCheckpoint(checkpoint, layer, is_mtp=True)
    source = resolve(name, progress=False, needs_tokenizer=False)
    if drafter_form(source) is not None:
        drafter, checkpoint = read_drafter(source)
        return DraftCheckpoint(checkpoint, drafter)
    checkpoint = open_model(source)
    decoder = model_of(checkpoint)
    if isinstance(decoder, EncoderConfig):
        raise ConfigError(f"--speculative-model {name}: an encoder drafts no tokens")
    return DraftCheckpoint(checkpoint, decoder)


def read_draft_config(config: Config, path: Path) -> DecoderConfig | None:
    """Return the config of the draft model or drafter, or of the MTP layer of the model at `path`, of which no weights are needed; None
    without one. Raises StartupError."""
    name = draft_source(config)
    if config.scheduler.speculative_method == "mtp":
        return read_mtp_layer(path)[0]
    return None if name is None else read_draft(resolve(name, weights=False, progress=False))
