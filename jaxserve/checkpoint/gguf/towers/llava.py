"""mmproj files of LLaVA 1.5 and LLaVA-NeXT (projector type `mlp`), whose text models are Llamas with a vocabulary of their own."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.gguf.towers.keys import TowerKeys
from jaxserve.checkpoint.gguf.towers.projector import SIDE, Projector, siglip, square

_LAST: Final = "mm.2.weight"
"""The last matrix of the projector."""
_CLASS: Final = "v.class_embd"
_NEWLINE: Final = "model.image_newline"


def _clip(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of a CLIP tower, whose file has the layers up to the one whose output is read."""
    if _CLASS not in keys.file.tensors:
        keys.fail_tensor(_CLASS, "the class token of a CLIP tower")
    own = siglip(keys)
    return own | {"model_type": "clip_vision_model", "hidden_act": keys.activation("gelu")}


def _whole(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of the layers that are read, and of LLaVA-NeXT its sizes of images.

    Without a key the last layer of the file is read: converters leave out those after it, and llama.cpp
    reads one less (https://github.com/ggml-org/llama.cpp/issues/25817).
    """
    own = {"vision_feature_layer": keys.vision.get("feature_layer") or -1}
    if _NEWLINE not in keys.file.tensors:
        return own | {"model_type": "llava"}
    return own | {"model_type": "llava_next", "image_grid_pinpoints": _pinpoints(keys)}


def _pinpoints(keys: TowerKeys) -> list[list[int]]:
    """Return heights and widths of LLaVA-NeXT's images, which the file has one after the other."""
    found = keys.vision.get("image_grid_pinpoints")
    if not isinstance(found, list) or len(found) % 2 or not all(type(side) is int for side in found):
        keys.vision.fail("image_grid_pinpoints", "pairs of pixels", found)
    return [list(pair) for pair in zip(found[::2], found[1::2], strict=True)]


def _preprocessing(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of squares, to which images are padded as by LLaVA 1.5 and llama.cpp, or of LLaVA-NeXT's tiles."""
    side = keys.vision.integer("image_size", maximum=SIDE)
    sizes = {"size": {"shortest_edge": side}, "crop_size": square(keys)["size"]}
    if _NEWLINE not in keys.file.tensors:
        return sizes | {"do_pad": True}
    pinpoints = _pinpoints(keys)
    return sizes | {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": pinpoints}


LLAVA: Final = Projector(
    "mlp",
    architectures=("llama",),
    model_type="llava",
    processor_type="LlavaImageProcessor",
    # Most files have no row for the first one. No text has the others: Llama's vocabulary has every byte, and Llama 3's reserves tokens.
    tokens={"image_token": ("<image>", "<unk>", "<|reserved_special_token_0|>")},
    vision=_clip,
    preprocessing=_preprocessing,
    whole=_whole,
    names={"mm.0.": "connector.linear_1.", "mm.2.": "connector.linear_2.", _NEWLINE: "image_newline"},
    last_matrix=_LAST,
)
