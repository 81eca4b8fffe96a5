"""Models of Mamba mixers alone: their keys, and the names of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.gguf.architecture import GGUFKeys, no_window
from jaxserve.checkpoint.gguf.mamba import scan_config
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import MambaConfig, RecurrentConfig
from jaxserve.models.families._common import MAX_WIDTH, build, num_layers
from jaxserve.models.families._hybrid import MAX_STATE, MAX_TAPS
from jaxserve.models.families._keys import Keys

DEFAULTS: Final[Mapping[str, Any]] = {
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
}
"""transformers' defaults of Mamba."""
RENAMES: Final = {
    "backbone": "model",
    "embeddings": "embed_tokens",
    "embedding": "embed_tokens",
    "norm_f": "norm",
    "mixer.norm": "mamba.gated_norm",
    "mixer": "mamba",
    "norm": "input_layernorm",
    "gated_norm": "norm",
}
_GGUF_KEYS: Final = {
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "time_step_rank": "mamba_dt_rank",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
"""Names of Jamba, by those of models of Mamba mixers alone."""
_NO_ATTENTION: Final[Mapping[str, Any]] = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "expand": 2,
    "max_position_embeddings": 1 << 15,
}
"""Sizes that no layer uses, the default of another key, and the context without --max-model-len: nothing in such a model bounds it."""


def own_keys(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> Keys:
    """Return the keys of a model without attention."""
    keys = Keys({**_NO_ATTENTION, **defaults, **hf})
    keys.require("hidden_act", "silu")
    return keys


def gguf_scan_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a GGUF file's mixers. Its longest context is arbitrary, and replaced by ours."""
    found = scan_config(keys, config)
    return {
        **no_window(keys, config),
        **{name: found[other] for name, other in _GGUF_KEYS.items()},
        "layer_norm_epsilon": config["rms_norm_eps"],
        "max_position_embeddings": _NO_ATTENTION["max_position_embeddings"],
    }


def width(keys: Keys) -> int:
    """Return the channels of a mixer: `expand` times D."""
    return keys.integer("expand", 64) * keys.integer("hidden_size", MAX_WIDTH)


def scan_width(keys: Keys) -> int:
    """Return the channels of a mixer of the first version: `intermediate_size`, if it is there (Falcon Mamba 7B, whose `expand`
    says something else)."""
    return width(keys) if keys.get("intermediate_size") is None else keys.integer("intermediate_size", MAX_WIDTH)


def read_scan(keys: Keys, **options: Any) -> MambaConfig:
    """Read a mixer of the first version. options: further fields of `MambaConfig`."""
    return MambaConfig(
        num_channels=scan_width(keys),
        state_dim=keys.integer("state_size", MAX_STATE),
        step_rank=step_rank(keys, "time_step_rank"),
        num_taps=keys.integer("conv_kernel", MAX_TAPS, low=2),
        has_bias=keys.flag("use_bias"),
        has_conv_bias=keys.flag("use_conv_bias"),
        **options,
    )


def step_rank(keys: Keys, key: str) -> int:
    """Read the width of the projection to steps; auto: D / 16, rounded up."""
    if keys.get(key) == "auto":
        return math.ceil(keys.integer("hidden_size", MAX_WIDTH) / 16)
    return keys.integer(key, MAX_WIDTH)


def without_attention(keys: Keys, mixer: RecurrentConfig) -> DecoderConfig:
    """Return a decoder whose layers are a norm and this mixer."""
    layer = LayerConfig(has_kv=False, has_mlp=False, use_rope=False, recurrent=mixer)
    keys = Keys({**keys.table, "head_dim": 2, "intermediate_size": width(keys)})
    return build(keys, layers=(layer,) * num_layers(keys), eps_key="layer_norm_epsilon")
