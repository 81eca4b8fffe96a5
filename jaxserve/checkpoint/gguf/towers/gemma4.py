"""mmproj files of Gemma 4."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.gguf.towers.keys import TowerKeys
from jaxserve.checkpoint.gguf.towers.projector import GATED, HEAD_NORMS, SIDE, Projector

_GEMMA4_SCALE, _GEMMA4_TOKENS = 3, 280
"""Values of published models, which files leave out: a block's side in patches, and most tokens of an image."""


def _gemma4(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of Gemma 4's tower, whose files have none for the activation: it is that of every published model."""
    vision, tensors = keys.vision, keys.file.tensors
    num_heads = vision.integer("attention.head_count")
    return {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "num_hidden_layers": vision.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": keys.outputs("v.blk.0.attn_q.weight") // num_heads,
        "patch_size": vision.integer("patch_size"),
        "pooling_kernel_size": _pooled(keys),
        "position_embedding_size": keys.shape("v.position_embd.weight")[-2],
        "rms_norm_eps": vision.number("attention.layer_norm_epsilon"),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in tensors,
        "standardize": "v.std_bias" in tensors,
    }


def _pooled(keys: TowerKeys) -> int:
    return keys.vision.integer("projector.scale_factor", _GEMMA4_SCALE, maximum=SIDE)


def _budget(keys: TowerKeys) -> dict[str, Any]:
    """Return the number of tokens of an image, which published files leave out."""
    patch, side = keys.vision.integer("patch_size", maximum=SIDE), _pooled(keys)
    area = (patch * side) ** 2
    return {
        "do_normalize": False,
        "patch_size": patch,
        "pooling_kernel_size": side,
        "max_soft_tokens": max(keys.vision.integer("image_max_pixels", _GEMMA4_TOKENS * area) // area, 1),
    }


GEMMA4: Final = Projector(
    "gemma4v",
    architectures=("gemma4",),
    model_type="gemma4",
    processor_type="Gemma4ImageProcessor",
    tokens={"image_token": ("<|image|>",), "boi_token": ("<|image>",), "eoi_token": ("<image|>",)},
    vision=_gemma4,
    preprocessing=_budget,
    names={
        **GATED,
        **HEAD_NORMS,
        "attn_post_norm": "post_attention_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        "v.std_bias": "connector.std_bias",
        "v.std_scale": "connector.std_scale",
        "mm.input_projection.": "connector.embedding_projection.",
    },
    has_linear_patches=True,
)
