"""Names of tensors in Cosmos 3's checkpoints, which hold a generator of images, videos and sounds beside the model that reads."""

from __future__ import annotations

from typing import Final

MODEL_TYPES: Final = ("cosmos3_omni", "cosmos3_edge")
_DECODER: Final = "model.language_model."
_TEXT: Final = ("layers.", "embed_tokens.", "norm.")
_TOWER: Final = ("blocks.", "merger.", "patch_embed.", "pos_embed.", "deepstack_merger_list.")
_ATTENTION: Final = {
    ".self_attn.to_q.": ".self_attn.q_proj.",
    ".self_attn.to_k.": ".self_attn.k_proj.",
    ".self_attn.to_v.": ".self_attn.v_proj.",
    ".self_attn.to_out.": ".self_attn.o_proj.",
    ".self_attn.norm_q.": ".self_attn.q_norm.",
    ".self_attn.norm_k.": ".self_attn.k_norm.",
}
_EDGE: Final = "model.visual.encoder."
_EDGE_TOWER: Final = {".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2."}
"""transformers' names of the tower of Cosmos 3 Edge, which it saves under those of the decoder."""
_GENERATOR_PARTS: Final = (
    ".add_q_proj.",
    ".add_k_proj.",
    ".add_v_proj.",
    ".to_add_out.",
    ".norm_added_q.",
    ".norm_added_k.",
    "moe_gen",
    ".k_norm_und_for_gen.",
)
_GENERATOR_STARTS: Final = ("proj_out.", "proj_in.", "time_embedder.", "audio_", "action_")


def reader_name(name: str) -> str | None:
    """Return transformers' name of a tensor of Cosmos 3; None if it belongs to the generator."""
    if name.removeprefix(_DECODER).startswith(_GENERATOR_STARTS) or any(part in name for part in _GENERATOR_PARTS):
        return None
    for own, ours in (_ATTENTION | _EDGE_TOWER if name.startswith(_EDGE) else _ATTENTION).items():
        name = name.replace(own, ours)
    if name.startswith(_TEXT):
        return _DECODER + name
    return f"model.visual.{name}" if name.startswith(_TOWER) else name
