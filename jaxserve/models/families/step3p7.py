"""Step 3.5 Flash, and the text part of Step 3.7 Flash (StepFun)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    HEADS,
    KV_HEADS,
    SLIDING_THETA,
    WINDOW,
    GGUFArchitecture,
    GGUFKeys,
    decimal,
    dense_layers,
    layer_types,
)
from jaxserve.checkpoint.gguf.per_layer import by_layer
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families._common import (
    COMMON_DEFAULTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_WIDTH,
    build,
    num_layers,
    read_window,
    sliding_layers,
)
from jaxserve.models.families._experts import COUNT_KEYS, dense_or_sparse, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_fraction, by_layer_type

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    attention_bias=False,
    mlp_bias=False,
    sliding_window=None,
    n_routed_experts=288,
    num_experts_per_tok=8,
    moe_intermediate_size=1280,
    share_expert_dim=1280,
    moe_router_scaling_factor=1.0,
    num_sliding_attention_heads=None,
    query_pre_attn_scalar=None,
    gating=True,
    swiglu_limits=None,
    swiglu_limits_shared=None,
)
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 128_815,
    "hidden_size": 4096,
    "intermediate_size": 11_264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "max_position_embeddings": 128_000,
}
"""transformers' defaults of further keys."""
KEY_NAMES: Final = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
_IMPLIED: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_bias": (False,),
    "gating": (True, "per-head"),
    "use_head_wise_attn_gate": (True, None),
    "use_qk_norm": (True, None),
    "use_moe_router_bias": (True, None),
    "moe_router_activation": ("sigmoid", None),
    "norm_expert_weight": (True, None),
    "zero_centered": (True, None),
    "sink": (False, None),
    "att_impl_type": ("GQA", None),
    "yarn_only_types": (["full_attention"], [], None),
    "sparse_attention_config": ({}, None),
    "use_rope_layers": ([], None),
}
"""Keys that published configs have and transformers ignores, with the values that say what it computes."""
_ENUM: Final = "moe_layers_enum"
_SLIDING_HEADS: Final = "num_sliding_attention_heads"
_OTHER: Final = "attention_other_setting"
_ROPE_LISTS: Final = ("rope_theta", "partial_rotary_factors")


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gates on the outputs of heads, more of which are in layers with a window, norms stored minus 1, and sigmoid-routed and shared
    experts whose gates are bounded in some layers."""
    keys = _keys(hf)
    experts = replace(
        read_experts(keys, "n_routed_experts", "moe_intermediate_size", is_normalized=True),
        score="sigmoid",
        has_correction_bias=True,
        weight_scale=keys.number("moe_router_scaling_factor"),
        shared_intermediate_size=keys.integer("share_expert_dim", MAX_WIDTH),
    )
    layers = _layers(keys, experts)
    keys, sliding_dim = by_fraction(keys, keys.integer("head_dim", MAX_HEAD_DIM, low=2))
    keys, sliding_theta = by_layer_type(keys, DEFAULTS["rope_theta"])
    config = build(keys, layers=layers, computed=(*COUNT_KEYS, "partial_rotary_factor"))
    scalar = keys.get("query_pre_attn_scalar")
    return replace(
        config,
        qk_norm="heads",
        norm_weights="offset",
        output_gate="heads",
        attention_scale=None if scalar is None else keys.number("query_pre_attn_scalar") ** -0.5,
        sliding_rope_theta=sliding_theta,
        sliding_rotary_dim=sliding_dim,
    )


def _keys(hf: dict[str, Any]) -> Keys:
    """Return the config with defaults, and with lists and tables by layer as transformers saves them."""
    keys = Keys({**DEFAULTS, **_SIZES, **with_our_keys(hf, KEY_NAMES), "hidden_act": "silu"})
    for name, accepted in _IMPLIED.items():
        keys.require(name, *accepted)
    count, spare = num_layers(keys), keys.get("num_nextn_predict_layers")
    table = dict(keys.table)
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):
        if isinstance(table.get(name), list) and isinstance(spare, int) and len(table[name]) == count + spare:
            table[name] = table[name][:count]
    if table.get("layer_types") is None:
        table["layer_types"] = ["full_attention"] * count
    if table.get("mlp_layer_types") is None:
        table["mlp_layer_types"] = _mlp_kinds(keys, count)
    rope = {"rope_parameters": _rope_tables(Keys(table)), "rope_scaling": None, "rope_theta": DEFAULTS["rope_theta"]}
    return Keys({**table, **rope})


def _mtp_keys(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the layer after the last one, which has its entries in lists by layer, or in lists of its own."""
    keys, found = Keys(with_our_keys(hf, KEY_NAMES)), dict[str, Any](per_layer_config=None)
    count = num_layers(keys)
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", *_ROPE_LISTS):
        own, value = keys.get(f"mtp_{name}"), keys.get(name)
        own = own if isinstance(own, list) else value[count:] if isinstance(value, list) else None
        if own is not None or isinstance(value, list):
            found[name] = own[:1] if own else None
    if found.get("mlp_layer_types") is None:
        kinds = [] if keys.get(_ENUM) is None else _mlp_kinds(keys, count + 1)
        found["mlp_layer_types"] = kinds[count:] or ["dense"]
    return found


def _mlp_kinds(keys: Keys, count: int) -> list[str]:
    """Read the layers with experts, which are named in a text or a list; without, all but the first three."""
    found = keys.get(_ENUM)
    sparse = range(3, count) if found is None else found.split(",") if isinstance(found, str) else found
    try:
        numbers = {int(each) for each in sparse if str(each).strip()}
    except (TypeError, ValueError):
        raise keys.error(_ENUM, "numbers of layers") from None
    return ["sparse" if index in numbers else "dense" for index in range(count)]


def _rope_tables(keys: Keys) -> dict[str, Any]:
    """Return a table for each kind of layer; older configs have lists by layer, and a scaling of layers with full attention."""
    tables, names = keys.get("rope_parameters"), keys.table["layer_types"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise keys.error("layer_types", "a list with one entry for each layer")
    if isinstance(tables, dict) and all(isinstance(tables.get(name), dict) for name in names):
        return {name: tables[name] for name in names}
    thetas, fractions = keys.get("rope_theta"), keys.get("partial_rotary_factors")
    found: dict[str, Any] = {}
    for index, name in enumerate(names):
        own = {"rope_type": "default", "rope_theta": _at(keys, "rope_theta", thetas, index)}
        if fractions:
            own["partial_rotary_factor"] = _at(keys, "partial_rotary_factors", fractions, index)
        if found.setdefault(name, own) != own:
            raise keys.error(
                "rope_theta" if not fractions else "partial_rotary_factors", "one value for each kind of layer"
            )
    scaling = keys.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise keys.error("rope_scaling", "a table")
    if "full_attention" in found:
        found["full_attention"] |= scaling
    return found


def _at(keys: Keys, name: str, values: Any, index: int) -> Any:
    """Return a layer's value of a list, or the value of all."""
    if not isinstance(values, list):
        return values
    if index >= len(values):
        raise keys.error(name, "one number for each layer")
    return values[index]


def _layers(keys: Keys, experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Return layers with their query heads, experts and bounds."""
    layers = sliding_layers(keys, read_window(keys), (False,) * num_layers(keys))
    heads = _sliding_heads(keys)
    found = []
    for index, layer in enumerate(dense_or_sparse(keys, layers, experts)):
        limit, shared = (_limit(keys, name, index) for name in ("swiglu_limits", "swiglu_limits_shared"))
        own = None if layer.experts is None else replace(experts, limit=limit, shared_limit=shared)
        num_heads = heads if layer.sliding_window is not None else None
        found.append(replace(layer, experts=own, mlp_limit=shared if own is None else None, num_heads=num_heads))
    return tuple(found)


def _sliding_heads(keys: Keys) -> int | None:
    """Read the query heads of layers with a window; None: as many as others have. Tables may repeat them by layer."""
    most, other = keys.integer("num_attention_heads", MAX_HEADS), keys.get(_OTHER)
    if other is not None and not isinstance(other, dict):
        raise keys.error(_OTHER, "a table")
    own = Keys({"num_attention_heads": most, **(other or {})}, f"{_OTHER}.")
    own.require("num_attention_groups", keys.get("num_key_value_heads"), None)
    own.require("head_dim", keys.get("head_dim"), None)
    own.require("attention_type", "sliding_attention", None)
    heads = own.integer("num_attention_heads", MAX_HEADS)
    if keys.get(_SLIDING_HEADS) is not None:
        heads = keys.integer(_SLIDING_HEADS, MAX_HEADS)
    kv_heads = keys.integer("num_key_value_heads", MAX_HEADS)
    if heads % kv_heads:
        raise keys.error(_SLIDING_HEADS, f"a multiple of num_key_value_heads ({kv_heads})")
    names = keys.table["layer_types"]
    same = {str(index): {"num_attention_heads": heads} for index, name in enumerate(names) if name != "full_attention"}
    tables = keys.get("per_layer_config")
    found = {name.lstrip("0") or "0": own for name, own in tables.items()} if isinstance(tables, dict) else None
    if tables and found != same:
        raise keys.error("per_layer_config", f"{heads} query heads in layers with a window, and nothing else")
    return None if heads == most else heads


def _limit(keys: Keys, name: str, index: int) -> float | None:
    """Return a layer's bound; 0 and null are none."""
    limit = _at(keys, name, keys.get(name) or None, index)
    return Keys({name: limit}, keys.prefix).number(name) if limit else None


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of windows, heads, rope, experts and bounds. Half of a head rotates in layers with full attention."""
    check_gating(keys, SIGMOID)
    count, dense = config["num_hidden_layers"], dense_layers(keys, config)
    kinds = layer_types(keys, config, 1)
    kv_heads = by_layer(keys, KV_HEADS, count)
    if len({*kv_heads}) > 1:
        keys.fail(KV_HEADS, "one number for all layers", kv_heads)
    full, sliding = (_gguf_heads(keys, kinds, kind) for kind in ("full_attention", "sliding_attention"))
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return {
        "num_attention_heads": full or sliding,
        "num_sliding_attention_heads": sliding,
        "layer_types": kinds,
        "sliding_window": keys.integer(WINDOW),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**plain, **(config.get("rope_scaling") or {}), "partial_rotary_factor": 0.5},
            "sliding_attention": {**plain, "rope_theta": keys.number(SLIDING_THETA, config["rope_theta"])},
        },
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "share_expert_dim": keys.integer("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_expert_weight": keys.flag("expert_weights_norm"),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(count)],
        "swiglu_limits": _gguf_limits(keys, "swiglu_clamp_exp", count),
        "swiglu_limits_shared": _gguf_limits(keys, "swiglu_clamp_shexp", count),
    }


def _gguf_heads(keys: GGUFKeys, kinds: list[str], kind: str) -> int | None:
    """Return the query heads of a kind of layers, which all have as many; None if there is none of the kind."""
    counts = by_layer(keys, HEADS, len(kinds))
    found = {count for count, own in zip(counts, kinds, strict=True) if own == kind}
    if len(found) > 1:
        keys.fail(HEADS, f"one number for all layers with {kind}", counts)
    return found.pop() if found else None


def _gguf_limits(keys: GGUFKeys, key: str, count: int) -> list[float] | None:
    """Return a bound for each layer, of which 0 is none; None if the file has no bounds."""
    values = keys.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) < count or not all(isinstance(value, float) for value in values):
        keys.fail(key, f"a number for each of the {count} layers", values)
    return [decimal(value) for value in values[:count]]


FAMILY = Family(
    ("Step3p5ForCausalLM",),
    decoder_config,
    text_part_of=("Step3p7ForConditionalGeneration",),
    renames={
        "moe.gate.weight": "mlp.gate.weight",
        "moe.router_bias": "mlp.gate.e_score_correction_bias",
        "moe.gate_proj.weight": "mlp.experts.gate_proj",
        "moe.up_proj.weight": "mlp.experts.up_proj",
        "moe.down_proj.weight": "mlp.experts.down_proj",
        "share_expert": "mlp.shared_experts",
        "g_proj": "gate_proj",
    },
    stacked_experts="halves",
    mtp="step",
    mtp_keys=_mtp_keys,
    gguf=GGUFArchitecture(
        "step35",
        varies_by_layer=True,
        norm_offset=1.0,
        tensor_names={"attn_gate": "self_attn.gate_proj"},
        experts="required",
        config=_gguf_config,
    ),
)
