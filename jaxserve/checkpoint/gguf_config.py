"""`config.json` as it would be for a GGUF file, from its metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.checkpoint.gguf_families import own_config
from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.gguf_keys import GGUFKeys, decimal
from jaxserve.checkpoint.gguf_names import ARCHITECTURES, LONG_DIVISORS, ROPE_FACTORS, SHORT_DIVISORS, GGUFArchitecture
from jaxserve.checkpoint.mapped_file import shown
from jaxserve.errors import CheckpointError

_EMBEDDING = "token_embd.weight"
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""The only values Llama 3.x was published with; the file keeps the resulting factors, not the formula."""

_YARN_KEYS_WITHOUT_HF_MEANING = (
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)

_MAX_LAYERS = 1024

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Hugging Face's names of llama.cpp's `general.sampling` keys."""


def architecture(file: GGUFFile) -> GGUFArchitecture:
    """What `general.architecture` names; raises CheckpointError for what is not a whole decoder we know."""
    name = file.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        what = "none" if name is None else shown(str(name))
        raise CheckpointError(
            f"{file.path}: key 'general.architecture': expected one of {', '.join(ARCHITECTURES)}, found {what}"
        )
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: key 'general.type': expected 'model', found {shown(str(kind))}")
    split_count = file.metadata.get("split.count", 0)
    if split_count not in (0, 1):
        raise CheckpointError(
            f"{file.path}: key 'split.count': expected a whole model in one file, found one of {split_count} parts; "
            "join them with llama-gguf-split --merge"
        )
    return found


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The config of a GGUF file in Hugging Face's vocabulary."""
    kind = architecture(file)
    keys = GGUFKeys(file, str(file.metadata["general.architecture"]))
    if keys.has("expert_count") and keys.get("expert_count") != 0:
        keys.fail("expert_count", "a dense model (0 experts)", keys.get("expert_count"))
    vocab_size, hidden_size = _embedding_shape(file, keys)
    num_heads = keys.integer("attention.head_count")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not (kind.rotates_in_part and rotary_dim % 2 == 0 and rotary_dim < head_dim):
        keys.fail("rope.dimension_count", f"the head size {head_dim}", rotary_dim)
    config: dict[str, Any] = {
        "architectures": [kind.hf_architecture],
        "model_type": kind.hf_model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count", maximum=_MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if kind.has_bias_flags:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    if kind.no_rope_interval is not None:
        config["no_rope_layers"] = [
            int((layer + 1) % kind.no_rope_interval != 0) for layer in range(config["num_hidden_layers"])
        ]
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = math.nextafter(rotary_dim / head_dim, 1.0)  # it is rounded down when read
    scaling = _rope_scaling(keys, rotary_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | own_config(keys, config) | special_tokens(file, vocab_size)


def special_tokens(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` (a list: end of text, end of turn, end of message)."""
    bos = _token_id(file, "bos_token_id", vocab_size)
    ends = (_token_id(file, key, vocab_size) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return {"bos_token_id": bos, "eos_token_id": eos or None}


def generation_config(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """`generation_config.json` as it would be: the special tokens of `config`, and what is recommended for sampling."""
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


def _head_dim(keys: GGUFKeys, hidden_size: int, num_heads: int) -> int:
    if not keys.has("attention.key_length") and hidden_size % num_heads:
        keys.fail("attention.head_count", f"a divisor of embedding_length {hidden_size}", num_heads)
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        keys.fail("attention.value_length", f"the head size {head_dim}", keys.get("attention.value_length"))
    if head_dim % 2:
        keys.fail("attention.key_length", "an even head size", head_dim)
    return head_dim


def _rope_scaling(keys: GGUFKeys, rotary_dim: int, theta: float) -> dict[str, Any] | None:
    """`rope_scaling`: from the scaling keys, from longrope's divisors, or recognised in Llama 3's stored factors."""
    kind = keys.get("rope.scaling.type") or "none"
    if LONG_DIVISORS in keys.file.tensors:
        return _longrope_scaling(keys, kind)
    factors = _llama3_scaling(keys.file, rotary_dim, theta)
    if factors is not None:
        if kind != "none":
            keys.fail("rope.scaling.type", f"none beside '{ROPE_FACTORS}'", kind)
        return factors
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn_scaling(keys)
    if kind != "none":
        keys.fail("rope.scaling.type", "none, linear or yarn", kind)
    return None


def _longrope_scaling(keys: GGUFKeys, kind: str) -> dict[str, Any]:
    if kind not in ("none", "longrope"):
        keys.fail("rope.scaling.type", f"none or longrope beside '{LONG_DIVISORS}'", kind)
    short, long = ([decimal(float(x)) for x in keys.file.read(name)] for name in (SHORT_DIVISORS, LONG_DIVISORS))
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
    }


def _yarn_scaling(keys: GGUFKeys) -> dict[str, Any]:
    # Of OLMo 3 either of two keys has Hugging Face's `attention_factor`.
    factors = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor") if keys.architecture == "olmo2" else ()
    stored = next((key for key in factors if keys.has(key)), None)
    for key in set(_YARN_KEYS_WITHOUT_HF_MEANING).difference(factors):
        if keys.get(key) not in (None, 1.0):
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
    """Llama 3's scaling when the stored factors are those of its formula, None when there are none or all are one.

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
    smooth = _llama3_smoothness(head_dim, theta)
    with np.errstate(all="ignore"):
        factor = float(f"{(1.0 - smooth[-1]) / (1.0 / stored[-1] - smooth[-1]):.5g}")  # float32 noise rounded off
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not 1.0 < factor < math.inf or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: tensor '{ROPE_FACTORS}': expected the factors of Llama 3 (low 1, high 4, original 8192), "
            f"found others, from {stored.min():g} to {stored.max():g}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _llama3_smoothness(head_dim: int, theta: float) -> np.ndarray:
    """Per frequency: 1 where it stays as it is (fast), 0 where it is divided by the whole factor (slow)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = _LLAMA3_ORIGINAL / wavelengths
    smooth: np.ndarray = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return smooth
