"""EXAONE 3.0 (arXiv 2408.03541), 3.5 and Deep. transformers has no class: tests compare with Llama."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

KEY_NAMES: Final = {
    "num_layers": "num_hidden_layers",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
DEFAULTS = dict(COMMON_DEFAULTS, rms_norm_eps=1e-5, tie_word_embeddings=True)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama under other names."""
    table = {**DEFAULTS, **with_our_keys(hf, KEY_NAMES)}
    keys = Keys(table, names={ours: own for own, ours in KEY_NAMES.items()})
    return build(keys, layers=full_layers(keys))


FAMILY = Family(
    ("ExaoneForCausalLM",),
    decoder_config,
    renames={
        "attn.attention": "self_attn",
        "transformer": "model",
        "wte": "embed_tokens",
        "h": "layers",
        "ln_f": "norm",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "out_proj": "o_proj",
        "c_fc_0": "gate_proj",
        "c_fc_1": "up_proj",
        "c_proj": "down_proj",
    },
    key_names=KEY_NAMES,
    unused_tensors=(".rotary.inv_freq", ".rotary_emb.inv_freq"),
    gguf=GGUFArchitecture("exaone"),
)
