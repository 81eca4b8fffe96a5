"""The text model inside a checkpoint that can also see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import renamed

TEXT_MODELS: Final[Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
"""The architecture of the text model by that of the whole."""
_SHARED_KEYS: Final = ("quantization_config", "bos_token_id", "eos_token_id")
_PREFIXES: Final = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Of the text model's tensors; transformers has had two orders."""
_UNSEEN: Final = ("vision_tower.", "multi_modal_projector.")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of the text model alone; unchanged where there is nothing else."""
    architectures, text = config.get("architectures"), config.get("text_config")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in TEXT_MODELS or not isinstance(text, dict):
        return config
    shared = {key: config[key] for key in _SHARED_KEYS if key in config}
    return {**shared, **text, "architectures": [TEXT_MODELS[name]]}


def with_text_alone(checkpoint: Checkpoint) -> Checkpoint:
    """The same under the names of a text model, without what sees."""
    if not any(name.startswith(tuple(_PREFIXES)) for name in checkpoint.tensors):
        return checkpoint
    return renamed(checkpoint, text_name)


def text_name(name: str) -> str | None:
    """What a tensor or module is called in the text model; None: it is no part of that."""
    for prefix, text_prefix in _PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return None if name.removeprefix("model.").startswith(_UNSEEN) else name
