"""The text model inside a multimodal checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import renamed

_SHARED_KEYS: Final = ("quantization_config", "bos_token_id", "eos_token_id")
_PREFIXES: Final = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefixes of the text model's tensors, of which transformers has used two orders, and our prefixes."""
_VISION: Final = ("vision_tower.", "multi_modal_projector.")


def text_config(config: dict[str, Any], families: Collection[Family]) -> dict[str, Any]:
    """Return `config.json` of the text model in a multimodal checkpoint; any other config unchanged."""
    architectures, text = config.get("architectures"), config.get("text_config")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = next((family for family in families if name in family.text_part_of), None)
    if family is None or not isinstance(text, dict):
        return config
    shared = {key: config[key] for key in _SHARED_KEYS if key in config}
    return {**shared, **text, "architectures": [family.architectures[0]]}


def with_text_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the text model of a multimodal checkpoint under its own names; any other checkpoint unchanged."""
    if not any(name.startswith(tuple(_PREFIXES)) for name in checkpoint.tensors):
        return checkpoint
    return renamed(checkpoint, text_name)


def text_name(name: str) -> str | None:
    """Return the name of a tensor or module in the text model; None if it belongs to the vision part."""
    for prefix, text_prefix in _PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return None if name.removeprefix("model.").startswith(_VISION) else name
