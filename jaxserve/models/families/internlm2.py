"""InternLM2 and InternLM2.5 (arXiv 2403.17297). transformers has no class: tests compare with Llama."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._experts import PART_NAMES
from jaxserve.models.families._keys import Keys

KEY_NAMES: Final = {"bias": "attention_bias"}
DEFAULTS = dict(COMMON_DEFAULTS, attention_bias=True)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with queries, keys and values in one matrix; `bias` is on all four projections of attention."""
    table = {**DEFAULTS, **with_our_keys(hf, KEY_NAMES)}
    keys = Keys(table, names={ours: own for own, ours in KEY_NAMES.items()})
    return build(keys, layers=full_layers(keys))


FAMILY = Family(
    ("InternLM2ForCausalLM",),
    decoder_config,
    renames={
        "tok_embeddings": "embed_tokens",
        "output": "lm_head",
        "attention": "self_attn",
        "wqkv": "qkv_proj",
        "wo": "o_proj",
        "feed_forward": "mlp",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **PART_NAMES,
    },
    key_names=KEY_NAMES,
    qkv_rows=QKVRows("kv_heads"),
    gguf=GGUFArchitecture("internlm2", is_rope_permuted=True, has_bias_flags=True),
)
