"""llama.cpp's names for the tensors of a decoder in Hugging Face's vocabulary, and its architectures, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AROUND = _NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}

_BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
NO_WEIGHTS = (ROPE_FACTORS, SHORT_DIVISORS, LONG_DIVISORS)
"""What each rotary frequency is divided by (see gguf_config)."""


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How llama.cpp stores one architecture."""

    hf_architecture: str
    hf_model_type: str
    is_rope_permuted: bool
    """The rows of q and k are reordered from Hugging Face's half-split rope to adjacent pairs."""
    has_bias_flags: bool
    """The config says `attention_bias` and `mlp_bias`; without it, what has a bias is fixed."""
    no_rope_interval: int | None = None
    """Every so many layers one has no rotary embedding. llama.cpp hard-codes it: no key carries it."""
    rotates_in_part: bool = False
    """A head may have more dimensions than rotate."""
    norm_offset: float = 0.0
    """What is added to the weights of norms as they are stored."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of a layer that are called otherwise, or that others do not have."""


ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", is_rope_permuted=True, has_bias_flags=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", is_rope_permuted=False, has_bias_flags=False),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", is_rope_permuted=False, has_bias_flags=True),
    "smollm3": GGUFArchitecture(
        "SmolLM3ForCausalLM", "smollm3", is_rope_permuted=True, has_bias_flags=True, no_rope_interval=4
    ),
    "gemma2": GGUFArchitecture(
        "Gemma2ForCausalLM",
        "gemma2",
        is_rope_permuted=False,
        has_bias_flags=False,
        norm_offset=1.0,
        own_names=_NORMS_AROUND,
    ),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        is_rope_permuted=False,
        has_bias_flags=False,
        norm_offset=1.0,
        own_names=_NORMS_AROUND,
    ),
    "phi3": GGUFArchitecture(
        "Phi3ForCausalLM",
        "phi3",
        is_rope_permuted=False,
        has_bias_flags=False,
        rotates_in_part=True,
        own_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "olmo2": GGUFArchitecture(
        "Olmo2ForCausalLM", "olmo2", is_rope_permuted=False, has_bias_flags=False, own_names=_NORMS_BEHIND
    ),
    "granite": GGUFArchitecture("GraniteForCausalLM", "granite", is_rope_permuted=True, has_bias_flags=True),
}
"""By `general.architecture`. Mistral's files say "llama"."""


def hf_name(gguf_name: str, kind: GGUFArchitecture, num_layers: int) -> str | None:
    """The Hugging Face name of a GGUF tensor; None when it is not one of such a decoder with that many layers."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match is None or int(match[1]) >= num_layers:
        return None
    part = kind.own_names.get(match[2], _PER_LAYER.get(match[2]))
    return None if part is None else f"model.layers.{match[1]}.{part}.{match[3]}"
