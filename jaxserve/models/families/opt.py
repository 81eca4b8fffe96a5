"""OPT (arXiv 2205.01068)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._gpt import gpt, our_keys

DEFAULTS = {
    "activation_function": "relu",
    "ffn_dim": 3072,
    "word_embed_proj_dim": None,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
_KEY_NAMES: Final = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
_NORM_EPS: Final = {"layer_norm_eps": 1e-5}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Learned embeddings of positions from the third row on, LayerNorm, biases everywhere, and ReLU without a gate.

    OPT 350M, whose norms come after the residual sum and whose embeddings are projected, is rejected.
    """
    keys = our_keys(hf, {**DEFAULTS, **_NORM_EPS}, _KEY_NAMES)
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        keys.require(key, True)
    keys.require("_remove_final_layer_norm", False)
    keys.require("word_embed_proj_dim", None, keys.get("hidden_size"))
    return replace(gpt(keys, has_rope=False), first_position_row=2)


FAMILY = Family(
    ("OPTForCausalLM",),
    decoder_config,
    renames={
        "decoder.final_layer_norm": "norm",
        "decoder.layers": "layers",
        "decoder.embed_tokens": "embed_tokens",
        "decoder.embed_positions": "embed_positions",
        "self_attn_layer_norm": "input_layernorm",
        "final_layer_norm": "post_attention_layernorm",
        "out_proj": "o_proj",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
    },
    key_names=_KEY_NAMES,
)
