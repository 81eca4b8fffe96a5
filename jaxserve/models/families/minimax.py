"""MiniMax-Text-01 and MiniMax-M1 (arXiv 2501.08313, 2506.13585): lightning attention, and attention in every eighth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import LightningConfig
from jaxserve.models.families import minimax_m2, mixtral
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, build, num_layers, read_activation
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._hybrid import hybrid_layers, layer_names
from jaxserve.models.families._keys import Keys

_FACTORS: Final = tuple(
    f"{block}_{factor}_factor" for block in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")
)
DEFAULTS: Final[Mapping[str, Any]] = mixtral.DEFAULTS | dict.fromkeys(_FACTORS, 1)
_BLOCKS: Final[Mapping[str, str]] = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
KEY_NAMES: Final[Mapping[str, str]] = {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for ours, theirs in _BLOCKS.items()
    for factor in ("alpha", "beta")
}
"""Names of transformers, by those of configs as first published."""
_LIST: Final = "attn_type_list"
_TEXT_01: Final = ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Outputs of blocks are added to their normalised inputs; experts with softmax routers in every layer."""
    keys = minimax_m2.with_fraction(Keys({**DEFAULTS, **with_our_keys(hf, KEY_NAMES)}))
    keys.require("attention_bias", False, None)
    keys.require("sliding_window", None)
    keys.require("shared_intermediate_size", 0, None)
    # Configs as first published say whether normalised inputs are added to; transformers always adds to them.
    keys.require("postnorm", True, *(() if hf["architectures"][0] in _TEXT_01 else (None,)))
    experts = read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=True)
    layers = all_with_experts(_layers(keys), experts)
    # transformers rotates whole heads and reads no `rotary_dim`, which published configs have: with it that part of a head rotates.
    plain = {"partial_rotary_factor": 1.0} | {key: value for key, value in keys.table.items() if key != "layer_types"}
    config = build(
        Keys(plain, keys.prefix), layers=layers, qkv_bias=False, computed=(*COUNT_KEYS, "partial_rotary_factor")
    )
    return replace(config, norm_placement="entry")


def _kinds(keys: Keys) -> list[str]:
    """Return the kinds of all layers: by `layer_types`, by a list of 0 for lightning attention and 1, or in turns."""
    count, flags = num_layers(keys), keys.get(_LIST)
    if flags is not None and (
        not isinstance(flags, list) or len(flags) != count or any(flag not in (0, 1) for flag in flags)
    ):
        raise keys.error(_LIST, f"0 or 1 for each of the {count} layers")
    is_full = flags or [index % 2 == 0 for index in range(count)]
    return layer_names(keys, ["full_attention" if full else "linear_attention" for full in is_full])


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    count, num_heads = num_layers(keys), keys.integer("num_attention_heads", MAX_HEADS)
    given = keys.get("head_dim") is not None
    head_dim = keys.integer("head_dim", MAX_HEAD_DIM) if given else keys.integer("hidden_size", 1 << 20) // num_heads
    lightning = LightningConfig(num_heads, head_dim, decay_scale=1.0, activation=read_activation(keys))
    found = []
    for index, layer in enumerate(hybrid_layers(keys, _kinds(keys), "linear_attention", lightning)):
        block = "full_attn" if layer.recurrent is None else "linear_attn"
        alpha, beta, *mlp = (
            keys.number(f"{name}_{factor}_factor") for name in (block, "mlp") for factor in ("alpha", "beta")
        )
        # The published code adds 1e-5 twice.
        scale = 1 - index / (count - 1 + 1e-5) + 1e-5
        own = None if layer.recurrent is None else LightningConfig(num_heads, head_dim, scale, lightning.activation)
        found.append(replace(layer, recurrent=own, residual_scales=(alpha, beta, mlp[0], mlp[1])))
    return tuple(found)


def _lightning_names(hf: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our name of the mixers of layers with lightning attention, which checkpoints name like attention."""
    kinds = enumerate(_kinds(Keys({**DEFAULTS, **hf})))
    parts = {".qkv_proj": ".in_proj", "": ""}  # whole names first; matrices called `qkv_proj` would be split
    return {
        f"layers.{index}.self_attn{part}": f"layers.{index}.linear_attn{ours}"
        for index, kind in kinds
        if kind == "linear_attention"
        for part, ours in parts.items()
    }


FAMILY = Family(
    ("MiniMaxForCausalLM", *_TEXT_01),
    decoder_config,
    renames=mixtral.FAMILY.renames,
    key_names=KEY_NAMES,
    config_renames=_lightning_names,
    unused_tensors=("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
)
