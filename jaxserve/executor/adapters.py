"""The adapters of `--lora-modules` and `--max-loras`: their files, and their shapes in the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxserve.checkpoint.peft import Adapter, open_adapter
from jaxserve.checkpoint.source import resolve_adapter
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model_config.decoder import AdaptersConfig, DecoderConfig

RANK_STEP: Final = 16
"""Ranks are padded to a multiple of this: the width of vector registers and of tensor cores."""


def open_adapters(config: Config, decoder: DecoderConfig) -> tuple[Adapter, ...]:
    """Open the adapters of `--lora-modules`, in their order: requests name them by number, from 1.

    Raises StartupError in one line.
    """
    parts = fused_parts(decoder)
    return tuple(open_adapter(name, resolve_adapter(source), parts) for name, source in config.model.adapters.items())


def fused_parts(decoder: DecoderConfig) -> dict[str, dict[str, int]]:
    """Return the modules that an adapter may have fused, with the rows of each part."""
    kv_rows = decoder.num_kv_heads * decoder.head_dim
    return {
        "qkv_proj": {"q_proj": decoder.num_heads * decoder.head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": decoder.intermediate_size, "up_proj": decoder.intermediate_size},
    }


def adapters_config(
    adapters: Sequence[Adapter], settings: ModelConfig | None = None, decoder: DecoderConfig | None = None
) -> AdaptersConfig | None:
    """Return the shapes of the adapters in the model; None without any. Raises ConfigError.

    settings, decoder: those of a model in which --max-loras may reserve more places, for adapters of any module.
    """
    largest = max((adapter.rank for adapter in adapters), default=1)
    modules = {module for adapter in adapters for module in adapter.additions}
    count = len(adapters)
    if settings is not None and settings.max_loras is not None and decoder is not None:
        count, reserved = settings.num_adapter_places, settings.max_lora_rank
        if reserved is not None and largest > reserved:
            raise ConfigError(f"--max-lora-rank {reserved}: --lora-modules has an adapter of rank {largest}")
        largest, modules = reserved or largest, modules | adaptable_modules(decoder)
    if not count:
        return None
    return AdaptersConfig(count, -(-largest // RANK_STEP) * RANK_STEP, tuple(sorted(modules)))


def adaptable_modules(decoder: DecoderConfig) -> set[str]:
    """Return the names of all modules that an adapter may change: not experts."""
    modules = set()
    for index, layer in enumerate(decoder.layers):
        names = {"q_proj", "o_proj"}
        if layer.kv_source is None:
            names |= {"k_proj", "v_proj"} if layer.has_value_projection else {"k_proj"}
        modules |= {f"model.layers.{index}.self_attn.{name}" for name in names}
        if layer.experts is None:
            modules |= {f"model.layers.{index}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    return modules
