"""mmproj files of towers of SigLIP and InternViT, whose images or tiles have one size: Gemma 3, SmolVLM and Idefics3, InternVL."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.gguf.towers.keys import TowerKeys
from jaxserve.checkpoint.gguf.towers.projector import HEAD_NORMS, SIDE, Projector, siglip, square

_GEMMA3_SCALE: Final = 4
"""Patches of a block's side of every published Gemma 3; files of other models have a key."""
_INTERNVL_SCALE, _INTERNVL_TILES = 2, 12
"""Values of published models, which some files leave out: a block's side in patches, and most tiles of an image."""
_SIGLIP_EPS, _CONVERTERS_EPS = 1e-6, 1e-5


def _idefics3(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of SmolVLM's and Idefics3's tower.

    Published configs leave the epsilon of norms out: transformers computes with 1e-6, and converters write 1e-5.
    """
    found = siglip(keys)
    return found | ({"layer_norm_eps": _SIGLIP_EPS} if found["layer_norm_eps"] == _CONVERTERS_EPS else {})


def _tiles(keys: TowerKeys) -> dict[str, Any]:
    """Return the sizes of tiles and of whole images; published ones have four tiles on a side at most."""
    side = keys.vision.integer("image_size", maximum=SIDE)
    longest = keys.vision.integer("preproc_image_size", 4 * side, maximum=SIDE)
    return {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest}}


def _scale(keys: TowerKeys) -> dict[str, Any]:
    return {"scale_factor": keys.vision.integer("projector.scale_factor", maximum=SIDE)}


def _gemma3_tokens(keys: TowerKeys) -> dict[str, Any]:
    vision = keys.vision
    block = vision.integer("projector.scale_factor", _GEMMA3_SCALE, maximum=SIDE)
    return {"mm_tokens_per_image": (vision.integer("image_size") // vision.integer("patch_size") // block) ** 2}


def _internvl(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of InternViT, most of which the tensors tell."""
    tensors = keys.file.tensors
    return siglip(keys) | {
        "hidden_act": keys.activation("gelu"),
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "use_mean_pooling": "v.post_ln.weight" not in tensors,
    }


def _internvl_ratio(keys: TowerKeys) -> dict[str, Any]:
    return {"downsample_ratio": 1 / keys.vision.integer("projector.scale_factor", _INTERNVL_SCALE, maximum=SIDE)}


def _grid(keys: TowerKeys) -> dict[str, Any]:
    """Return the size and the numbers of tiles."""
    vision = keys.vision
    most = vision.integer("preproc_max_tiles", _INTERNVL_TILES, maximum=SIDE)
    return square(keys) | {"min_patches": vision.integer("preproc_min_tiles", 1, maximum=most), "max_patches": most}


GEMMA3: Final = Projector(
    "gemma3",
    architectures=("gemma3",),
    model_type="gemma3",
    processor_type="Gemma3ImageProcessor",
    # Some files have no row for the first one, which no text has; the other one is reserved and unused.
    tokens={
        "image_token": ("<image_soft_token>", "<unused0>"),
        "boi_token": ("<start_of_image>",),
        "eoi_token": ("<end_of_image>",),
    },
    vision=siglip,
    preprocessing=square,
    whole=_gemma3_tokens,
    names={
        "mm.input_projection.weight": "connector.mm_input_projection_weight",
        "mm.soft_emb_norm.": "connector.mm_soft_emb_norm.",
    },
    offsets={"connector.mm_soft_emb_norm.weight": 1.0},
)
IDEFICS3: Final = Projector(
    "idefics3",
    architectures=("llama",),
    model_type="smolvlm",
    processor_type="SmolVLMImageProcessor",
    tokens={
        "image_token": ("<image>",),
        "fake_image_token": ("<fake_token_around_image>",),
        "global_image_token": ("<global-img>",),
    },
    vision=_idefics3,
    preprocessing=_tiles,
    whole=_scale,
    names={"mm.model.fc.": "connector.proj."},
)
INTERNVL: Final = Projector(
    "internvl",
    architectures=("qwen2", "qwen3", "qwen3moe"),
    model_type="internvl",
    processor_type="GotOcr2ImageProcessor",
    tokens={
        "image_token": ("<IMG_CONTEXT>",),
        "start_image_token": ("<img>",),
        "end_image_token": ("</img>",),
    },
    vision=_internvl,
    preprocessing=_grid,
    whole=_internvl_ratio,
    names={
        **HEAD_NORMS,
        "ls1": "layer_scale1",
        "ls2": "layer_scale2",
        "mm.model.mlp.0.": "connector.norm.",
        "mm.model.mlp.1.": "connector.linear_1.",
        "mm.model.mlp.3.": "connector.linear_2.",
    },
)
