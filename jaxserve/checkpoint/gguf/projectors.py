"""Image encoders and projectors of mmproj files (llama.cpp), by `clip.projector_type`: their keys as those of Hugging Face's
`config.json` and `preprocessor_config.json`, and our names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from jaxserve.checkpoint.gguf.tower_keys import TowerKeys

_SIDE: Final = 1 << 14
"""Most pixels of an image's side, and most patches of a block's."""
_MAX_LAYERS: Final = 1024
_QWEN_MERGE: Final = 2
_QWEN_WINDOW: Final = 112
_FRAMES: Final = 2
"""Frames of Qwen's patch embeddings, which files have as two kernels."""
_LAST: Final = "mm.2.weight"
"""The last matrix of Qwen's projector."""
_QWEN_TOKENS: Final = {"image_token": ("<|image_pad|>",)}
_QWEN_NAMES: Final = {
    "v.post_ln.": "connector.norm.",
    "mm.0.": "connector.linear_fc1.",
    "mm.2.": "connector.linear_fc2.",
}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED: Final = {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj"}
_GEMMA3_SCALE: Final = 4
"""Patches of a block's side of every published Gemma 3; files of other models have a key."""
_GEMMA4_SCALE, _GEMMA4_TOKENS = 3, 280
_INTERNVL_SCALE, _INTERNVL_TILES = 2, 12
"""Values of published models, which some files leave out: a block's side in patches, and most tokens or tiles of an image."""
_SIGLIP_EPS, _CONVERTERS_EPS = 1e-6, 1e-5


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
    has_linear_patches: bool = False
    """True if a kernel of patches is a matrix in Hugging Face's checkpoints, whose columns have the channels last."""
    is_rope_permuted: bool = False
    """True if the rows of queries and keys are reordered as in `GGUFArchitecture.is_rope_permuted`."""


def _siglip(keys: TowerKeys) -> dict[str, Any]:
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


def _idefics3(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of SmolVLM's and Idefics3's tower.

    Published configs leave the epsilon of norms out: transformers computes with 1e-6, and converters write 1e-5.
    """
    found = _siglip(keys)
    return found | ({"layer_norm_eps": _SIGLIP_EPS} if found["layer_norm_eps"] == _CONVERTERS_EPS else {})


def _qwen(keys: TowerKeys, gelu: str) -> dict[str, Any]:
    """Return the keys that the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL have."""
    vision = keys.vision
    return {
        "depth": vision.integer("block_count", maximum=_MAX_LAYERS),
        "num_heads": vision.integer("attention.head_count"),
        "patch_size": vision.integer("patch_size"),
        "spatial_merge_size": vision.integer("spatial_merge_size", _QWEN_MERGE, maximum=_SIDE),
        "temporal_patch_size": _FRAMES,
        "hidden_act": keys.activation(gelu),
    }


def _qwen2(keys: TowerKeys) -> dict[str, Any]:
    width = keys.vision.integer("embedding_length")
    own = {"embed_dim": width, "mlp_ratio": keys.intermediate_size() // width, "hidden_size": keys.outputs(_LAST)}
    return _qwen(keys, "gelu") | own


def _qwen2_5(keys: TowerKeys) -> dict[str, Any]:
    shared, period = _qwen(keys, "gelu"), keys.vision.integer("n_wa_pattern")
    return shared | {
        "hidden_size": keys.vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "out_hidden_size": keys.outputs(_LAST),
        "window_size": keys.vision.integer("window_size", _QWEN_WINDOW, maximum=_SIDE),
        "fullatt_block_indexes": list(range(period - 1, shared["depth"], period)),
    }


def _qwen3(keys: TowerKeys) -> dict[str, Any]:
    side = keys.vision.integer("image_size", maximum=_SIDE) // keys.vision.integer("patch_size")
    return _qwen(keys, "gelu_pytorch_tanh") | {
        "hidden_size": keys.vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "out_hidden_size": keys.outputs(_LAST),
        "num_position_embeddings": side**2,
        "deepstack_visual_indexes": keys.deepstack_layers(),
    }


def _areas(keys: TowerKeys, *, low: int, high: int) -> dict[str, Any]:
    """Return the bounds of an image's area. low, high: those of the published checkpoints, for files without."""
    vision = keys.vision
    return {
        "patch_size": vision.integer("patch_size"),
        "merge_size": vision.integer("spatial_merge_size", _QWEN_MERGE, maximum=_SIDE),
        "min_pixels": vision.integer("image_min_pixels", low),
        "max_pixels": vision.integer("image_max_pixels", high),
    }


def _tiles(keys: TowerKeys) -> dict[str, Any]:
    """Return the sizes of tiles and of whole images; published ones have four tiles on a side at most."""
    side = keys.vision.integer("image_size", maximum=_SIDE)
    longest = keys.vision.integer("preproc_image_size", 4 * side, maximum=_SIDE)
    return {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest}}


def _scale(keys: TowerKeys) -> dict[str, Any]:
    return {"scale_factor": keys.vision.integer("projector.scale_factor", maximum=_SIDE)}


def _pixtral(keys: TowerKeys) -> dict[str, Any]:
    vision = keys.vision
    return {
        "model_type": "pixtral",
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "num_hidden_layers": vision.integer("block_count"),
        "num_attention_heads": vision.integer("attention.head_count"),
        "patch_size": vision.integer("patch_size"),
        "hidden_act": keys.activation("gelu"),
    }


def _pixtral_projector(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of Mistral 3's projector, which joins blocks of patches, or of Pixtral's, published as LLaVA's."""
    projector = {"vision_feature_layer": -1, "multimodal_projector_bias": "mm.1.bias" in keys.file.tensors}
    if "mm.patch_merger.weight" not in keys.file.tensors:
        return projector | {"model_type": "llava", "vision_feature_select_strategy": "full"}
    return projector | {"spatial_merge_size": keys.vision.integer("spatial_merge_size", maximum=_SIDE)}


def _internvl(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of InternViT, most of which the tensors tell."""
    tensors = keys.file.tensors
    return _siglip(keys) | {
        "hidden_act": keys.activation("gelu"),
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "use_mean_pooling": "v.post_ln.weight" not in tensors,
    }


def _internvl_ratio(keys: TowerKeys) -> dict[str, Any]:
    return {"downsample_ratio": 1 / keys.vision.integer("projector.scale_factor", _INTERNVL_SCALE, maximum=_SIDE)}


def _grid(keys: TowerKeys) -> dict[str, Any]:
    """Return the size and the numbers of tiles."""
    vision = keys.vision
    most = vision.integer("preproc_max_tiles", _INTERNVL_TILES, maximum=_SIDE)
    return _square(keys) | {"min_patches": vision.integer("preproc_min_tiles", 1, maximum=most), "max_patches": most}


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
    return keys.vision.integer("projector.scale_factor", _GEMMA4_SCALE, maximum=_SIDE)


def _budget(keys: TowerKeys) -> dict[str, Any]:
    """Return the number of tokens of an image, which published files leave out."""
    patch, side = keys.vision.integer("patch_size", maximum=_SIDE), _pooled(keys)
    area = (patch * side) ** 2
    return {
        "do_normalize": False,
        "patch_size": patch,
        "pooling_kernel_size": side,
        "max_soft_tokens": max(keys.vision.integer("image_max_pixels", _GEMMA4_TOKENS * area) // area, 1),
    }


def _longest(keys: TowerKeys) -> dict[str, Any]:
    return {"size": {"longest_edge": keys.vision.integer("image_size", maximum=_SIDE)}}


def _gemma3_tokens(keys: TowerKeys) -> dict[str, Any]:
    vision = keys.vision
    block = vision.integer("projector.scale_factor", _GEMMA3_SCALE, maximum=_SIDE)
    return {"mm_tokens_per_image": (vision.integer("image_size") // vision.integer("patch_size") // block) ** 2}


def _square(keys: TowerKeys) -> dict[str, Any]:
    """Return the one size of all images."""
    side = keys.vision.integer("image_size", maximum=_SIDE)
    return {"size": {"height": side, "width": side}}


PROJECTORS: Final[Mapping[str, Projector]] = {
    projector.kind: projector
    for projector in (
        Projector(
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
            vision=_siglip,
            preprocessing=_square,
            whole=_gemma3_tokens,
            names={
                "mm.input_projection.weight": "connector.mm_input_projection_weight",
                "mm.soft_emb_norm.": "connector.mm_soft_emb_norm.",
            },
            offsets={"connector.mm_soft_emb_norm.weight": 1.0},
        ),
        Projector(
            "qwen2.5vl_merger",
            architectures=("qwen2vl",),
            model_type="qwen2_5_vl",
            processor_type="Qwen2VLImageProcessor",
            tokens=_QWEN_TOKENS,
            vision=_qwen2_5,
            preprocessing=partial(_areas, low=56 * 56, high=28 * 28 * 16_384),
            names={**_QWEN_NAMES, **_GATED},
        ),
        Projector(
            "qwen2vl_merger",
            architectures=("qwen2vl",),
            model_type="qwen2_vl",
            processor_type="Qwen2VLImageProcessor",
            tokens=_QWEN_TOKENS,
            vision=_qwen2,
            preprocessing=partial(_areas, low=56 * 56, high=28 * 28 * 16_384),
            names=_QWEN_NAMES,
        ),
        Projector(
            "qwen3vl_merger",
            architectures=("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
            model_type="qwen3_vl",
            processor_type="Qwen2VLImageProcessor",
            tokens=_QWEN_TOKENS,
            vision=_qwen3,
            preprocessing=partial(_areas, low=256 * 256, high=4096 * 4096),
            names=_QWEN_NAMES,
        ),
        Projector(
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
        ),
        Projector(
            "pixtral",
            architectures=("mistral3", "llama"),
            model_type="mistral3",
            processor_type="PixtralImageProcessor",
            tokens={
                "image_token": ("[IMG]",),
                "image_break_token": ("[IMG_BREAK]",),
                "image_end_token": ("[IMG_END]",),
            },
            vision=_pixtral,
            preprocessing=_longest,
            whole=_pixtral_projector,
            names={
                **_GATED,
                "mm.1.": "connector.linear_1.",
                "mm.2.": "connector.linear_2.",
                "mm.input_norm.": "connector.norm.",
                "mm.patch_merger.": "connector.merging_layer.",
            },
            unused=("v.token_embd.img_break",),  # a row of the text model's embeddings
            is_rope_permuted=True,
        ),
        Projector(
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
                **_HEAD_NORMS,
                "ls1": "layer_scale1",
                "ls2": "layer_scale2",
                "mm.model.mlp.0.": "connector.norm.",
                "mm.model.mlp.1.": "connector.linear_1.",
                "mm.model.mlp.3.": "connector.linear_2.",
            },
        ),
        Projector(
            "gemma4v",
            architectures=("gemma4",),
            model_type="gemma4",
            processor_type="Gemma4ImageProcessor",
            tokens={"image_token": ("<|image|>",), "boi_token": ("<|image>",), "eoi_token": ("<image|>",)},
            vision=_gemma4,
            preprocessing=_budget,
            names={
                **_GATED,
                **_HEAD_NORMS,
                "attn_post_norm": "post_attention_layernorm",
                "ffn_post_norm": "post_feedforward_layernorm",
                "v.std_bias": "connector.std_bias",
                "v.std_scale": "connector.std_scale",
                "mm.input_projection.": "connector.embedding_projection.",
            },
            has_linear_patches=True,
        ),
    )
}
