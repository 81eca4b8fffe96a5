"""MiniCPM3 (arXiv 2404.06395)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.latent import TENSOR_NAMES, latent_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import full_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder

DEFAULTS = dict(
    _latent.DEFAULTS,
    num_key_value_heads=40,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    kv_lora_rank=256,
    q_lora_rank=768,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=None,
    scale_emb=12,
    scale_depth=1.4,
    dim_model_base=256,
    mlp_bias=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Latent attention in a dense model, with factors on embeddings, residuals and logits."""
    table = {**DEFAULTS, "rope_interleave": False, **hf}
    keys = Keys(table)
    keys.require("rope_interleave", False)
    if keys.get("v_head_dim") is None:
        heads = keys.integer("num_attention_heads", keys.integer("hidden_size", 1 << 20))
        keys = Keys({**table, "v_head_dim": keys.integer("hidden_size", 1 << 20) // heads})
    config = latent_decoder(keys, full_layers(keys))
    depth, base = keys.get("scale_depth"), keys.get("dim_model_base")
    return replace(
        config,
        embedding_scale=keys.number("scale_emb"),
        residual_scale=1.0 if depth is None else keys.number("scale_depth") * config.num_layers**-0.5,
        logit_scale=1.0 if base is None else keys.number("dim_model_base") / config.hidden_size,
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention. Files have no factors: llama.cpp has those of the published model, our defaults."""
    return no_window(keys, config) | latent_config(keys, config)


FAMILY = Family(
    ("MiniCPM3ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("minicpm3", has_latent_attention=True, tensor_names=TENSOR_NAMES, config=_gguf_config),
)
