"""Keys of families that mix recurrent layers with attention: which layers are recurrent, and their mixers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import GatedDeltaConfig, Mamba2Config, RecurrentConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, build
from jaxserve.models.families._experts import COUNT_KEYS
from jaxserve.models.families._keys import Keys

MAX_TAPS: Final = 64
MAX_GROUPS: Final = 1024
MAX_STATE: Final = 4096

OLD_NAMES: Final = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of kinds of layers since transformers 5, by those before."""

MAMBA_DEFAULTS: Final[Mapping[str, Any]] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""transformers' defaults that Bamba, Falcon-H1 and Granite 4 share."""
QWEN_DEFAULTS: Final[Mapping[str, Any]] = dict(
    COMMON_DEFAULTS,
    head_dim=256,
    attention_bias=False,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
"""transformers' defaults that Qwen3-Next and Qwen3.5 share."""
QWEN_SIZES: Final[Mapping[str, Any]] = {
    "max_position_embeddings": 32_768,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
"""Defaults of further keys."""


def hybrid_layers(
    keys: Keys,
    names: list[str],
    kind: str,
    recurrent: RecurrentConfig,
    *,
    window: int | None = None,
) -> tuple[LayerConfig, ...]:
    """Return layers of which those named `kind` are recurrent, and those named `full_attention` have full attention.

    window: the window of layers named `sliding_attention`; None: there are no such layers.
    """
    found = {kind: LayerConfig(recurrent=recurrent, has_kv=False), "full_attention": LayerConfig()}
    if window is not None:
        found["sliding_attention"] = LayerConfig(window)
    if any(name not in found for name in names):
        raise keys.error("layer_types", f"{' and '.join(found)} only")
    return tuple(found[name] for name in names)


def layer_names(keys: Keys, default: list[str]) -> list[str]:
    """Read `layer_types`, one name per layer."""
    names = keys.get("layer_types")
    if names is None:
        return default
    if not isinstance(names, list) or len(names) != len(default):
        raise keys.error("layer_types", f"a list with one entry for each of the {len(default)} layers")
    return [OLD_NAMES.get(str(name), str(name)) for name in names]


def qwen_layers(keys: Keys, inputs: Literal["by_head", "by_part"]) -> tuple[LayerConfig, ...]:
    """Return layers of which by default the last of every `full_attention_interval` has attention, the others a gated
    delta net."""
    period = keys.integer("full_attention_interval", MAX_LAYERS)
    count = keys.integer("num_hidden_layers", MAX_LAYERS)
    default = ["linear_attention" if (index + 1) % period else "full_attention" for index in range(count)]
    return hybrid_layers(keys, layer_names(keys, default), "linear_attention", read_delta(keys, inputs))


def read_delta(keys: Keys, inputs: Literal["by_head", "by_part", "apart"]) -> GatedDeltaConfig:
    """Read a gated delta net. inputs: see `GatedDeltaConfig`."""
    num_key_heads = keys.integer("linear_num_key_heads", MAX_HEADS)
    return GatedDeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=_multiple(keys, "linear_num_value_heads", num_key_heads, "linear_num_key_heads"),
        key_dim=keys.integer("linear_key_head_dim", MAX_HEAD_DIM),
        value_dim=keys.integer("linear_value_head_dim", MAX_HEAD_DIM),
        num_taps=keys.integer("linear_conv_kernel_dim", MAX_TAPS, low=2),
        inputs=inputs,
    )


def qwen_hybrid(keys: Keys, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    """Read what Qwen3-Next and Qwen3.5 share: gated attention with partial rotation, and norms stored minus 1."""
    keys.require("hidden_act", "silu")
    config = build(
        keys,
        layers=layers,
        computed=(*COUNT_KEYS, "shared_expert_intermediate_size", "partial_rotary_factor"),
    )
    return replace(config, qk_norm="heads", norm_weights="offset", output_gate="queries")


def read_mamba(keys: Keys, width: int, *, norm: Literal["gate_first", "norm_first", "none"]) -> Mamba2Config:
    """Read a Mamba-2 mixer whose heads are `width` wide together."""
    heads = keys.names.get("mamba_n_heads", "mamba_n_heads")
    num_heads = keys.integer("mamba_n_heads", MAX_HEADS)
    given = keys.get("mamba_d_head")
    head_dim = width // num_heads if given == "auto" else keys.integer("mamba_d_head", MAX_HEAD_DIM)
    if num_heads * head_dim != width:
        raise keys.error("mamba_d_head", f"the width {width} of the heads over {heads} ({num_heads})")
    num_groups = keys.integer("mamba_n_groups", MAX_GROUPS)
    if num_heads % num_groups:
        raise keys.error("mamba_n_groups", f"a divisor of {heads} ({num_heads})")
    low, high = step_bounds(keys)
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=keys.integer("mamba_d_state", MAX_STATE),
        num_taps=keys.integer("mamba_d_conv", MAX_TAPS, low=2),
        has_bias=keys.flag("mamba_proj_bias"),
        has_conv_bias=keys.flag("mamba_conv_bias"),
        norm=norm,
        min_step=low,
        max_step=high,
    )


def mamba_width(keys: Keys) -> int:
    """Return the width of the heads: `mamba_expand` times D."""
    return keys.integer("mamba_expand", 64) * keys.integer("hidden_size", MAX_WIDTH)


def step_bounds(keys: Keys) -> tuple[float, float | None]:
    """Read `time_step_limit`; JSON may have no infinity, or one as text."""
    found = keys.get("time_step_limit")
    if found is None:
        return 0.0, None
    try:
        low, high = map(float, found)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not 0 <= low < high:
        raise keys.error("time_step_limit", "two numbers, the first at least 0 and below the second")
    return low, None if math.isinf(high) else high


def _multiple(keys: Keys, key: str, factor: int, of: str) -> int:
    value = keys.integer(key, MAX_HEADS)
    if value % factor:
        raise keys.error(key, f"a multiple of {of} ({factor})")
    return value
