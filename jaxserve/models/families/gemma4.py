"""Gemma 4, dense and with experts: texts, and the tower of its multimodal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import SANDWICH_NORMS, GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.per_layer import (
    TENSOR_NAMES,
    TOP_NAMES,
    embeddings_config,
    heads_config,
    proportional_rope,
    widths_config,
    windows_config,
)
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families._common import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_WIDTH,
    build,
    layer_types,
    num_layers,
    read_window,
    sliding_layers,
)
from jaxserve.models.families._experts import COUNT_KEYS, MAX_EXPERTS
from jaxserve.models.families._gemma import PER_LAYER_NAMES, read_cap, sharing_layers, with_wide_norms
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_layer_type, without_proportional
from jaxserve.models.families._vision import gemma4_vision

DEFAULTS: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "final_logit_softcapping": None,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
"""transformers' defaults."""
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "global_head_dim": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
"""Defaults of further keys."""
_PATTERN: Final = 6
"""By default the last of so many layers has full attention."""
_COMPUTED: Final = ("final_logit_softcapping", "use_bidirectional_attention", *COUNT_KEYS)
_RENAMES: Final = {
    "embed_tokens_per_layer": "per_layer.embed_tokens",
    **PER_LAYER_NAMES,
}
_EXPERT_RENAMES: Final = {
    "mlp.gate_proj": "mlp.dense.gate_proj",
    "mlp.up_proj": "mlp.dense.up_proj",
    "mlp.down_proj": "mlp.dense.down_proj",
    "router.proj": "mlp.sparse.gate",
    "router.scale": "mlp.sparse.gate.scale",
    "router.per_expert_scale": "mlp.sparse.gate.per_expert_scale",
    "experts": "mlp.sparse.experts",
    "pre_feedforward_layernorm": "mlp.pre_dense",
    "post_feedforward_layernorm_1": "mlp.post_dense",
    "pre_feedforward_layernorm_2": "mlp.pre_sparse",
    "post_feedforward_layernorm_2": "mlp.post_sparse",
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma 3 with wider heads in full-attention layers, and perhaps keys that are values, layers that read others' keys and
    values, embeddings for each layer, and experts beside the dense block."""
    keys = Keys({**DEFAULTS, **_SIZES, **hf})
    keys.require("use_bidirectional_attention", None, "vision")
    keys, sliding_theta = by_layer_type(keys, 10_000.0)
    layers = _layers(keys)
    keys, scaling = without_proportional(keys, _full_head_dim(layers, keys))
    config = build(keys, layers=layers, computed=_COMPUTED, activation_key="hidden_activation")
    dim = keys.integer("hidden_size_per_layer_input", MAX_WIDTH, low=0)
    if dim and keys.get("vocab_size_per_layer_input") != config.vocab_size:
        raise keys.error("vocab_size_per_layer_input", f"vocab_size ({config.vocab_size})")
    return replace(
        with_wide_norms(config, sliding_theta),
        rope_scaling=config.rope_scaling if scaling is None else scaling,
        logit_softcap=read_cap(keys, "final_logit_softcapping"),
        per_layer_dim=dim or None,
        has_layer_scales=True,
    )


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    count, window = num_layers(keys), read_window(keys)
    default = tuple(bool((index + 1) % _PATTERN) for index in range(count))
    is_sliding = (*layer_types(keys, window, default)[:-1], False)  # as transformers forces it
    layers = sliding_layers(Keys({**keys.table, "layer_types": None}, keys.prefix), window, is_sliding)
    tables = tables_by_layer(keys, count)
    layers = tuple(
        replace(layer, **layer_heads(keys, tables, index, is_sliding=layer.sliding_window is not None))
        for index, layer in enumerate(layers)
    )
    is_wide = keys.flag("use_double_wide_mlp")
    layers = sharing_layers(keys, layers, width=keys.integer("intermediate_size", MAX_WIDTH) * 2 if is_wide else None)
    if not keys.flag("enable_moe_block"):
        return layers
    experts = _experts(keys)
    return tuple(replace(layer, experts=experts) for layer in layers)


def tables_by_layer(keys: Keys, count: int) -> dict[int, dict[str, Any]] | None:
    """Read `per_layer_config`, whose numbers of layers begin with zeros if others have more digits."""
    tables = keys.get("per_layer_config")
    if tables is None:
        return None
    numbers, found = {str(index): index for index in range(count)}, dict[int, dict[str, Any]]()
    for name, table in tables.items() if isinstance(tables, dict) else [("", tables)]:
        index = numbers.get(name.lstrip("0") or name[-1:])
        if index is None or not isinstance(table, dict):
            raise keys.error("per_layer_config", f"tables by layer, from 0 to {count - 1}")
        found[index] = table
    return found


def layer_heads(
    keys: Keys, tables: Mapping[int, dict[str, Any]] | None, index: int, *, is_sliding: bool
) -> dict[str, Any]:
    """Return the fields of a layer's heads: of layers with full attention, or those that `per_layer_config` lists."""
    has_shared_projection = keys.flag("attention_k_eq_v") and not is_sliding
    num_heads = keys.integer("num_attention_heads", MAX_HEADS)
    if tables is None:
        own, dim_key, heads_key = keys, "global_head_dim", "num_global_key_value_heads"
        if is_sliding:
            return {}
        has_own_number = has_shared_projection
    else:
        own = Keys(tables.get(index, {}), f"per_layer_config.{index}.")
        dim_key, heads_key, has_own_number = "head_dim", "num_key_value_heads", True
        unknown = sorted(set(own.table) - {dim_key, heads_key})
        if unknown:
            raise own.error(unknown[0], f"{dim_key} and {heads_key} only")
    fields: dict[str, Any] = {"has_value_projection": not has_shared_projection}
    if own.get(dim_key) is not None:
        fields["head_dim"] = own.integer(dim_key, MAX_HEAD_DIM, low=2)
        if fields["head_dim"] % 2:
            raise own.error(dim_key, "an even number")
        if is_sliding and fields["head_dim"] != keys.get("head_dim"):
            raise own.error(dim_key, f"head_dim ({keys.get('head_dim')}) in layers with a window")
    if has_own_number and own.get(heads_key) is not None:
        fields["num_kv_heads"] = own.integer(heads_key, num_heads)
        if num_heads % fields["num_kv_heads"]:
            raise own.error(heads_key, f"a divisor of num_attention_heads ({num_heads})")
    return fields


def _experts(keys: Keys) -> ExpertsConfig:
    count = keys.integer("num_experts", MAX_EXPERTS)
    return ExpertsConfig(
        num_experts=count,
        num_per_token=keys.integer("top_k_experts", count),
        intermediate_size=keys.integer("moe_intermediate_size", MAX_WIDTH),
        is_normalized=True,
        has_dense=True,
        router_norm_eps=keys.number("rms_norm_eps"),
    )


def _full_head_dim(layers: tuple[LayerConfig, ...], keys: Keys) -> int:
    """Return the head dim of layers with full attention, which must be one. Raises CheckpointError."""
    dims = {layer.head_dim for layer in layers if layer.sliding_window is None}
    if len(dims) != 1:
        raise keys.error("per_layer_config", "one head_dim for all layers with full attention")
    return dims.pop() or keys.integer("head_dim", MAX_HEAD_DIM, low=2)


def _renames(hf: Mapping[str, Any]) -> Mapping[str, str]:
    return _EXPERT_RENAMES if hf.get("enable_moe_block") is True else {}


_GGUF_NAMES: Final = {
    **SANDWICH_NORMS,
    **TENSOR_NAMES,
    "layer_output_scale": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both kinds of layers. The file's head size is that of layers with full attention."""
    full_dim = config["head_dim"]
    windows = windows_config(keys, config, _PATTERN, proportional_rope(keys, full_dim))
    embeddings = embeddings_config(keys, config)
    num_shared = embeddings["num_kv_shared_layers"]
    found = {
        **windows,
        **embeddings,
        **widths_config(keys, config, num_shared),
        **heads_config(keys, windows["layer_types"], num_shared),
        "global_head_dim": full_dim,
        # Of the published models, those without embeddings of each layer see images whole; files do not say so.
        "use_bidirectional_attention": None if embeddings["hidden_size_per_layer_input"] else "vision",
        "pad_token_id": keys.file.metadata.get("tokenizer.ggml.padding_token_id", 0),
    }
    if "num_experts" not in config:
        return found
    return found | {
        "enable_moe_block": True,
        "top_k_experts": config["num_experts_per_tok"],
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


FAMILY = Family(
    ("Gemma4ForCausalLM",),
    decoder_config,
    text_part_of=("Gemma4ForConditionalGeneration",),
    read_vision=gemma4_vision,
    renames=_RENAMES,
    config_renames=_renames,
    stacked_experts="halves",
    gguf=GGUFArchitecture(
        "gemma4",
        varies_by_layer=True,
        has_own_rope_factors=True,
        tensor_names=_GGUF_NAMES,
        renames=_renames,
        top_names=TOP_NAMES,
        experts="optional",
        config=_gguf_config,
    ),
)
