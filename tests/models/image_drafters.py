"""Drafters of models that read images, with random weights: the layer that GLM-OCR predicts tokens with, and drafters of Gemma 4."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from tests.models.goldens import DATA
from tests.unit.checkpoint.checkpoint_files import write_safetensors

_GLM_OCR: Final = DATA / "vision" / "glm_ocr_tiny"
_LAYERS: Final = "model.language_model.layers."
_OF_TARGET: Final = (
    "vocab_size",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "head_dim",
    "global_head_dim",
    "sliding_window",
    "rope_parameters",
    "rms_norm_eps",
    "max_position_embeddings",
)
_WIDTH, _INNER, _HEADS = 20, 28, 4
"""Sizes of a drafter of Gemma 4, which are not those of its model."""


def glm_ocr_with_layer(folder: Path) -> Path:
    """Write the tiny GLM-OCR with a layer after its last one that predicts tokens, and return the folder."""
    shutil.copytree(_GLM_OCR, folder)
    stored = open_safetensors(_GLM_OCR / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    own, width = f"{_LAYERS}{text['num_hidden_layers']}.", text["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{own}eh_proj.weight": (width, 2 * width),
        **{f"{own}{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")},
    }
    for name, info in stored.tensors.items():
        if name.startswith(f"{_LAYERS}0."):
            shapes[name.replace(f"{_LAYERS}0.", own)] = info.shape
    tensors = {name: stored.read(name) for name in stored.tensors} | _random(shapes)
    write_safetensors(folder / "model.safetensors", tensors)
    text["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def gemma4_assistant(folder: Path, target: Path) -> Path:
    """Write a drafter of the Gemma 4 in the directory `target`, with a layer of each kind, and return its folder."""
    whole = json.loads((target / "config.json").read_text(encoding="utf-8"))
    text = {key: whole["text_config"][key] for key in _OF_TARGET if key in whole["text_config"]}
    is_unified, width = "unified" in whole["model_type"], whole["text_config"]["hidden_size"]
    text |= {
        "model_type": whole["text_config"]["model_type"],
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }
    text |= {} if is_unified else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    kind = "Gemma4Unified" if is_unified else "Gemma4"
    config = {
        "architectures": [f"{kind}AssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant" if is_unified else "gemma4_assistant",
        "backbone_hidden_size": width,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "text_config": text,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text["vocab_size"], _WIDTH),
        "model.norm.weight": (_WIDTH,),
        "pre_projection.weight": (_WIDTH, 2 * width),
        "post_projection.weight": (width, _WIDTH),
    }
    for index, dim in enumerate((text["head_dim"], text["global_head_dim"])):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer(dim).items()}
    write_safetensors(folder / "model.safetensors", _random(shapes))
    return folder


def _layer(head_dim: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return {
        **{f"{name}_layernorm.weight": (_WIDTH,) for name in norms},
        "layer_scalar": (1,),
        "mlp.gate_proj.weight": (_INNER, _WIDTH),
        "mlp.up_proj.weight": (_INNER, _WIDTH),
        "mlp.down_proj.weight": (_WIDTH, _INNER),
        "self_attn.q_proj.weight": (_HEADS * head_dim, _WIDTH),
        "self_attn.o_proj.weight": (_WIDTH, _HEADS * head_dim),
        "self_attn.q_norm.weight": (head_dim,),
    }


def _random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return tensors: norms near 1, and matrices that keep the size of their inputs."""
    rng = np.random.default_rng(0)
    return {
        name: (
            1 + 0.2 * rng.standard_normal(shape)
            if len(shape) == 1
            else 2 * shape[1] ** -0.5 * rng.standard_normal(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
