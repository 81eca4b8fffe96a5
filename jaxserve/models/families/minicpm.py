"""MiniCPM (arXiv 2404.06395), MiniCPM 2, MiniCPM4 (arXiv 2506.07900) and MiniCPM4.1.

transformers has no class: tests compare with Granite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS = dict(
    COMMON_DEFAULTS,
    tie_word_embeddings=True,
    attention_bias=False,
    scale_emb=1,
    scale_depth=1,
    dim_model_base=1,
)
_SPARSE: Final = "sparse_config"
_DENSE_LENGTH: Final = "dense_len"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with factors on embeddings, residuals and logits.

    A table `sparse_config` makes attention sparse in texts from `dense_len` tokens on (InfLLM v2), which is not computed: longer
    texts are not served.
    """
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=full_layers(keys))
    return replace(
        config,
        embedding_scale=keys.number("scale_emb"),
        residual_scale=keys.number("scale_depth") * config.num_layers**-0.5,
        logit_scale=keys.number("dim_model_base") / config.hidden_size,
        max_position=min(config.max_position, _longest_dense(keys)),
    )


def _longest_dense(keys: Keys) -> int:
    """Return the tokens of the longest text in which every token attends to all before it."""
    table = keys.get(_SPARSE)
    if table is None:
        return MAX_POSITION
    if not isinstance(table, dict):
        raise keys.error(_SPARSE, "a table or null")
    return Keys({_DENSE_LENGTH: 8192, **table}, f"{_SPARSE}.").integer(_DENSE_LENGTH, MAX_POSITION, low=2) - 1


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors; older files lack them, and llama.cpp has those of MiniCPM 2B."""
    residual = keys.number("residual_scale", 1.4 * config["num_hidden_layers"] ** -0.5)
    width = config["hidden_size"]
    return {
        **no_window(keys, config),
        "scale_emb": keys.number("embedding_scale", 12.0),
        "scale_depth": residual * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": width / keys.number("logit_scale", width / 256),
    }


FAMILY = Family(
    ("MiniCPMForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("minicpm", is_rope_permuted=True, has_bias_flags=True, config=_gguf_config),
)
