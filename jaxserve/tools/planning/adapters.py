"""The LoRA adapters of a planned engine: their shapes, from settings and from the headers of their files."""

from __future__ import annotations

from functools import lru_cache

from jaxserve.checkpoint.peft import Adapter
from jaxserve.checkpoint.source import resolve_model
from jaxserve.config import Config, ModelConfig
from jaxserve.executor.adapters import adapters_config, open_adapters
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_decoder, text_model


def planned_adapters(config: Config, decoder: DecoderConfig) -> AdaptersConfig | None:
    """Return the adapters of `--lora-modules`, whose headers are read, and the places of `--max-loras`; None without any.

    Raises StartupError in one line.
    """
    return adapters_config(_open_adapters(config.model), config.model, decoder)


def adapters_notes(config: Config, decoder: DecoderConfig, size: str) -> tuple[str, ...]:
    """Return a note on the memory that adapters take, which is `size`, if there are any."""
    adapters = planned_adapters(config, decoder)
    if adapters is None:
        return ()
    places = "1 LoRA adapter" if adapters.count == 1 else f"{adapters.count} LoRA adapters"
    return (f"{size} of the weights are those of {places} of rank up to {adapters.rank}",)


@lru_cache(maxsize=2)
def _open_adapters(model: ModelConfig) -> tuple[Adapter, ...]:
    if not model.adapters:
        return ()
    path = resolve_model(model, weights=False)
    decoder, checkpoint = read_decoder(path)
    return open_adapters(Config(model=model), decoder, text_model(path, checkpoint))
