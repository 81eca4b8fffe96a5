"""`config.json` as it would be for a GGUF file, from its metadata."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    HEADS,
    KV_HEADS,
    LOG_MULTIPLIER,
    LONG_DIVISORS,
    RMS_NORM_EPS,
    ROPE_FACTORS,
    SECTIONS,
    SHORT_DIVISORS,
    GGUFArchitecture,
    GGUFKeys,
    decimal,
)
from jaxserve.checkpoint.gguf.file import GGUFFile
from jaxserve.checkpoint.gguf.per_layer import by_layer
from jaxserve.errors import CheckpointError, shown

_EMBEDDING = "token_embd.weight"
_LLAMA3_LOW = 1.0
_LLAMA3_FORMS = ((4.0, 8192), (32.0, 131_072), (1.0, 8192))
"""High parameters and original lengths of every published Llama 3.x, of Step 3.5 and of Llama 4: the file keeps the resulting
factors, not the formula."""

_YARN_KEYS_WITHOUT_HF_MEANING = (
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    LOG_MULTIPLIER,
)

_LINEAR_FACTORS = ("rope.scaling.factor", "rope.scale_linear")
_MAX_LAYERS = 1024

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Hugging Face's names of llama.cpp's `general.sampling` keys."""


def find_family(file: GGUFFile, families: Collection[Family]) -> Family:
    """Return the family that `general.architecture` names, with this name; raise CheckpointError unless it is a whole known
    decoder."""
    name = file.metadata.get("general.architecture")
    known = {
        own: replace(family, gguf=replace(family.gguf, name=own))
        for family in families
        if family.gguf is not None
        for own in (family.gguf.name, *family.gguf.other_names)
    }
    found = known.get(name) if isinstance(name, str) else None
    if name == "clip":
        raise CheckpointError(
            f"{file.path}: is an image encoder; give it with --mmproj, and the text model's file as the model"
        )
    if found is None:
        what = "none" if name is None else shown(str(name))
        nearest = _nearest(file, str(name), {own: family.gguf for own, family in known.items() if family.gguf})
        raise CheckpointError(
            f"{file.path}: key 'general.architecture': {what} is not served; the nearest that is: {nearest}; "
            "docs/models.md lists all"
        )
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: key 'general.type': expected 'model', found {shown(str(kind))}")
    return found


def _nearest(file: GGUFFile, name: str, served: Mapping[str, GGUFArchitecture]) -> str:
    """Return the served architecture that has a place for most tensors of a file; of several, that with the most similar name."""

    def num_placed(architecture: GGUFArchitecture) -> int:
        return sum(architecture.hf_name(tensor, _MAX_LAYERS, has_experts=True) is not None for tensor in file.tensors)

    def likeness(own: str) -> tuple[int, float]:
        return num_placed(served[own]), SequenceMatcher(None, name, own).ratio()

    return max(sorted(served), key=likeness)


def hf_config(file: GGUFFile, hf_architecture: str, architecture: GGUFArchitecture) -> dict[str, Any]:
    """Return `config.json` as it would be for the file."""
    keys = GGUFKeys(file, architecture.name)
    num_experts = keys.get("expert_count") or 0
    if num_experts != 0 and architecture.experts == "none":
        keys.fail("expert_count", "a dense model (0 experts)", num_experts)
    if keys.get("attention.causal") is False:
        keys.fail("attention.causal", "true or none: tokens attend to earlier ones only", False)
    vocab_size, hidden_size = _embedding_shape(file, keys)
    config: dict[str, Any] = {
        "architectures": [hf_architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": _num_layers(keys),
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture.eps_key is not None:
        kind = "layer_norm_rms_epsilon" if architecture.eps_key == RMS_NORM_EPS else "layer_norm_epsilon"
        config[architecture.eps_key] = keys.number(f"attention.{kind}")
    if architecture.has_attention:
        config |= _attention_config(keys, architecture, hidden_size)
    if num_experts != 0 or architecture.experts == "required":
        config["num_experts"] = keys.integer("expert_count")
        config["num_experts_per_tok"] = keys.integer("expert_used_count", maximum=config["num_experts"])
    return config | architecture.config(keys, config) | special_tokens(file, vocab_size)


def _attention_config(keys: GGUFKeys, architecture: GGUFArchitecture, hidden_size: int) -> dict[str, Any]:
    """Return the keys of `config.json` for heads, rope, biases and the width of feed-forward blocks."""
    num_heads = _of_all_layers(keys, HEADS, architecture)
    if architecture.has_latent_attention:
        head_dim = keys.integer("rope.dimension_count")
    else:
        head_dim = _head_dim(keys, architecture, hidden_size, num_heads)
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not (
        architecture.has_partial_rotary and rotary_dim % 2 == 0 and rotary_dim < head_dim
    ):
        keys.fail("rope.dimension_count", f"the head size {head_dim}", rotary_dim)
    found: dict[str, Any] = {
        "intermediate_size": _of_all_layers(keys, architecture.width_key, architecture),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _of_all_layers(keys, KV_HEADS, architecture, num_heads),
        "head_dim": head_dim,
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
    }
    if architecture.has_bias_flags:
        found["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
        found["mlp_bias"] = "blk.0.ffn_down.bias" in keys.file.tensors
    if architecture.has_partial_rotary:  # the factor is rounded down when read
        found["partial_rotary_factor"] = math.nextafter(rotary_dim / head_dim, 1.0)
    scaling = _rope_scaling(keys, architecture, rotary_dim, found["rope_theta"])
    sections = _sections(keys)
    if scaling is not None or sections:
        found["rope_scaling"] = {"rope_type": "default", **(scaling or {}), **sections}
    return found


def _num_layers(keys: GGUFKeys) -> int:
    """Return the number of the decoder's layers. Files may have blocks of multi-token-prediction layers after them."""
    num_blocks = keys.integer("block_count", maximum=_MAX_LAYERS)
    return num_blocks - keys.integer("nextn_predict_layers", 0, minimum=0, maximum=num_blocks - 1)


def _of_all_layers(keys: GGUFKeys, key: str, architecture: GGUFArchitecture, default: int | None = None) -> int:
    """Return a number, here of heads, of KV heads or of the width of feed-forward blocks, which all layers share that have any; that of the
    first layer that has any if they may differ."""
    counts = keys.get(key)
    if architecture.varies_by_layer and isinstance(counts, list):
        minimum = 0 if architecture.lacks_blocks else 1
        each = by_layer(keys, key, _num_layers(keys), minimum=minimum)
        return next(filter(None, each), None) or keys.fail(key, "more than 0 in a layer", counts)
    if not architecture.has_mixers or not isinstance(counts, list):
        return keys.integer(key, default)
    num_layers = _num_layers(keys)
    counts = counts[:num_layers]  # without those of multi-token-prediction layers
    found = {count for count in counts if count != 0}
    if len(counts) != num_layers or len(found) != 1 or type(count := found.pop()) is not int or count < 0:
        keys.fail(key, f"0 or the same number for each of the {num_layers} layers", counts)
    return count


def special_tokens(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """Return `bos_token_id` and `eos_token_id` (a list: end of text, end of turn, end of message)."""
    bos = _token_id(file, "bos_token_id", vocab_size)
    ends = (_token_id(file, key, vocab_size) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return {"bos_token_id": bos, "eos_token_id": eos or None}


def generation_config(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `generation_config.json` as it would be: special tokens of `config` and recommended sampling parameters."""
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    stored = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return tokens | {name: decimal(value) for name, value in stored.items() if value is not None}


def _token_id(file: GGUFFile, key: str, vocab_size: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise CheckpointError(
            f"{file.path}: key 'tokenizer.ggml.{key}': expected a token below the {vocab_size} rows of "
            f"'{_EMBEDDING}', found {str(value)[:80]}"
        )
    return value


def _embedding_shape(file: GGUFFile, keys: GGUFKeys) -> tuple[int, int]:
    hidden_size = keys.integer("embedding_length")
    tensor = file.tensors.get(_EMBEDDING)
    if tensor is None:
        raise CheckpointError(f"{file.path}: tensor '{_EMBEDDING}': expected in the file, found none")
    if len(tensor.shape) != 2 or tensor.shape[1] != hidden_size:
        raise CheckpointError(
            f"{file.path}: tensor '{_EMBEDDING}': expected rows of {hidden_size} "
            f"('{keys.architecture}.embedding_length'), found shape {tensor.shape}"
        )
    return tensor.shape[0], hidden_size


def _head_dim(keys: GGUFKeys, architecture: GGUFArchitecture, hidden_size: int, num_heads: int) -> int:
    if not keys.has("attention.key_length") and hidden_size % num_heads:
        keys.fail("attention.head_count", f"a divisor of embedding_length {hidden_size}", num_heads)
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if not architecture.has_narrow_values and keys.integer("attention.value_length", head_dim) != head_dim:
        keys.fail("attention.value_length", f"the head size {head_dim}", keys.get("attention.value_length"))
    if head_dim % 2:
        keys.fail("attention.key_length", "an even head size", head_dim)
    return head_dim


def _rope_scaling(
    keys: GGUFKeys, architecture: GGUFArchitecture, rotary_dim: int, theta: float
) -> dict[str, Any] | None:
    """Return `rope_scaling` from the scaling keys, from longrope's divisors or from the factors of Llama 3.

    A factor without a type is that of linear scaling, and has another key in files of 2023.
    """
    kind = keys.get("rope.scaling.type") or "none"
    if LONG_DIVISORS in keys.file.tensors:
        return _longrope_scaling(keys, kind)
    factor = next((key for key in _LINEAR_FACTORS if keys.get(key) is not None), _LINEAR_FACTORS[0])
    if not keys.has("rope.scaling.type") and keys.get(factor) not in (None, 0.0, 1.0):
        kind = "linear"
    is_own = architecture.has_own_rope_factors and ROPE_FACTORS in keys.file.tensors
    factors = None if is_own else _llama3_scaling(keys.file, rotary_dim, theta)
    if (is_own or factors is not None) and kind != "none":
        keys.fail("rope.scaling.type", f"none beside '{ROPE_FACTORS}'", kind)
    if factors is not None:
        return factors
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number(factor)}
    if kind == "yarn":
        return _yarn_scaling(keys, architecture)
    if kind != "none":
        keys.fail("rope.scaling.type", "none, linear or yarn", kind)
    return None


def _sections(keys: GGUFKeys) -> dict[str, Any]:
    """Return `mrope_section`, if the tokens of images have three positions: frequencies of time, row and column."""
    found = keys.get(SECTIONS)
    if found is None or (isinstance(found, list) and not any(found)):
        return {}
    if not isinstance(found, list) or len(found) not in (3, 4) or any(found[3:]):
        keys.fail(SECTIONS, "three numbers, and a fourth of 0", found)
    return {"mrope_section": found[:3]}


def _longrope_scaling(keys: GGUFKeys, kind: str) -> dict[str, Any]:
    if kind not in ("none", "longrope"):
        keys.fail("rope.scaling.type", f"none or longrope beside '{LONG_DIVISORS}'", kind)
    short, long = ([decimal(float(x)) for x in keys.file.read(name)] for name in (SHORT_DIVISORS, LONG_DIVISORS))
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": keys.integer(
            "rope.scaling.original_context_length", keys.integer("context_length")
        ),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
    }


def _yarn_scaling(keys: GGUFKeys, architecture: GGUFArchitecture) -> dict[str, Any]:
    factors = architecture.attention_factor_keys
    stored = next((key for key in factors if keys.has(key)), None)
    meaning = (*factors, LOG_MULTIPLIER) if architecture.has_latent_attention else factors
    for key in set(_YARN_KEYS_WITHOUT_HF_MEANING).difference(meaning):
        if keys.get(key) not in (None, 1.0) and (key, keys.get(key)) != (LOG_MULTIPLIER, 0.0):
            keys.fail(key, "1 or none", keys.get(key))
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    if stored is not None:
        scaling["attention_factor"] = keys.number(stored)
    for key in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{key}"):
            scaling[key] = keys.number(f"rope.scaling.yarn_{key}")
    return scaling


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return Llama 3's scaling if the stored factors are those of its formula, None if there are none or all are one.

    The file keeps what each frequency is divided by. The slowest frequency is scaled most, so it yields the
    formula's one free parameter, and all the others must then agree.
    """
    if ROPE_FACTORS not in file.tensors:
        return None
    stored = file.read(ROPE_FACTORS).astype(np.float64)
    if stored.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor '{ROPE_FACTORS}': expected shape ({head_dim // 2},), found {stored.shape}"
        )
    if (stored == 1.0).all():
        return None
    for high, original in _LLAMA3_FORMS:
        smooth = _llama3_smoothness(head_dim, theta, high, original)
        with np.errstate(all="ignore"):
            factor = float(f"{(1.0 - smooth[-1]) / (1.0 / stored[-1] - smooth[-1]):.5g}")  # float32 noise rounded off
            expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if 1.0 < factor < math.inf and np.allclose(stored, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{file.path}: tensor '{ROPE_FACTORS}': expected the factors of Llama 3 or 4 (low 1, high 4 or 1, original 8192) "
        f"or Step 3.5 (high 32, original 131072), found others, from {stored.min():g} to {stored.max():g}"
    )


def _llama3_smoothness(head_dim: int, theta: float, high: float, original: int) -> np.ndarray:
    """Return 1 for a frequency that is kept (fast), 0 for one divided by the whole factor (slow), between for others."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original / wavelengths
    if high == _LLAMA3_LOW:
        return (turns > high).astype(np.float64)
    smooth: np.ndarray = np.clip((turns - _LLAMA3_LOW) / (high - _LLAMA3_LOW), 0.0, 1.0)
    return smooth
