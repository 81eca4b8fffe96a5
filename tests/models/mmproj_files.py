"""Tiny models that read images in llama.cpp's format: a GGUF file of the text model and one of the image encoder, as its converter writes
them from a Hugging Face directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from safetensors.numpy import save_file

from jaxserve.checkpoint.gguf.file import GGUFFile, open_gguf
from jaxserve.checkpoint.protocol import CheckpointView
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.checkpoint.vision_names import VISION
from jaxserve.models.registry import open_model
from tests.models.goldens import DATA
from tests.unit.checkpoint.checkpoint_files import as_llama_cpp_stores, write_gguf
from tests.unit.checkpoint.gguf_converted import converted, ministral3_keys, rope_keys
from tests.unit.checkpoint.gguf_families import write_as_gguf

Arrays = Mapping[str, np.ndarray]
_TEXT: Final = re.compile(r"(language_model\.model\.|model\.language_model\.|model\.text_model\.)")
_ENDS: Final = (".weight", ".bias")


@dataclass(frozen=True)
class GGUFPair:
    """The files of a model that reads images."""

    source: Path
    """The directory that they are made from."""
    text: Path
    mmproj: Path


@dataclass(frozen=True)
class Conversion:
    """The part of llama.cpp's converter that belongs to one kind of model."""

    architecture: gguf.MODEL_ARCH
    projector: str
    text_keys: Callable[[dict[str, Any]], dict[str, Any]]
    vision_keys: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    """Return keys under `clip` from the configs of model and preprocessing."""
    stored_text: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray] = lambda name, array, text: array
    stored_vision: Callable[[str, np.ndarray, dict[str, Any]], Iterator[tuple[str, np.ndarray]]] | None = None
    """Yield names and arrays of a tower's tensor; None: tensors are stored as they are under the mapped name."""


@cache
def _tower_names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 4)


def _tower_name(name: str) -> str:
    """Return the name that the converter's table maps to that of the file."""
    name = name.removeprefix("model.") if name.startswith("model.visual.") else name
    if name.startswith("vision_tower.") and ".vision_model." not in name:
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    mapped: str | None = _tower_names().get_name(name, _ENDS)
    assert mapped is not None, name
    return mapped


def _gemma3_vision(name: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    name = name.replace("_weight", ".weight")
    yield _tower_name(name), array + 1 if name.endswith("soft_emb_norm.weight") else array


def _qwen2_vision(name: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    if ".qkv." in name:
        for part, rows in zip("qkv", np.split(array, 3), strict=True):
            yield _tower_name(name.replace("qkv", part)), rows
    else:
        yield from _frames(name, array)


def _qwen3_vision(name: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    match = re.fullmatch(r"model\.visual\.(deepstack_merger_list\.(\d+)|merger)\.(norm|linear_fc[12])\.(\w+)", name)
    if match is None:
        yield from _frames(name, array)
    elif match[2] is not None:
        layer = config["vision_config"]["deepstack_visual_indexes"][int(match[2])]
        yield f"v.deepstack.{layer}.{match[3].removeprefix('linear_')}.{match[4]}", array
    else:
        yield {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[match[3]] + f".{match[4]}", array


def _frames(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if array.ndim == 5:
        yield "v.patch_embd.weight", array[:, :, 0]
        yield "v.patch_embd.weight.1", array[:, :, 1]
    else:
        yield _tower_name(name), array


def _qwen_keys(text: dict[str, Any]) -> dict[str, Any]:
    return {"rope.dimension_sections": [*text["rope_parameters"]["mrope_section"], 0]}


def _area_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    size = processor["size"]
    return {"vision.image_min_pixels": size["shortest_edge"], "vision.image_max_pixels": size["longest_edge"]}


def _qwen2_5_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    return _area_keys(config, processor) | {
        "use_silu": True,
        "vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1,
        "vision.window_size": vision["window_size"],
    }


def _qwen3_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    flags = [layer in vision.get("deepstack_visual_indexes", []) for layer in range(vision["depth"])]
    return _area_keys(config, processor) | {
        "use_gelu": True,
        "vision.spatial_merge_size": vision["spatial_merge_size"],
        "vision.is_deepstack_layers": flags,
        "vision.image_size": round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"],
    }


def _permuted(name: str, array: np.ndarray, text: dict[str, Any]) -> np.ndarray:
    """Return a llama's tensor with the rows of queries and keys as llama.cpp rotates them."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return array if heads is None else as_llama_cpp_stores(array, text[heads])


def _pixtral_vision(name: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    name = name.replace("vision_tower.vision_model.", "vision_tower.")
    name = name.replace("model.vision_encoder.", "vision_tower.")
    name = name.replace("model.vision_projection.", "multi_modal_projector.")
    mapped = _tower_names().get_name(name, _ENDS)
    assert mapped is not None, name
    is_permuted = name.endswith(("q_proj.weight", "k_proj.weight"))
    yield mapped, as_llama_cpp_stores(array, config["vision_config"]["num_attention_heads"]) if is_permuted else array
    if name.endswith("ln_pre.weight") and config["model_type"] != "lighton_ocr":
        yield "v.token_embd.img_break", array  # anything: the text model has it, too


def _pixtral_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    activation = config["vision_config"]["hidden_act"]
    keys = {f"use_{activation}": True, "vision.image_size": processor["size"]["longest_edge"]}
    merge = config.get("spatial_merge_size")
    return keys if merge is None else keys | {"vision.spatial_merge_size": merge}


_BOUNDS: Final = (".input_max", ".input_min", ".output_max", ".output_min")


def _gemma4_vision(name: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    array = array.reshape(1) if array.ndim == 0 else array
    if "audio" in name:
        yield f"a.{name}", array
        return
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("input_proj.weight"):
        side = config["vision_config"]["patch_size"]
        array = array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    name += ".weight" * name.endswith("position_embedding_table")
    mapped = _tower_names().get_name(name, (*_ENDS, *_BOUNDS))
    assert mapped is not None, name
    yield mapped, array


def _gemma4_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    side = processor["pooling_kernel_size"]
    return {
        "vision.projector.scale_factor": side,
        "vision.image_max_pixels": processor["max_soft_tokens"] * (side * processor["patch_size"]) ** 2,
    }


def _internvl_vision(name: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for old, new in (("layer_norm", "0"), ("linear_1", "1"), ("linear_2", "3")):
        name = name.replace(f"multi_modal_projector.{old}.", f"mlp1.{new}.")
    name = name.replace("vision_tower.layernorm.", "vision_tower.vision_model.post_layernorm.")
    name = f"model.{name}" if name.startswith(("vision_tower.embeddings.", "vision_tower.encoder.")) else name
    name += ".weight" * (".lambda_" in name or name.endswith("position_embeddings"))
    mapped = _tower_names().get_name(name, _ENDS)
    assert mapped is not None, name
    yield mapped, array


def _internvl_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    return {
        "use_gelu": True,
        "vision.image_size": vision["image_size"][0],
        "vision.patch_size": vision["patch_size"][0],
        "vision.projector.scale_factor": round(1 / config["downsample_ratio"]),
        "vision.preproc_min_tiles": processor["min_patches"],
        "vision.preproc_max_tiles": processor["max_patches"],
    }


def _tile_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_gelu": True,
        "vision.projector.scale_factor": config["scale_factor"],
        "vision.preproc_image_size": processor["size"]["longest_edge"],
    }


def _llava_vision(name: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors as the converter of 2023 names them: without the layers whose outputs are not read."""
    read = config["vision_config"]["num_hidden_layers"] + 1 + config["vision_feature_layer"]
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if "post_layernorm" in name or (layer is not None and int(layer[1]) >= read):
        return
    if name == "image_newline":
        yield "model.image_newline", array
    elif name.startswith("multi_modal_projector."):
        yield (
            name.replace("multi_modal_projector.linear_1", "mm.0").replace("multi_modal_projector.linear_2", "mm.2"),
            array,
        )
    else:
        yield _tower_name(name), array


def _llava_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    keys = {
        "projector_type": None,
        "has_llava_projector": True,
        "use_gelu": False,
        "vision.projection_dim": 7,  # of the tower as a model of its own
        "vision.block_count": vision["num_hidden_layers"] + 1 + config["vision_feature_layer"],
        "vision.attention.layer_norm_epsilon": 1e-5,
    }
    if "image_grid_pinpoints" not in config:
        return keys
    return keys | {"vision.image_grid_pinpoints": [side for size in config["image_grid_pinpoints"] for side in size]}


def _gemma3_text(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in text["layer_types"]],
        "rope.freq_base": 1_000_000.0,
    }


def _gemma3_keys(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    vision, per_side = config["vision_config"], round(processor["image_seq_length"] ** 0.5)
    scale = vision["image_size"] // vision["patch_size"] // per_side
    return {"use_gelu": True, "vision.projector.scale_factor": scale}


CONVERSIONS: Final[Mapping[str, Conversion]] = {
    "gemma3_vision_tiny": Conversion(
        gguf.MODEL_ARCH.GEMMA3,
        gguf.VisionProjectorType.GEMMA3,
        _gemma3_text,
        _gemma3_keys,
        lambda name, array, text: array + 1 if name.endswith("norm.weight") else array,
        _gemma3_vision,
    ),
    "qwen2_5_vl_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN2VL,
        gguf.VisionProjectorType.QWEN25VL,
        _qwen_keys,
        _qwen2_5_keys,
        stored_vision=_qwen2_vision,
    ),
    "qwen2_vl_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN2VL, gguf.VisionProjectorType.QWEN2VL, _qwen_keys, _area_keys, stored_vision=_qwen2_vision
    ),
    "qwen3_vl_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN3VL,
        gguf.VisionProjectorType.QWEN3VL,
        lambda text: _qwen_keys(text) | {"n_deepstack_layers": 2},
        _qwen3_keys,
        stored_vision=_qwen3_vision,
    ),
    "qwen3_vl_moe_odd_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN3VLMOE,
        gguf.VisionProjectorType.QWEN3VL,
        lambda text: {
            **_qwen_keys(text),
            "n_deepstack_layers": 2,
            "expert_count": text["num_experts"],
            "expert_used_count": text["num_experts_per_tok"],
            "expert_feed_forward_length": text["moe_intermediate_size"],
        },
        _qwen3_keys,
        stored_vision=_qwen3_vision,
    ),
    "qwen3_5_vision_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN35, gguf.VisionProjectorType.QWEN3VL, _qwen_keys, _qwen3_keys, stored_vision=_qwen3_vision
    ),
    "smolvlm_tiny": Conversion(
        gguf.MODEL_ARCH.LLAMA, gguf.VisionProjectorType.IDEFICS3, lambda text: {}, _tile_keys, _permuted
    ),
    "pixtral_tiny": Conversion(
        gguf.MODEL_ARCH.LLAMA,
        gguf.VisionProjectorType.PIXTRAL,
        lambda text: {},
        _pixtral_keys,
        _permuted,
        _pixtral_vision,
    ),
    "lighton_ocr_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN3,
        gguf.VisionProjectorType.LIGHTONOCR,
        lambda text: {},
        _pixtral_keys,
        stored_vision=_pixtral_vision,
    ),
    "mistral3_vision_tiny": Conversion(
        gguf.MODEL_ARCH.MISTRAL3,
        gguf.VisionProjectorType.PIXTRAL,
        lambda text: {},
        _pixtral_keys,
        _permuted,
        _pixtral_vision,
    ),
    "mistral3_vision_odd_tiny": Conversion(
        gguf.MODEL_ARCH.MISTRAL3,
        gguf.VisionProjectorType.PIXTRAL,
        lambda text: rope_keys(text) | ministral3_keys(text),
        _pixtral_keys,
        _permuted,
        _pixtral_vision,
    ),
    **{
        name: Conversion(gguf.MODEL_ARCH.LLAMA, "mlp", lambda text: {}, _llava_keys, _permuted, _llava_vision)
        for name in ("llava_padded_tiny", "llava_next_tiny")
    },
    "internvl_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN2,
        gguf.VisionProjectorType.INTERNVL,
        lambda text: {},
        _internvl_keys,
        stored_vision=_internvl_vision,
    ),
    "internvl_odd_tiny": Conversion(
        gguf.MODEL_ARCH.QWEN3,
        gguf.VisionProjectorType.INTERNVL,
        lambda text: {},
        _internvl_keys,
        stored_vision=_internvl_vision,
    ),
    "gemma4_vision_tiny": Conversion(
        gguf.MODEL_ARCH.GEMMA4,
        gguf.VisionProjectorType.GEMMA4V,
        lambda text: {},
        _gemma4_keys,
        stored_vision=_gemma4_vision,
    ),
    "gemma4_vision_odd_tiny": Conversion(
        gguf.MODEL_ARCH.GEMMA4,
        gguf.VisionProjectorType.GEMMA4V,
        lambda text: {},
        _gemma4_keys,
        stored_vision=_gemma4_vision,
    ),
}


CHANGES: Final[Mapping[str, dict[str, Any]]] = {
    "qwen3_vl_tiny": {"vision_config": {"deepstack_visual_indexes": [0, 2]}},
    "qwen3_vl_moe_odd_tiny": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "pixtral_tiny": {"vision_config": {"rope_theta": 10_000.0}},
    "mistral3_vision_odd_tiny": {"projector_hidden_act": "gelu"},
    "gemma4_vision_odd_tiny": {"vision_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}},
}
"""Changes of the configs of checkpoints that files cannot hold as they are: files have no order of their own for these layers, one base,
and one activation of Mistral's projector."""


def write_pair(folder: Path, name: str) -> GGUFPair:
    """Write the files of a checkpoint of tests/models/data/vision in float32, and a copy of it, both with CHANGES."""
    source, conversion = folder / name, CONVERSIONS[name]
    source.mkdir(parents=True)
    for file in (DATA / "vision" / name).iterdir():
        if not file.name.endswith(".npz"):
            (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    for key, value in CHANGES.get(name, {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (source / "config.json").write_text(json.dumps(config))
    stored = open_safetensors(source / "model.safetensors")
    arrays = {name: np.asarray(stored.read(name)).astype(np.float32) for name in stored.tensors}
    is_text = {
        name: bool(_TEXT.match(name))
        or name.startswith(("model.layers.", "model.embed_tokens", "model.norm", "lm_head", "language_model.lm_head"))
        for name in arrays
    }
    text = {name: array for name, array in arrays.items() if is_text[name]}
    tower = {name: array for name, array in arrays.items() if not is_text[name]}
    processor = json.loads((source / "preprocessor_config.json").read_text())
    return GGUFPair(
        source,
        _write_text(folder / f"{name}.gguf", conversion, config["text_config"], text, source),
        write_mmproj(folder / f"mmproj-{name}.gguf", conversion, config, processor, tower),
    )


def _write_text(path: Path, conversion: Conversion, text: dict[str, Any], arrays: Arrays, source: Path) -> Path:
    name = gguf.MODEL_ARCH_NAMES[conversion.architecture]
    if conversion.architecture == gguf.MODEL_ARCH.QWEN35:
        return _write_hybrid(path, conversion, text, source)
    if conversion.architecture == gguf.MODEL_ARCH.GEMMA4:
        return _write_gemma4(path, text, arrays, source)
    head_dim = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    keys = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "rope.freq_base": float(text.get("rope_theta", 10_000.0)),
        **conversion.text_keys(text),
    }
    names = gguf.get_tensor_name_map(conversion.architecture, text["num_hidden_layers"])
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, text["num_hidden_layers"])  # of layers without experts
    tensors = {}
    for own, array in _with_expert_matrices(arrays).items():
        bare = _TEXT.sub("model.", own).replace("language_model.lm_head.", "lm_head.")
        mapped = names.get_name(bare, _ENDS) or dense.get_name(bare, _ENDS)
        assert mapped is not None, own
        tensors[mapped] = ("F32", np.ascontiguousarray(conversion.stored_text(bare, array, text)))
    return write_gguf(
        path, name, {f"{name}.{key}": value for key, value in keys.items()} | _vocabulary(source), tensors
    )


def _write_hybrid(path: Path, conversion: Conversion, text: dict[str, Any], source: Path) -> Path:
    """Write a model of Qwen3.5, whose mixers have a layout of their own."""
    whole = open_model(source)
    tensors = {name: info for name, info in whole.tensors.items() if not name.startswith(VISION)}
    text_only = CheckpointView(CheckpointView(whole, tensors, {}), tensors, {})
    file = open_gguf(write_as_gguf(path.with_name("text-only.gguf"), text_only, whole.config))
    name = gguf.MODEL_ARCH_NAMES[conversion.architecture]
    return _with_keys(
        path, file, {f"{name}.{key}": value for key, value in conversion.text_keys(text).items()} | _vocabulary(source)
    )


def _write_gemma4(path: Path, text: dict[str, Any], arrays: Arrays, source: Path) -> Path:
    """Write a model of Gemma 4, whose layers have sizes of their own."""
    folder = path.with_name(f"{path.stem}-text")
    folder.mkdir()
    save_file({_TEXT.sub("model.", name): array for name, array in arrays.items()}, folder / "model.safetensors")
    file = converted(path.with_name("text-only.gguf"), folder, {**text, "architectures": ["Gemma4ForCausalLM"]})
    padding = {"tokenizer.ggml.padding_token_id": text["pad_token_id"]}
    return _with_keys(path, open_gguf(file), padding | _vocabulary(source))


def _with_keys(path: Path, file: GGUFFile, more: Mapping[str, Any]) -> Path:
    """Write a file with further keys."""
    keys = {**file.metadata, **more}
    architecture = keys.pop("general.architecture")
    return write_gguf(path, architecture, keys, {each: ("F32", file.read(each)) for each in file.tensors})


def _with_expert_matrices(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return the tensors with gates and inputs of experts apart."""
    found = {}
    for name, array in arrays.items():
        if name.endswith(".gate_up_proj"):
            gate, up = np.split(array, 2, 1)
            found |= {
                name.replace("gate_up_proj", f"{part}_proj.weight"): each for part, each in (("gate", gate), ("up", up))
            }
        else:
            found[f"{name}.weight" if name.endswith(".experts.down_proj") else name] = array
    return found


def _vocabulary(source: Path) -> dict[str, Any]:
    """Return a byte-level vocabulary and the chat template."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "tokenizer_config.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    control = {token["content"] for token in tokenizer["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token, _ in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": config["chat_template"],
    }


def write_mmproj(
    path: Path, conversion: Conversion, config: dict[str, Any], processor: dict[str, Any], arrays: Arrays
) -> Path:
    """Write the file of an image encoder."""
    vision = config["vision_config"]
    keys = {
        "projector_type": conversion.projector,
        "has_vision_encoder": True,
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_size": vision.get("image_size", 560),
        "vision.patch_size": vision["patch_size"],
        "vision.embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "vision.feed_forward_length": vision.get("intermediate_size", vision["hidden_size"]),
        "vision.block_count": vision.get("depth") or vision["num_hidden_layers"],
        "vision.attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": [float(mean) for mean in processor["image_mean"]],
        "vision.image_std": [float(deviation) for deviation in processor["image_std"]],
        **conversion.vision_keys(config, processor),
    }
    keys = {key: value for key, value in keys.items() if value is not None}
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, array in arrays.items():
        made = (
            [(_tower_name(name), array)]
            if conversion.stored_vision is None
            else conversion.stored_vision(name, array, config)
        )
        tensors |= {own: ("F32", np.ascontiguousarray(value)) for own, value in made}
    return write_gguf(
        path, "clip", {f"clip.{key}": value for key, value in keys.items()} | {"general.type": "mmproj"}, tensors
    )
