"""Command R, Command R+ and Aya, of 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._cohere_vision import cohere_vision
from jaxserve.models.families._common import LAYER_NORM_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS = dict(
    LAYER_NORM_DEFAULTS,
    rope_theta=500_000.0,
    logit_scale=0.0625,
    attention_bias=False,
    use_qk_norm=False,
    tie_word_embeddings=True,
)
_LENGTH: Final = "max_position_embeddings"
_LONGER: Final = "model_max_length"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Parallel blocks after one LayerNorm without bias, adjacent rotary pairs and a factor on logits.

    Command R+ normalises query and key heads, too, each with weights of its own.
    """
    keys = Keys({**DEFAULTS, **hf})
    config = cohere(keys, full_layers(keys))
    if keys.get("use_qk_norm") is None or not keys.flag("use_qk_norm"):
        return config
    return replace(config, qk_norm="each_head", qk_norm_kind="layer")


def cohere(
    keys: Keys, layers: tuple[LayerConfig, ...], *, computed: tuple[str, ...] = (), eps_key: str = "layer_norm_eps"
) -> DecoderConfig:
    """Build the features that Command R and Cohere 2 share, also with experts. computed, eps_key: those of `build`.

    The first Command R models declare their context in `model_max_length`, and a shorter one in `max_position_embeddings`.
    """
    if keys.get(_LONGER) is not None:
        length = max(keys.integer(key, MAX_POSITION) for key in (_LONGER, _LENGTH))
        keys = replace(keys, table={**keys.table, _LENGTH: length})
    config = build(keys, layers=layers, computed=("logit_scale", *computed), eps_key=eps_key)
    return replace(
        config,
        norm_placement="parallel",
        norm_kind="layer",
        rotary_pairs="adjacent",
        logit_scale=keys.number("logit_scale"),
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    has_norms = any(name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")) for name in keys.file.tensors)
    return no_window(keys, config) | {"logit_scale": keys.number("logit_scale"), "use_qk_norm": has_norms}


FAMILY = Family(
    ("CohereForCausalLM",),
    decoder_config,
    text_part_of=("AyaVisionForConditionalGeneration",),
    read_vision=cohere_vision,
    text_model_types=("cohere",),
    gguf=GGUFArchitecture("command-r", eps_key="layer_norm_eps", config=_gguf_config),
)
