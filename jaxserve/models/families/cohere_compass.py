"""Cohere's Compass, as North-Micro-Vision: the decoder of Cohere 2 with rope by kind of layer, and the tower of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families import cohere, cohere2
from jaxserve.models.families._common import MAX_HEADS, MAX_WIDTH, num_layers, read_window, sliding_layers, with_sizes
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._vision import by_model_type, qwen_vision

DEFAULTS = {**cohere2.DEFAULTS, "logit_scale": None}
_ROPE: Final = "rope_parameters"
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""transformers' defaults of further keys, which multimodal configs may leave out."""
_DEEPSTACK: Final = {"deepstack_visual_indexes": [8, 16, 24]}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Cohere 2, whose pairs of rotating numbers are halves of a head apart; layers of one kind may not rotate."""
    keys = Keys({**DEFAULTS, **with_sizes(_SIZES, hf)})
    if keys.get("logit_scale") is None:
        keys = Keys({**keys.table, "logit_scale": 1.0})
    heads = keys.integer("num_attention_heads", MAX_HEADS)
    width = keys.integer("hidden_size", MAX_WIDTH)
    keys.require("head_dim", width // heads, None)
    count, tables = num_layers(keys), _tables(keys)
    layers = sliding_layers(keys, read_window(keys), (False,) * count)
    kinds = ["full_attention" if layer.sliding_window is None else "sliding_attention" for layer in layers]
    for kind in kinds:
        if kind not in tables:
            raise keys.error(_ROPE, f"a table or null for {kind}")
    found = [tables[kind] for kind in dict.fromkeys(kinds) if tables[kind] is not None]
    if not found or any(each != found[0] for each in found):
        raise keys.error(_ROPE, "the same table for all layers that rotate")
    keys = without_sections(Keys({**keys.table, _ROPE: found[0]}))
    rotating = (replace(layer, use_rope=tables[kind] is not None) for layer, kind in zip(layers, kinds, strict=True))
    return replace(cohere.cohere(keys, tuple(rotating)), rotary_pairs="halves")


def _tables(keys: Keys) -> dict[str, Any]:
    """Read the tables of rope by kind of layer."""
    tables = keys.get(_ROPE)
    if not isinstance(tables, dict):
        raise keys.error(_ROPE, "tables full_attention and sliding_attention")
    own = {kind: tables[kind] for kind in ("full_attention", "sliding_attention") if kind in tables}
    if any(table is not None and not isinstance(table, dict) for table in own.values()):
        raise keys.error(_ROPE, "tables full_attention and sliding_attention")
    return own


def compass_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read Qwen3-VL's tower, and the positions of layers that rotate."""
    table = next(each for each in _tables(Keys(dict(hf))).values() if each is not None)
    whole = hf[MULTIMODAL]
    whole = {**whole, "vision_config": {**_DEEPSTACK, **whole["vision_config"]}}
    return qwen_vision({**hf, MULTIMODAL: whole, _ROPE: table}, processor, decoder)


FAMILY = Family(
    ("CohereCompassForCausalLM",),
    decoder_config,
    text_part_of=("CohereCompassForConditionalGeneration",),
    read_vision=by_model_type({"cohere_compass": compass_vision}),
)
