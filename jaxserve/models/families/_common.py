"""Keys that all families read alike, layers with sliding windows, and keys that no family computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.activation import Activation
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION, read_rope

# Far above every published model.
MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}

COMMON_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
"""transformers' defaults in most families."""

LAYER_NORM_DEFAULTS: Mapping[str, Any] = {
    **{key: value for key, value in COMMON_DEFAULTS.items() if key != "rms_norm_eps"},
    "layer_norm_eps": 1e-5,
}
"""transformers' defaults in families with LayerNorm."""

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1.0, None),
    "logit_scale": (1.0, None),
    "clip_qkv": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "n_shared_experts": (0, None),
    "shared_expert_intermediate_size": (0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
}
"""Keys that change the computation in some family, with the values that leave the decoder unchanged."""


def build(
    keys: Keys,
    *,
    layers: tuple[LayerConfig, ...],
    qkv_bias: bool | None = None,
    computed: Collection[str] = (),
    activation_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
    activations: Mapping[str, Activation] = ACTIVATIONS,
) -> DecoderConfig:
    """Read the keys that all families share, after the family's defaults were added to them.

    qkv_bias: True if queries, keys and values alone have a bias; None: `attention_bias`, if the family has the key, is on
    all four projections. computed: keys of NEUTRAL_VALUES that the family reads itself and applies with `dataclasses.replace`.
    activations: those that the family computes, by the names of the config.
    """
    for key, neutral in NEUTRAL_VALUES.items():
        if key not in computed:
            keys.require(key, *neutral)
    hidden_size = keys.integer("hidden_size", MAX_WIDTH)
    num_heads = keys.integer("num_attention_heads", MAX_HEADS)
    head_dim = _head_dim(keys, hidden_size, num_heads)
    is_bidirectional = "is_causal" in computed and keys.get("is_causal") is False
    if is_bidirectional and (MULTIMODAL in keys.table or any(layer.sliding_window for layer in layers)):
        raise keys.error("is_causal", "true for models with images or sliding windows")
    has_bias = qkv_bias is None and "attention_bias" in keys.table and keys.flag("attention_bias")
    rope = read_rope(keys, head_dim, is_partial="partial_rotary_factor" in computed)
    return DecoderConfig(
        vocab_size=keys.integer("vocab_size", MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(keys, num_heads),
        head_dim=head_dim,
        layers=layers,
        max_position=rope.max_position,
        norm_eps=keys.number(eps_key),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rope.rotary_dim,
        activation=read_activation(keys, activation_key, activations),
        qkv_bias=qkv_bias or has_bias,
        attention_out_bias=has_bias,
        mlp_bias="mlp_bias" in computed and keys.flag("mlp_bias"),
        tied_embeddings=keys.flag("tie_word_embeddings"),
        is_bidirectional=is_bidirectional,
    )


def with_sizes(sizes: Mapping[str, Any], hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with defaults of sizes if it is the text part of a multimodal one. Others must have them."""
    return {**sizes, **hf} if MULTIMODAL in hf else hf


def num_layers(keys: Keys) -> int:
    """Read the number of layers."""
    return keys.integer("num_hidden_layers", MAX_LAYERS)


def listed_layers(keys: Keys, key: str, count: int) -> list[int]:
    """Read a list of layers by their numbers; null is none."""
    found = keys.get(key) or []
    if not isinstance(found, list) or any(type(index) is not int or index not in range(count) for index in found):
        raise keys.error(key, f"a list of layers from 0 to {count - 1}")
    return found


def full_layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers with full attention; reject a config with sliding windows."""
    keys.require("sliding_window", None)
    layers = (LayerConfig(),) * num_layers(keys)
    layer_types(keys, None, (False,) * len(layers))
    return layers


def uniform_layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers that all have `sliding_window`, if any.

    transformers ignores `layer_types` in these families, so only a list that changes nothing is accepted.
    """
    window = read_window(keys)
    is_sliding = layer_types(keys, window, (window is not None,) * num_layers(keys))
    if window is not None and not all(is_sliding):
        raise keys.error("layer_types", f"sliding_attention in every layer, as sliding_window is {window}")
    return (LayerConfig(window),) * len(is_sliding)


def qwen_layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which those from `max_window_layers` on, or those in `layer_types`, may have a window."""
    count = num_layers(keys)
    window = optional_window(keys)
    first = count if window is None else keys.integer("max_window_layers", MAX_LAYERS, low=0)
    default = tuple(index >= first for index in range(count))
    return sliding_layers(keys, window, default)


def sliding_layers(keys: Keys, window: int | None, default: tuple[bool, ...]) -> tuple[LayerConfig, ...]:
    """Return layers with a window where `layer_types`, or else `default`, says so."""
    return tuple(LayerConfig(window if is_sliding else None) for is_sliding in layer_types(keys, window, default))


def alternating_layers(keys: Keys, period: int) -> tuple[LayerConfig, ...]:
    """Return layers of which by default the last of every `period` has full attention, the others a window if any."""
    window = read_window(keys)
    default = tuple(window is not None and (index + 1) % period != 0 for index in range(num_layers(keys)))
    return sliding_layers(keys, window, default)


def optional_window(keys: Keys) -> int | None:
    """Read `sliding_window` if `use_sliding_window` is true. It counts the query itself."""
    return read_window(keys) if keys.flag("use_sliding_window") else None


def read_window(keys: Keys) -> int | None:
    """Read `sliding_window`, which counts the query itself; null is none."""
    return None if keys.get("sliding_window") is None else keys.integer("sliding_window", MAX_POSITION)


def layer_types(keys: Keys, window: int | None, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return True for each sliding-window layer, from `layer_types` or else `default`."""
    names = keys.get("layer_types")
    if names is None:
        return default
    if not isinstance(names, list) or len(names) != len(default):
        raise keys.error("layer_types", f"a list with one entry for each of the {len(default)} layers")
    known = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if any(name not in known for name in names):
        because = " (no sliding window is set)" if window is None else ""
        raise keys.error("layer_types", f"{' and '.join(known)} only{because}")
    return tuple(name == "sliding_attention" for name in names)


def _num_kv_heads(keys: Keys, num_heads: int) -> int:
    if "num_key_value_heads" in keys.table and keys.get("num_key_value_heads") is None:
        return num_heads
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(keys: Keys, hidden_size: int, num_heads: int) -> int:
    even = f"an even number from 2 to {MAX_HEAD_DIM}"
    if keys.get("head_dim") is not None:
        head_dim = keys.integer("head_dim", MAX_HEAD_DIM, low=2)
        if head_dim % 2:
            raise keys.error("head_dim", even)
        return head_dim
    head_dim, rest = divmod(hidden_size, num_heads)
    if rest or head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise keys.error("hidden_size", f"num_attention_heads ({num_heads}) times a head_dim that is {even}")
    return head_dim


def read_activation(
    keys: Keys, key: str = "hidden_act", activations: Mapping[str, Activation] = ACTIVATIONS
) -> Activation:
    """Read the activation at `key`."""
    name = keys.get(key)
    if not isinstance(name, str) or name not in activations:
        raise keys.error(key, ", ".join(activations))
    return activations[name]


def reject_quantized(keys: Keys) -> None:
    """Raise CheckpointError if an encoder is stored quantised."""
    found = keys.get("quantization_config")
    if found is None:
        return
    method = Keys(found, "quantization_config.") if isinstance(found, dict) else keys
    key = "quant_method" if isinstance(found, dict) else "quantization_config"
    raise method.error(key, "a checkpoint in f32, f16 or bf16 without quantization_config, or a GGUF file")
