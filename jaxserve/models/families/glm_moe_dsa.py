"""GLM-5, GLM-5.1 and GLM-5.2."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import deepseek_v32
from jaxserve.models.families._indexer import GGUF_NAMES, gguf_indexer_config, indexer_kinds, with_indexer
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    deepseek_v32.DEFAULTS,
    num_key_value_heads=64,
    rms_norm_eps=1e-5,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    n_group=1,
    topk_group=1,
    index_n_heads=32,
)
_SCHEDULE: Final = {"index_topk_freq": 1, "index_skip_topk_offset": 2}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek-V3.2 with another rotation of the indexer, which only some layers have; the others take their choices.

    `index_share_for_mtp_iteration` lets further drafts take the choice of the first one, which saves time. Here each
    chooses anew; replies are the same.
    """
    keys = Keys({**DEFAULTS, **_SCHEDULE, "rope_interleave": True, **hf})
    keys.require("indexer_rope_interleave", True, None)
    keys.require("moe_router_dtype", "float32", None)
    config = deepseek_v32.dense_attention(keys)
    kinds = indexer_kinds(keys, config.num_layers)
    return with_indexer(keys, config, has_adjacent_pairs=True, kinds=kinds)


FAMILY = Family(
    ("GlmMoeDsaForCausalLM",),
    decoder_config,
    mtp="layer",
    gguf=GGUFArchitecture(
        "glm-dsa",
        has_latent_attention=True,
        tensor_names=GGUF_NAMES,
        experts="required",
        config=gguf_indexer_config,
    ),
)
