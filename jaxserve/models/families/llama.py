"""Llama 2, 3 and 3.x, SmolLM2 and everything else published as LlamaForCausalLM; SmolVLM, Idefics3 and LLaVA."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import WINDOW, GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers, with_sizes
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._llava import llava
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._vision import by_model_type, siglip

DEFAULTS = dict(COMMON_DEFAULTS, head_dim=None, attention_bias=False, mlp_bias=False)
_BIDIRECTIONAL: Final = "LlamaBidirectionalModel"
SIZES: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""transformers' defaults of further keys, which published LLaVA configs leave out."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """A plain pre-norm decoder; `attention_bias` is on all four projections."""
    # EAGLE-3 heads of models that read images have sections.
    keys = without_sections(Keys({**DEFAULTS, **with_sizes(SIZES, hf)}))
    if _BIDIRECTIONAL in hf.get("architectures", ()):
        keys.require("pooling", "avg", None)
        keys = Keys({**keys.table, "is_causal": False})
    return build(keys, layers=full_layers(keys), computed=("mlp_bias", "is_causal"))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a llama file with experts as Mixtral, and one with a window as Mistral; the window counts the query itself in
    both vocabularies."""
    window = {"sliding_window": keys.integer(WINDOW)} if keys.get(WINDOW) else {}
    if keys.get("expert_count"):
        return {"architectures": ["MixtralForCausalLM"], **window}
    return {"architectures": ["MistralForCausalLM"], **window} if window else {}


_TILED = partial(siglip, connector="linear")
FAMILY = Family(
    ("LlamaForCausalLM", _BIDIRECTIONAL),
    decoder_config,
    text_part_of=(
        "SmolVLMForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
    ),
    # Mistral 3 in GGUF files, which have the architecture `llama`.
    read_vision=by_model_type(
        {
            "smolvlm": _TILED,
            "idefics3": _TILED,
            "llava": llava,
            "llava_next": llava,
            "vipllava": llava,
            "mistral3": pixtral,
        }
    ),
    text_model_types=("llama", None),
    gguf=GGUFArchitecture(
        "llama",
        is_rope_permuted=True,
        has_bias_flags=True,
        experts="optional",
        config=_gguf_config,
    ),
    maxtext=MaxTextLayout(query_scale="head_dim", has_tied_logits=False),
)
