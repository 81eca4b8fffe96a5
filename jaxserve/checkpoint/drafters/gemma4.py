"""The drafters that Google ships for Gemma 4 (`Gemma4AssistantForCausalLM`): their config and their tensors.

    text_config                  layers as in Gemma 4, all of which read the keys and values of the model
    pre_projection               projection of the model's embedding and hidden state, side by side
    post_projection              projection to a hidden state of the model
    model.*, lm_head             the layers; the embedding is the output head
    masked_embedding.*           centroids of clusters of tokens, and the tokens by cluster

Layers of Gemma 4 12B's drafter (`Gemma4UnifiedAssistantForCausalLM`) are those of that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.renamed import TIED, architecture
from jaxserve.errors import CheckpointError
from jaxserve.model_config.assistant import AssistantConfig

_LAYERS: Final = {
    "Gemma4AssistantForCausalLM": ("Gemma4ForCausalLM", 1536),
    "Gemma4UnifiedAssistantForCausalLM": ("Gemma4UnifiedForCausalLM", 3840),
}
"""Class of a decoder with such layers, and the default of `backbone_hidden_size`, by class of the drafter."""
_WITHOUT: Final = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
_DEFAULTS: Final = {"Gemma4AssistantForCausalLM": {"hidden_size_per_layer_input": 256}}
_UNREAD: Final = {"Gemma4UnifiedAssistantForCausalLM": ("hidden_size_per_layer_input", "enable_moe_block")}
_SHARED: Final = "num_kv_shared_layers"
_MOST: Final = 1 << 24


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Return True for `config.json` of a drafter of Gemma 4."""
    return architecture(config) in _LAYERS


def assistant_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], AssistantConfig]:
    """Return `config.json` of a decoder with the drafter's layers, which then have keys and values, and what it reads of its model.

    Raises CheckpointError in one line for a drafter that is not served.
    """
    name = architecture(config) or ""
    decoder, default_width = _LAYERS[name]
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("the drafter's config has no text_config")
    options = {**_WITHOUT, **_DEFAULTS.get(name, {}), **text}
    for key, accepted in _WITHOUT.items():
        if key not in _UNREAD.get(name, ()) and options[key] != accepted:
            raise CheckpointError(f"drafters of Gemma 4 with {key} {str(options[key])[:80]} are not served")
    num_layers = text.get("num_hidden_layers", 30)
    if text.get(_SHARED) not in (None, 0, num_layers):
        raise CheckpointError(
            f"the drafter's {_SHARED} is {str(text[_SHARED])[:80]}; expected all of its {str(num_layers)[:80]} layers"
        )
    own = {**text, **_WITHOUT, "architectures": [decoder], _SHARED: 0, TIED: config.get(TIED, True)}
    if "quantization_config" in config:
        own["quantization_config"] = config["quantization_config"]
    width = _integer(config, "backbone_hidden_size", default_width)
    if not config.get("use_ordered_embeddings", False):
        return own, AssistantConfig(width)
    count = _integer(config, "num_centroids", 2048)
    active, vocab_size = _integer(config, "centroid_intermediate_top_k", 32), _integer(text, "vocab_size", 262_144)
    if active > count or vocab_size % count:
        raise CheckpointError(
            f"the drafter has {count} centroids for {vocab_size} tokens, of which {active} are active; expected a divisor of the tokens, and "
            "no more active ones"
        )
    return own, AssistantConfig(width, count, active)


def _integer(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 < value < _MOST:
        raise CheckpointError(f"the drafter's {key} is {str(value)[:80]}; expected a number above 0")
    return value
