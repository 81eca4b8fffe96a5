"""Gated short convolutions (LFM2) in GGUF files: which layers have one, their number of taps, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.gguf.architecture import GGUFKeys
from jaxserve.checkpoint.gguf.mixers import mixed_layers

TENSOR_NAMES: Final[Mapping[str, str]] = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.o_proj",
}
"""The decoder's names by llama.cpp's."""
FINAL_NORM: Final[Mapping[str, str]] = {"token_embd_norm.weight": "model.norm.weight"}
"""The norm before the output head, which LFM2 names for the embeddings. Files of Ollama have the name of other families."""


def short_conv_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for short convolutions, and `layer_types`.

    config: the keys that all files have. Raises CheckpointError for a number of taps below 2.
    """
    return {
        "layer_types": mixed_layers(keys, config, "conv"),
        "conv_L_cache": keys.integer("shortconv.l_cache", minimum=2),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in keys.file.tensors),
    }
