"""Nomic BERT (arXiv 2402.01613): BERT with rope and gated feed-forward blocks, and hardly a bias; nomic-embed-text v1 and v1.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.encoders._common import read_encoder
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import read_rope

ARCHITECTURES = ("NomicBertModel",)
KEY_NAMES: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "rotary_emb_base": "rope_theta",
}
"""Our names of the keys that its own code reads."""
DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "rope_theta": 1000.0,
}
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "qkv_proj_bias": (False, None),
    "mlp_fc1_bias": (False, None),
    "mlp_fc2_bias": (False, None),
    "prenorm": (False, None),
    "parallel_block": (False, None),
    "use_rms_norm": (False, None),
    "causal": (False, None),
    "rotary_emb_fraction": (1.0, None),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "num_experts": (0, None),
    "scale_attn_weights": (True, None),
}
"""Keys of its own code that change the computation, with the values that are computed."""
RENAMES: Final = (
    ("emb_ln", "embeddings.LayerNorm"),
    ("encoder.layers", "encoder.layer"),
    ("layers", "encoder.layer"),
    ("attn.Wqkv", "attention.self.qkv_proj"),
    ("attn.out_proj", "attention.output.dense"),
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("mlp.fc11", "intermediate.up_proj"),
    ("mlp.fc12", "intermediate.gate_proj"),
    ("mlp.fc2", "output.dense"),
    ("mlp.up_proj", "intermediate.up_proj"),
    ("mlp.gate_proj", "intermediate.gate_proj"),
    ("mlp.down_proj", "output.dense"),
    ("norm1", "attention.output.LayerNorm"),
    ("norm2", "output.LayerNorm"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("post_mlp_layernorm", "output.LayerNorm"),
)
"""Names of published checkpoints, which transformers saves too, and of transformers' modules."""


def encoder_config(hf: dict[str, Any]) -> EncoderConfig:
    """Read the keys of transformers, or those of the model's own code."""
    keys = Keys(
        {**DEFAULTS, **with_our_keys(hf, KEY_NAMES)}, names={ours: own for own, ours in KEY_NAMES.items() if own in hf}
    )
    for key, neutral in _NEUTRAL.items():
        keys.require(key, *neutral)
    if keys.get("hidden_act") == "swiglu":
        keys = Keys({**keys.table, "hidden_act": "silu"}, names=keys.names)
    return read_encoder(
        keys,
        rope_theta=plain_theta(keys),
        is_gated=True,
        has_attention_bias=False,
        has_mlp_bias=False,
        has_mlp_out_bias=False,
        renames=RENAMES,
    )


def plain_theta(keys: Keys) -> float:
    """Return the rope base of a model whose frequencies are not scaled."""
    keys.require("head_dim", None, keys.integer("hidden_size", 1 << 20) // keys.integer("num_attention_heads", 1 << 12))
    keys.require("rotary_scaling_factor", None)
    rope = read_rope(keys, keys.integer("hidden_size", 1 << 20))
    if rope.scaling is not None:
        raise keys.error("rope_parameters" if keys.get("rope_parameters") else "rope_scaling", "rope without scaling")
    return rope.theta
