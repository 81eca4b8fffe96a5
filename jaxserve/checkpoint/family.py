"""The declaration in each file of `models/families/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class Family:
    """One family of decoders: the classes in `config.json` it serves, and how its checkpoints are read."""

    architectures: tuple[str, ...]
    """Values of `architectures` in `config.json`; a GGUF file of the family counts as the first."""
    decoder_config: Callable[[dict[str, Any]], DecoderConfig]
    """Read `config.json`; raises CheckpointError for a value that is not computed."""
    text_part_of: tuple[str, ...] = ()
    """Multimodal architectures whose `text_config` describes the family's first architecture."""
    text_model_type: str | None = None
    """The `model_type` that a `text_config` must have; None: any."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Our name by the checkpoint's, for components of tensor names (`mlp` in `model.layers.0.mlp.gate.weight`)."""
    has_stacked_experts: bool = False
    """True if a checkpoint stores all experts of a layer in one tensor, gate and up interleaved (gpt-oss)."""
    gguf: GGUFArchitecture | None = None
    """None: GGUF files of the family are not read."""
