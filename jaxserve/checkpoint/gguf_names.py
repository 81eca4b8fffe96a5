"""llama.cpp's names for the tensors of a decoder in Hugging Face's vocabulary, and its architectures, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

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

_BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: what each rotary frequency is divided by (see gguf_config)."""


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


ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", is_rope_permuted=True, has_bias_flags=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", is_rope_permuted=False, has_bias_flags=False),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", is_rope_permuted=False, has_bias_flags=True),
    "smollm3": GGUFArchitecture(
        "SmolLM3ForCausalLM", "smollm3", is_rope_permuted=True, has_bias_flags=True, no_rope_interval=4
    ),
}
"""By `general.architecture`. Mistral's files say "llama"."""


def hf_name(gguf_name: str, num_layers: int) -> str | None:
    """The Hugging Face name of a GGUF tensor; None when it is not one of a decoder with that many layers."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match is None or int(match[1]) >= num_layers or match[2] not in _PER_LAYER:
        return None
    return f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}.{match[3]}"
