"""Fields of the mmproj files of a projector type (llama.cpp): their keys as those of Hugging Face's `config.json` and
`preprocessor_config.json`, and our names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jaxserve.checkpoint.gguf.towers.keys import TowerKeys

SIDE: Final = 1 << 14
"""Most pixels of an image's side, and most patches of a block's."""
MAX_LAYERS: Final = 1024
HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GATED: Final = {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj"}


@dataclass(frozen=True, slots=True)
class Projector:
    """Files of one projector type."""

    kind: str
    """`clip.projector_type`."""
    architectures: tuple[str, ...]
    """`general.architecture` of the text models that it goes with."""
    model_type: str
    """`model_type` of the multimodal model's `config.json`."""
    processor_type: str
    """`image_processor_type` of its `preprocessor_config.json`."""
    tokens: Mapping[str, tuple[str, ...]]
    """Texts of control tokens by their names in `tokenizer_config.json`; of several, the first one that the vocabulary has is used.
    `image_token` stands for one embedding."""
    vision: Callable[[TowerKeys], dict[str, Any]]
    """Return `vision_config`."""
    preprocessing: Callable[[TowerKeys], dict[str, Any]]
    """Return keys of `preprocessor_config.json`, beside those of normalisation."""
    whole: Callable[[TowerKeys], dict[str, Any]] = lambda keys: {}
    """Return keys of `config.json`, beside `vision_config`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Our names of tensors, and of parts of a layer, by llama.cpp's, where they are not the common ones; a prefix ends with a dot."""
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the file adds to tensors, by our names."""
    unused: tuple[str, ...] = ()
    """llama.cpp's names of tensors that are not read."""
    last_matrix: str | None = None
    """llama.cpp's name of the matrix that makes embeddings, if the key of their width has that of another one; None: the key is right."""
    has_linear_patches: bool = False
    """True if a kernel of patches is a matrix in Hugging Face's checkpoints, whose columns have the channels last."""
    is_rope_permuted: bool = False
    """True if the rows of queries and keys are reordered as in `GGUFArchitecture.is_rope_permuted`."""


def siglip(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of a SigLIP tower."""
    vision = keys.vision
    return {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "num_hidden_layers": vision.integer("block_count"),
        "num_attention_heads": vision.integer("attention.head_count"),
        "image_size": vision.integer("image_size"),
        "patch_size": vision.integer("patch_size"),
        "layer_norm_eps": vision.number("attention.layer_norm_epsilon"),
        "hidden_act": keys.activation("gelu_pytorch_tanh"),
    }


def square(keys: TowerKeys) -> dict[str, Any]:
    """Return the one size of all images."""
    side = keys.vision.integer("image_size", maximum=SIDE)
    return {"size": {"height": side, "width": side}}
