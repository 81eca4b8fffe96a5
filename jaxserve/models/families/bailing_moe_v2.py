"""Ling 2.0 and Ring 2.0 (arXiv 2510.22115): mini, flash and 1T; Sarvam 30B.

transformers has no class: tests compare with GLM-4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._experts import read_experts, with_sigmoid_router
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.bailing_moe import DEFAULTS as FIRST_DEFAULTS
from jaxserve.models.families.bailing_moe import RENAMES, gguf_experts, ling

DEFAULTS = dict(
    FIRST_DEFAULTS,
    rms_norm_eps=1e-6,
    use_bias=False,
    use_qk_norm=True,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    partial_rotary_factor=1.0,
)
_SARVAM: Final = "SarvamMoEForCausalLM"
_WITHOUT_GROUPS: Final[Mapping[str, Any]] = {"n_group": 1, "topk_group": 1}
"""Sarvam's defaults."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Partial rotation, norms of query and key heads, and DeepSeek-V3's router.

    The code beside the checkpoints divides the weights of a token's experts by their sum if there are several, whatever
    `norm_topk_prob` says. That of Sarvam subtracts the mean of a router's correction biases from each, which changes no choice.
    """
    groups = _WITHOUT_GROUPS if _SARVAM in hf.get("architectures", ()) else {}
    keys = Keys({**DEFAULTS, **groups, **hf})
    keys.require("score_function", "sigmoid", None)
    keys.require("norm_topk_prob", True, None)
    for key in ("moe_router_enable_expert_bias", "use_rmsnorm"):
        keys.require(key, True, None)
    is_normalized = keys.get("num_experts_per_tok") != 1
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=is_normalized)
    config = ling(keys, with_sigmoid_router(keys, experts), computed=("partial_rotary_factor",))
    return replace(config, qk_norm="heads" if keys.flag("use_qk_norm") else "none")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_gating(keys, SIGMOID)
    norm = "blk.0.attn_q_norm.weight"
    return {**gguf_experts(keys, config), "use_qk_norm": norm in keys.file.tensors}


FAMILY = Family(
    ("BailingMoeV2ForCausalLM", _SARVAM),
    decoder_config,
    renames=RENAMES,
    mtp="layer",
    gguf=GGUFArchitecture(
        "bailingmoe2",
        has_partial_rotary=True,
        tensor_names={"attn_qkv": "self_attn.qkv_proj"},
        experts="required",
        config=_gguf_config,
    ),
)
