"""A tiny checkpoint of each newer family in llama.cpp's format is read like its safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.errors import CheckpointError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import decoder_config, decoder_of, open_model
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import HIDDEN, as_llama_cpp_stores, write_decoder, write_gguf

ARCHITECTURES = {
    "Gemma2ForCausalLM": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "Gemma3ForCausalLM": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "Phi3ForCausalLM": ("phi3", gguf.MODEL_ARCH.PHI3),
    "Olmo2ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "Olmo3ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "GraniteForCausalLM": ("granite", gguf.MODEL_ARCH.GRANITE),
}


def gemma_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    caps = {key: hf[key] for key in ("attn_logit_softcapping", "final_logit_softcapping") if key in hf}
    sizes = {"attention.key_length": hf["head_dim"], "attention.value_length": hf["head_dim"]}
    return caps | sizes | {"attention.sliding_window": hf["sliding_window"]}


def gemma3_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return gemma_keys(hf) | {
        "attention.sliding_window_pattern": hf["sliding_window_pattern"],
        "rope.scaling.type": "linear",
        "rope.scaling.factor": hf["rope_scaling"]["factor"],
    }


def phi3_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "attention.sliding_window": hf.get("sliding_window") or 0,
        "rope.dimension_count": int(head_dim(hf) * hf.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": hf.get("original_max_position_embeddings", 4096),
    }
    if hf["rope_scaling"]:
        original, longest = hf["original_max_position_embeddings"], hf["max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(longest / original) / np.log(original)))
    return keys


def olmo3_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [True, True, True, False],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": hf["rope_scaling"]["factor"],
        "rope.scaling.original_context_length": hf["rope_scaling"]["original_max_position_embeddings"],
        "rope.scaling.attn_factor": 0.1 * float(np.log(hf["rope_scaling"]["factor"])) + 1,
    }


def granite_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }
    return {key: hf[name] for key, name in names.items()}


OWN_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "Gemma2ForCausalLM": gemma_keys,
    "Gemma3ForCausalLM": gemma3_keys,
    "Phi3ForCausalLM": phi3_keys,
    "Olmo2ForCausalLM": lambda hf: {},
    "Olmo3ForCausalLM": olmo3_keys,
    "GraniteForCausalLM": granite_keys,
}


def head_dim(hf: Mapping[str, Any]) -> int:
    found: int = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    return found


def as_stored(name: str, tensor: np.ndarray, hf: Mapping[str, Any]) -> np.ndarray:
    """Return the tensor that llama.cpp's converter writes."""
    model = hf["architectures"][0]
    if model.startswith("Gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if model.startswith("Granite") and ("q_proj" in name or "k_proj" in name):
        heads = hf["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return as_llama_cpp_stores(tensor, heads)
    return tensor


def write_as_gguf(path: Path, checkpoint: Checkpoint, hf: Mapping[str, Any]) -> Path:
    name, kind = ARCHITECTURES[hf["architectures"][0]]
    keys = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "rope.freq_base": float(hf.get("rope_theta", 10_000.0)),
        "rope.dimension_count": head_dim(hf),
        **OWN_KEYS[hf["architectures"][0]](hf),
    }
    tokens = {f"tokenizer.ggml.{key}": hf[key] for key in ("bos_token_id", "eos_token_id")}
    names = gguf.get_tensor_name_map(kind, hf["num_hidden_layers"])
    tensors = {}
    whole = as_in_the_file(checkpoint)
    for tensor in whole.tensors:
        stored_name = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, tensor
        tensors[stored_name] = ("F32", as_stored(tensor, whole.read(tensor).astype(np.float32), hf))
    for kind_of_text in ("short", "long"):
        factors = (hf.get("rope_scaling") or {}).get(f"{kind_of_text}_factor")
        if factors:
            tensors[f"rope_factors_{kind_of_text}.weight"] = ("F32", np.array(factors, np.float32))
    return write_gguf(path, name, {f"{name}.{key}": value for key, value in keys.items()} | tokens, tensors)


def as_in_the_file(checkpoint: Checkpoint) -> Checkpoint:
    """With matrices joined as they are stored."""
    return checkpoint.inner if isinstance(checkpoint, CheckpointView) else checkpoint


@pytest.mark.parametrize(
    "name",
    [
        "gemma2_tiny",
        "gemma3_tiny",
        "phi3_tiny",
        "phi3_longrope_tiny",
        "phi4_mini_tiny",
        "olmo2_tiny",
        "olmo3_tiny",
        "granite_tiny",
    ],
)
def test_newer_families_are_read_as_their_safetensors(tmp_path: Path, name: str) -> None:
    folder = golden_checkpoint(name).path
    hf = json.loads((folder / "config.json").read_text())
    if "query_pre_attn_scalar" in hf:
        hf["query_pre_attn_scalar"] = hf["head_dim"]  # what no key carries, but of the 27B models
    checkpoint = open_model(folder)
    found = open_model(write_as_gguf(tmp_path / "a.gguf", checkpoint, hf))
    assert rounded(decoder_of(found)) == rounded(decoder_config(hf))
    assert found.tensors.keys() == checkpoint.tensors.keys()
    for tensor in checkpoint.tensors:
        expected = checkpoint.read(tensor).astype(np.float32)
        np.testing.assert_allclose(found.read(tensor).astype(np.float32), expected, atol=3e-7, rtol=0, err_msg=tensor)


def rounded(config: DecoderConfig) -> DecoderConfig:
    """Files have numbers in float32."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.attention_factor is not None:
        config = replace(config, rope_scaling=replace(scaling, attention_factor=round(scaling.attention_factor, 5)))
    return config


def test_gemmas_of_27b_score_with_width_over_heads(tmp_path: Path) -> None:
    for architecture, num_layers in (("gemma2", 46), ("gemma3", 62)):
        scales = []
        for count in (num_layers, num_layers - 1):
            options = {"block_count": count, "attention__sliding_window": 8, "attention__head_count": 2}
            options |= {"attention__key_length": 8, "attention__value_length": 8}
            scales.append(
                decoder_of(open_model(write_decoder(tmp_path / "a.gguf", architecture, **options))).attention_scale
            )
        assert scales == [(HIDDEN / 2) ** -0.5, 8**-0.5]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("gemma2", {"rope__freq_base_swa": 5.0}, "key 'gemma2.rope.freq_base_swa': expected the base of all layers"),
        (
            "gemma3",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True]},
            "key 'gemma3.attention.sliding_window_pattern': expected true or false for each of the 2 layers",
        ),
        ("granite", {"rope__scaling__finetuned": False}, "key 'granite.rope.scaling.finetuned': expected true or none"),
        ("granite", {"attention__sliding_window": 8}, "key 'granite.attention.sliding_window': expected none"),
        ("phi3", {"rope__dimension_count": 3}, "key 'phi3.rope.dimension_count': expected the head size 8, found 3"),
    ],
)
def test_keys_that_are_not_computed_are_rejected(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model(write_decoder(tmp_path / "a.gguf", architecture, **changes))
    assert expected in str(caught.value)


def test_two_tensors_in_one_place_are_rejected(tmp_path: Path) -> None:
    extra = {f"blk.0.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("post_attention_norm", "post_ffw_norm")}
    with pytest.raises(CheckpointError, match="no place in it"):
        open_model(write_decoder(tmp_path / "a.gguf", "olmo2", extra))
