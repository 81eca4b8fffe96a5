"""Checkpoints whose tensors get other names, and the text model inside a multimodal checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint import cosmos
from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.vision_names import (
    THINKER,
    VISION,
    is_audio,
    join_bounds,
    split_vision_qkv,
    vision_name,
    with_axes_first,
    with_class_first,
    with_position_table,
    without_single_axes,
)
from jaxserve.quant.tensor import TensorInfo

_DECODER_PREFIX: Final = "model."
_OUTSIDE: Final = ("lm_head.", VISION)
"""Starts of the names of tensors that are not part of the decoder without its head."""
_BARE: Final = "Model"
_TEXT: Final = "Text"
_SCORER: Final = "ForSequenceClassification"
_WITH_HEAD: Final = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' classes of decoders without and with their heads."""
SCORES: Final = "scores_texts"
"""Key under which a decoder's config says that its checkpoint has a head for scores, `score`, in place of one for tokens."""
TIED: Final = "tie_word_embeddings"
_SHARED_KEYS: Final = ("quantization_config", "bos_token_id", "eos_token_id", TIED)
_PREFIXES: Final = {
    "language_model.model.encoder.layers.": "model.layers.",  # as transformers saves Qianfan-OCR
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    THINKER + "model.language_model.": "model.",
    THINKER: "",
}
"""Prefixes of the text model's tensors, of which transformers has used several orders, and our prefixes."""
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
MULTIMODAL: Final = "multimodal_config"
"""Key under which a text model's config keeps that of the multimodal model that it is a part of."""
_THINKER: Final = "thinker_config"
_DERIVED: Final = ".embeddings.position_ids"
"""End of the name of integers that older towers store and every implementation computes."""
_ROUTER: Final = ".mlp.gate.weight"
_CORRECTION: Final = "e_score_correction_bias"
_MTP: Final = ("mtp.", "mtp_dspark.", "model.mtp.", "model.mtp_")
_MTP_COUNTS: Final = ("num_nextn_predict_layers", "num_mtp_modules")


def with_decoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """Add the prefix `model.` to a decoder saved without its head, as GPT-2 was published and sentence-transformers saves decoders."""
    if any(name.startswith(_DECODER_PREFIX) for name in checkpoint.tensors):
        return checkpoint
    return renamed(checkpoint, lambda name: name if name.startswith(_OUTSIDE) else _DECODER_PREFIX + name)


def with_our_names(checkpoint: Checkpoint, renames: Mapping[str, str]) -> Checkpoint:
    """Replace the components of tensor names that `renames` lists, several in a row before single ones."""
    return renamed(checkpoint, partial(our_name, renames)) if renames else checkpoint


def our_name(renames: Mapping[str, str], name: str) -> str:
    """Return our name of a tensor or module of the text model; names of a tower stay."""
    if name.startswith(VISION):
        return name
    name = f".{name}"
    for old, new in renames.items():
        if "." in old:
            name = name.replace(f".{old}", f".{new}")
    return ".".join(renames.get(part, part) for part in name[1:].split("."))


def with_our_keys(config: Mapping[str, Any], key_names: Mapping[str, str]) -> dict[str, Any]:
    """Return a config with our names of keys that a family names differently (`Family.key_names`)."""
    ours = {ours: config[own] for own, ours in key_names.items() if own in config}
    return {key: value for key, value in config.items() if key not in key_names} | ours


def without_unused(checkpoint: Checkpoint, ends: tuple[str, ...]) -> Checkpoint:
    """Leave out the tensors whose names end so."""
    return renamed(checkpoint, lambda name: None if name.endswith(ends) else name) if ends else checkpoint


def with_zero_corrections(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a correction bias of zeros for each router of experts that has none."""
    missing: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        own = name.removesuffix("weight") + _CORRECTION
        if name.endswith(_ROUTER) and own not in checkpoint.tensors:
            missing[own] = replace(info, name=own, shape=info.shape[:1], stored_dtype="F32", num_stored_bytes=0)
    readers = {name: partial(_zeros, info.shape) for name, info in missing.items()}
    return CheckpointView(checkpoint, {**checkpoint.tensors, **missing}, readers) if missing else checkpoint


def _zeros(shape: tuple[int, ...], inner: Checkpoint) -> np.ndarray:
    return np.zeros(shape, np.float32)


def without_mtp_layers(checkpoint: Checkpoint) -> Checkpoint:
    """Leave out multi-token-prediction layers: those after the last layer of some decoders (DeepSeek-V3, GLM-4.5, MiniMax-M2), and
    modules whose names begin with `mtp` (Qwen3-Next, Qwen3.5, MiMo-V2-Flash, ERNIE 4.5)."""
    if any(name.startswith(_MTP) for name in checkpoint.tensors):
        checkpoint = renamed(checkpoint, lambda name: None if name.startswith(_MTP) else name)
    counts, first = [checkpoint.config.get(key) for key in _MTP_COUNTS], checkpoint.config.get("num_hidden_layers")
    count = next((each for each in counts if type(each) is int), None)
    if count is None or not isinstance(first, int):
        return checkpoint
    prefixes = tuple(f"model.layers.{first + index}." for index in range(count))
    return renamed(checkpoint, lambda name: None if name.startswith(prefixes) else name)


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> Checkpoint:
    """Return the checkpoint with new tensor names; tensors whose new name is None are left out."""
    names = {new: name for name in checkpoint.tensors if (new := rename(name)) is not None}
    tensors = {new: replace(checkpoint.tensors[old], name=new) for new, old in names.items()}
    return CheckpointView(checkpoint, tensors, {new: methodcaller("read", old) for new, old in names.items()})


def architecture(config: Mapping[str, Any]) -> str | None:
    """Return the name of the model's class, if `config.json` has one."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def without_speech(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json` of the part of an omni model that makes texts, under the class of the whole one; any other config unchanged."""
    thinker = config.get(_THINKER)
    if not isinstance(thinker, dict):
        return dict(config)
    outer = {key: config[key] for key in ("architectures", "quantization_config") if key in config}
    return {**thinker, **outer}


def text_config(config: dict[str, Any], families: Collection[Family]) -> dict[str, Any]:
    """Return `config.json` of the text model in a multimodal checkpoint, or of a decoder saved without its head, or with one for scores,
    with the name of the class that has one (`Qwen3ForCausalLM` for `Qwen3Model`); any other config unchanged."""
    config = without_speech(config)
    name, text = architecture(config), config.get("text_config")
    known = {each for family in families for each in family.architectures}
    if name is not None and name.endswith((_BARE, _SCORER)) and name not in known and text is None:
        stem = name.removesuffix(_BARE).removesuffix(_SCORER).removesuffix(_TEXT)  # as in Gemma3TextModel
        headed = {stem + end for end in _WITH_HEAD} & known
        scores = {SCORES: True} if name.endswith(_SCORER) else {}
        return {**config, **scores, "architectures": [*headed]} if headed else config
    if text is None and "vision_config" in config:  # the text model's keys are beside the vision model's (Qwen2-VL)
        text = {key: value for key, value in config.items() if key != "vision_config"}
    if not isinstance(text, dict):
        return config
    family = next((family for family in families if _is_text_part(family, name, text)), None)
    if family is None:
        return config
    shared = {key: config[key] for key in _SHARED_KEYS if key in config and text.get(key) is None}
    whole = {key: value for key, value in config.items() if key != "text_config"}
    # transformers ties by the outer key, by that of the text part, or by either, and saves them apart.
    tied = {TIED: True} if config.get(TIED) is True or text.get(TIED) is True else {}
    return {**text, **shared, **tied, "architectures": [family.architectures[0]], MULTIMODAL: whole}


def is_tied_in_part(config: Mapping[str, Any]) -> bool:
    """Return True if only one of a multimodal `config.json` and its text part says that the output head is the embedding
    matrix, and the other one denies it."""
    config = without_speech(config)
    text = config.get("text_config")
    return isinstance(text, dict) and {config.get(TIED), text.get(TIED)} == {True, False}


def _is_text_part(family: Family, name: str | None, text: Mapping[str, Any]) -> bool:
    kinds = family.text_model_types
    return name in family.text_part_of and (not kinds or text.get("model_type") in kinds)


def with_text_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return a multimodal checkpoint with the text model under its own names, the tower's tensors after `vision.`, and none of
    an audio encoder or a generator; any other checkpoint unchanged."""
    if checkpoint.config.get(MULTIMODAL, {}).get("model_type") in cosmos.MODEL_TYPES:
        checkpoint = renamed(checkpoint, cosmos.reader_name)
    if not any(name.startswith(tuple(_PREFIXES)) or vision_name(name) or is_audio(name) for name in checkpoint.tensors):
        return checkpoint
    tower = checkpoint.config.get(MULTIMODAL, checkpoint.config).get("vision_config")
    checkpoint = join_bounds(split_vision_qkv(renamed(checkpoint, _our_part), tower))
    return with_class_first(with_axes_first(without_single_axes(with_position_table(checkpoint))))


def _our_part(name: str) -> str | None:
    """Return our name of a tower's or text model's tensor; None if nothing reads it."""
    return None if name.endswith(_DERIVED) else vision_name(name) or text_name(name)


def text_name(name: str) -> str | None:
    """Return the name of a tensor or module in the text model; None if it belongs to the vision or audio part."""
    if vision_name(name) or is_audio(name):
        return None
    found = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name if found is None else _PREFIXES[found] + name.removeprefix(found)
