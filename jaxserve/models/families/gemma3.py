"""Gemma 3 (arXiv 2503.19786): texts, and the tower of its multimodal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import SANDWICH_NORMS, WINDOW, GGUFArchitecture, GGUFKeys, layer_types
from jaxserve.checkpoint.maxtext.layout import SANDWICH_NORM_NAMES, MaxTextLayout
from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _gemma
from jaxserve.models.families._common import MAX_LAYERS, read_window
from jaxserve.models.families._gemma import gemma, gemma_gguf_config
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_layer_type
from jaxserve.models.families._vision import siglip

DEFAULTS = dict(
    _gemma.DEFAULTS,
    rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
)


_SIZES: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
}
"""Defaults of further keys that published multimodal configs leave out."""
_BOTH_WAYS: Final = "use_bidirectional_attention"
_TOWER: Mapping[str, Any] = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
"""transformers' defaults of SigLIP, other than those of SmolVLM's tower."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma 2 with norms of query and key heads, and another rope base in sliding-window layers: five of six."""
    keys = Keys({**DEFAULTS, **_SIZES, **hf})
    keys, sliding_theta = by_layer_type(keys, keys.number("rope_local_base_freq", low=1.0))
    is_bidirectional = MULTIMODAL not in hf and keys.get(_BOTH_WAYS) is True
    if is_bidirectional:
        keys = _with_half_windows(keys)
    config = gemma(keys, pattern=keys.integer("sliding_window_pattern", MAX_LAYERS))
    config = replace(config, is_bidirectional=is_bidirectional)
    # transformers has `attn_logit_softcapping` but ignores it.
    return replace(config, qk_norm="heads", sliding_rope_theta=sliding_theta, attention_softcap=None)


def _with_half_windows(keys: Keys) -> Keys:
    """Return the keys of a model that attends in both directions (EmbeddingGemma): half of its window is on each side of a token."""
    table = {key: value for key, value in keys.table.items() if key != _BOTH_WAYS}
    window = read_window(keys)
    return Keys(table if window is None else {**table, "sliding_window": window // 2 + 1}, keys.prefix)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    has_window, cap = bool(keys.get(WINDOW)), "final_logit_softcapping"
    return gemma_gguf_config(config, num_layers_of_27b=62) | {
        "sliding_window": keys.integer(WINDOW) if has_window else None,
        "layer_types": layer_types(keys, config, 6 if has_window else 1),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        cap: keys.number(cap) if keys.has(cap) else None,
    }


FAMILY = Family(
    ("Gemma3ForCausalLM",),
    decoder_config,
    text_part_of=("Gemma3ForConditionalGeneration",),
    read_vision=partial(siglip, connector="average", defaults=_TOWER, bidirectional_layers="all"),
    gguf=GGUFArchitecture("gemma3", norm_offset=1.0, tensor_names=SANDWICH_NORMS, config=_gguf_config),
    maxtext=MaxTextLayout(SANDWICH_NORM_NAMES, norm_offset=1.0, embedding_divisor="bfloat16", cycle=6),
)
