"""Adapters that are served beside a model: found, opened, and sized for its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxserve.checkpoint.peft import Adapter, open_adapter
from jaxserve.checkpoint.source import resolve_adapter
from jaxserve.config import Config
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig

RANK_STEP: Final = 16
"""Ranks are padded to a multiple of this: the width of vector registers and of tensor cores."""


def open_adapters(config: Config, decoder: DecoderConfig) -> tuple[Adapter, ...]:
    """Open the adapters of `--lora-modules`, in their order: requests name them by number, from 1.

    Raises StartupError in one line.
    """
    kv_rows = decoder.num_kv_heads * decoder.head_dim
    parts = {
        "qkv_proj": {"q_proj": decoder.num_heads * decoder.head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": decoder.intermediate_size, "up_proj": decoder.intermediate_size},
    }
    return tuple(open_adapter(name, resolve_adapter(source), parts) for name, source in config.model.adapters.items())


def adapters_config(adapters: Sequence[Adapter]) -> AdaptersConfig | None:
    """Return the shapes of the adapters in the model; None without any."""
    if not adapters:
        return None
    largest = max(adapter.rank for adapter in adapters)
    modules = {module for adapter in adapters for module in adapter.additions}
    return AdaptersConfig(len(adapters), -(-largest // RANK_STEP) * RANK_STEP, tuple(sorted(modules)))
