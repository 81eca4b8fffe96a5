"""Names of the tensors of vision towers, which every family's checkpoints have in a layout of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.quant.tensor import Tensor, TensorInfo

VISION: Final = "vision."
"""Prefix of a tower's tensors."""
_PROJECTORS: Final = ("mlp_AR", "projector")
"""Names of PaddleOCR-VL's connector: as published, and transformers'."""
_BLOCKS: Final = "vision_tower.encoder.blocks."
"""Prefix of the layers of MoonViT, which number from 0 what others number from 1."""
_MERGERS: Final = "visual.merger_list."
"""Prefix of the connectors of the deepstack layers of Qwen3-Omni."""
_PREFIXES: Final[Mapping[str, str]] = {
    "visual.merger.ln_q.": "connector.norm.",
    "visual.merger.mlp.0.": "connector.linear_fc1.",
    "visual.merger.mlp.2.": "connector.linear_fc2.",
    "visual.merger.": "connector.",
    "visual.deepstack_merger_list.": "deepstack.",
    _MERGERS: "deepstack.",
    "visual.patch_embed.proj.": "patch_embedding.",
    "visual.pos_embed.": "position_embedding.",
    "visual.embeddings.": "",
    "visual.post_conv_layernorm.": "patch_norm.",
    "visual.downsample.": "connector.downsample.",
    "visual.blocks.": "layers.",
    "visual.encoder.": "",
    "visual.vision_model.encoder.": "",
    "visual.vision_model.embeddings.": "",
    "visual.vision_model.": "",
    "visual.": "",
    "vision_model.merger.ln_q.": "connector.norm.",
    "vision_model.merger.mlp.0.": "connector.linear_fc1.",
    "vision_model.merger.mlp.2.": "connector.linear_fc2.",
    "vision_model.patch_embed.proj.": "patch_embedding.",
    "vision_model.blocks.": "layers.",
    "vision_projector.": "connector.proj.",
    "vision_model.embeddings.position_embedding.": "position_embedding.",
    "vision_model.embeddings.position_embedding": "position_embedding.weight",
    "vision_model.layernorm.": "post_layernorm.",
    "vision_model.patch_embedding.linear.": "patch_embedding.",
    "vision_model.positional_embedding_vlm": "position_embedding.weight_and_class",
    "vision_model.layernorm_pre.": "pre_layernorm.",
    "vision_model.layernorm_post.": "post_layernorm.",
    "vision_model.vision_adapter.mlp.": "connector.",
    "vision_model.model.": "",
    "vision_model.connector.coarse.deepstack_mergers.": "deepstack.",
    "vision_model.connector.coarse.projection.": "connector.proj.",
    "vision_model.connector.fine.": "fine.",
    "vision_model.connector.": "connector.",
    "density_router.": "density_router.",
    "vision_model.encoder.": "",
    "vision_model.embeddings.": "",
    "vision_model.": "",
    "vision_tower.vision_model.pre_layrnorm.": "pre_layernorm.",
    "vision_tower.vision_model.encoder.": "",
    "vision_tower.vision_model.embeddings.": "",
    "vision_tower.vision_model.": "",
    "vision_tower.encoder.layer.": "layers.",
    _BLOCKS: "layers.",
    "vision_tower.encoder.final_layernorm.": "post_layernorm.",
    "vision_tower.encoder.patch_embed.proj.": "patch_embedding.",
    "vision_tower.encoder.": "",
    "vision_tower.embeddings.cls_token": "class_embedding",
    "vision_tower.embeddings.position_embeddings": "position_embedding.weight",
    "vision_tower.embeddings.patch_embeddings.projection.": "patch_embedding.",
    "vision_tower.embeddings.": "",
    "vision_tower.patch_embedder.input_proj.": "patch_embedding.",
    "vision_tower.patch_embedder.patch_embedding.": "patch_embedding.",
    "vision_tower.patch_embedder.position_embedding_table.": "position_embedding.",
    "vision_tower.ln_post.": "post_layernorm.",
    "vision_tower.patch_embedder.position_embedding_table": "position_embedding.weight",
    "vision_tower.patch_embed.pos_emb.weight": "position_embedding.grid",
    "vision_tower.patch_embed.proj.": "patch_embedding.",
    "vision_tower.patch_conv.": "patch_embedding.",
    "vision_tower.ln_pre.": "pre_layernorm.",
    "vision_tower.pre_layrnorm.": "pre_layernorm.",
    "vision_tower.transformer.embeddings.rms_norm.": "patch_norm.",
    "vision_tower.transformer.embeddings.": "",
    "vision_tower.transformer.encoder.": "",
    "vision_tower.transformer.rms_norm.": "post_layernorm.",
    "vision_tower.transformer.": "",
    "vision_tower.head_linear.": "connector.head_linear.",
    "vision_tower.head_norm.": "connector.head_norm.",
    "visual_embeddings_table.": "connector.table.",
    "vision_tower.layernorm.": "post_layernorm.",
    "vision_tower.std_": "connector.std_",
    "vision_tower.patchifier.": "patch_embedding.",
    "vision_tower.patch_embed.weight": "patch_embedding.weight",
    "vision_tower.embedding_norm.": "patch_norm.",
    "vision_tower.": "",
    "vision_encoder.patch_conv.": "patch_embedding.",
    "vision_encoder.ln_pre.": "pre_layernorm.",
    "vision_encoder.transformer.": "",
    "pre_mm_projector_norm.": "connector.norm.",
    "patch_merger.": "connector.",
    "merger.mlp.0.pre_norm.": "connector.norm.",
    "merger.mlp.0.": "connector.",
    "vision_language_adapter.w_in.": "connector.linear_1.",
    "vision_language_adapter.w_out.": "connector.linear_2.",
    "vision_projection.patch_merger.": "connector.",
    "vision_projection.weight": "connector.linear_1.weight",
    "vision_projection.": "connector.",
    "vision_adapter.": "connector.",
    "vit_large_projector.": "connector.",
    "connector.modality_projection.": "connector.",
    "image_newline": "image_newline",
    "multi_modal_projector.projector_layernorm.": "connector.norm.",
    "multi_modal_projector.linear.": "connector.proj.",
    "multi_modal_projector.layer_norm.": "connector.norm.",
    "multi_modal_projector.layernorm.": "connector.norm.",
    "multi_modal_projector.patch_merger.": "connector.",
    "multi_modal_projector.": "connector.",
    "vision_embedder.patch_ln1.": "patch_embedding.norm.",
    "vision_embedder.patch_dense.": "patch_embedding.",
    "vision_embedder.patch_ln2.": "patch_norm.",
    "vision_embedder.pos_embedding": "position_embedding.weight",
    "vision_embedder.pos_norm.": "pre_layernorm.",
    "embed_vision.patch_ln1.": "patch_embedding.norm.",
    "embed_vision.patch_dense.": "patch_embedding.",
    "embed_vision.patch_ln2.": "patch_norm.",
    "embed_vision.pos_embedding": "position_embedding.weight",
    "embed_vision.pos_norm.": "pre_layernorm.",
    "embed_vision.multimodal_embedder.": "connector.",
    "embed_vision.": "connector.",
    "mm_projector.pre_norm.": "connector.norm.",
    "mm_projector.proj.0.": "connector.linear_fc1.",
    "mm_projector.proj.2.": "connector.linear_fc2.",
    "mm_projector.": "connector.",
    "mlp1.0.": "connector.norm.",
    "mlp1.1.": "connector.linear_1.",
    "mlp1.3.": "connector.linear_2.",
    **{f"{name}.pre_norm.": "connector.norm." for name in _PROJECTORS},
    **{f"{name}.linear_{number}.": f"connector.linear_fc{number}." for name in _PROJECTORS for number in (1, 2)},
    "projector.readout.0.": "connector.linear_1.",
    "projector.readout.2.": "connector.linear_2.",
    "projector.norm.": "connector.norm.",
    "projector.linear_fc": "connector.linear_fc",
    "projector.": "connector.proj.",
}
"""Our prefix after VISION by that of a checkpoint, the longer before the shorter."""
_AUDIO: Final = ("audio_tower.", "embed_audio.", "talker.", "code2wav.", "token2wav.")
THINKER: Final = "thinker."
"""Prefix of the part of an omni model that makes texts, beside those that make speech of them."""
_PARTS: Final[Mapping[str, str]] = {
    ".attention_norm.": ".layer_norm1.",
    ".ffn_norm.": ".layer_norm2.",
    ".attention.": ".self_attn.",
    ".feed_forward.": ".mlp.",
    ".mlp.w1.": ".mlp.gate_proj.",
    ".mlp.w2.": ".mlp.down_proj.",
    ".mlp.w3.": ".mlp.up_proj.",
    ".operator_norm.": ".layer_norm1.",
    ".rms_norm1.": ".layer_norm1.",
    ".rms_norm2.": ".layer_norm2.",
    ".ffn.": ".mlp.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.proj.": ".self_attn.out_proj.",
    **{f".attn.{each}.": f".self_attn.{each}_proj." for each in "qkv"},
    **{f".attn.{each}_proj.": f".self_attn.{each}_proj." for each in "qkv"},
    ".attn.q_norm.": ".self_attn.q_norm.",
    ".attn.k_norm.": ".self_attn.k_norm.",
    ".mlp.linear_fc1.": ".mlp.fc1.",
    ".mlp.linear_fc2.": ".mlp.fc2.",
    ".input_layernorm.": ".layer_norm1.",
    ".pre_feedforward_layernorm.": ".layer_norm2.",
    ".o_proj.": ".out_proj.",
    ".projection_layer.": ".out_proj.",
    ".layernorm_before.": ".layer_norm1.",
    ".layernorm_after.": ".layer_norm2.",
    ".layer_norm.": ".norm.",
    ".lambda_1": ".layer_scale1",
    ".lambda_2": ".layer_scale2",
    ".ls1": ".layer_scale1",
    ".ls2": ".layer_scale2",
    "_proj.linear.": "_proj.",
}
"""Our names of parts of a layer."""
_BLOCK_PARTS: Final[Mapping[str, str]] = {
    ".norm1.": ".layer_norm2.",
    ".norm0.": ".layer_norm1.",
    ".fc1.": ".fc2.",
    ".fc0.": ".fc1.",
    ".wqkv.": ".attn.qkv.",
    ".wo.": ".self_attn.out_proj.",
}
"""Our names of parts of a layer of MoonViT."""
_LLAMA4: Final = "vision_model.model."
_OTHER_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    _BLOCKS: _BLOCK_PARTS,
    _LLAMA4: {**_PARTS, ".post_attention_layernorm.": ".layer_norm2."},
    _MERGERS: {".ln_q.": ".norm.", ".mlp.0.": ".linear_fc1.", ".mlp.2.": ".linear_fc2."},
}
"""Our names of parts of a layer, by the prefix of a tower that has others."""
_FUSED: Final = ".attn.qkv."
_QKV: Final = ("q_proj", "k_proj", "v_proj")
_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
"""Numbers that a clipped matmul has in published checkpoints."""


def vision_name(name: str) -> str | None:
    """Return our name of a tower's or connector's tensor; None if the tensor belongs to neither."""
    bare = name.removeprefix(THINKER).removeprefix("model.")
    for prefix, own in _PREFIXES.items():
        if bare.startswith(prefix):
            made = VISION + own + bare.removeprefix(prefix)
            for old, new in _OTHER_PARTS.get(prefix, _PARTS).items():
                made = made.replace(old, new)
            return made
    return None


def is_audio(name: str) -> bool:
    """Return True for a tensor of an audio encoder or its connector, or of the parts of an omni model that make speech."""
    return name.removeprefix(THINKER).removeprefix("model.").startswith(_AUDIO)


def join_bounds(checkpoint: Checkpoint) -> Checkpoint:
    """Replace the four bounds of each clipped matmul of a tower by one vector, `bounds`."""
    tensors = dict(checkpoint.tensors)
    readers: dict[str, Callable[[Checkpoint], Tensor]] = {}
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        parts = [f"{module}.{part}" for part in _BOUNDS]
        if last != _BOUNDS[0] or not name.startswith(VISION) or not all(_is_number(checkpoint, part) for part in parts):
            continue
        own, infos = f"{module}.bounds", [tensors.pop(part) for part in parts]
        size = sum(info.num_stored_bytes for info in infos)
        tensors[own] = replace(infos[0], name=own, shape=(len(parts),), num_stored_bytes=size)
        readers[own] = partial(_read_bounds, parts)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _is_number(checkpoint: Checkpoint, name: str) -> bool:
    info = checkpoint.tensors.get(name)
    return info is not None and math.prod(info.shape) == 1


def split_vision_qkv(checkpoint: Checkpoint, tower: Any = None) -> Checkpoint:
    """Replace the matrix of queries, keys and values of each layer of a tower by its three parts, of which those of keys and values
    repeat each head for the query heads that share it. tower: `vision_config` of the config; None: there are as many KV heads as heads."""
    tensors: dict[str, TensorInfo] = {}
    readers: dict[str, Callable[[Checkpoint], Tensor]] = {}
    num_heads, num_kv_heads = _heads(tower)
    for name, info in checkpoint.tensors.items():
        heads, is_scale = num_heads + 2 * num_kv_heads, _is_number(checkpoint, name)
        if not (name.startswith(VISION) and _FUSED in name and (is_scale or info.shape[0] % heads == 0)):
            tensors[name] = info
            continue
        if is_scale:  # of the whole matrix
            parts = [name.replace(_FUSED, f".self_attn.{part}.") for part in _QKV]
            tensors |= {own: replace(info, name=own) for own in parts}
            readers |= {own: partial(_read_as, name, info.shape) for own in parts}
            continue
        size = info.shape[0] // heads
        first = 0
        for part, count in zip(_QKV, (num_heads, num_kv_heads, num_kv_heads), strict=True):
            own = name.replace(_FUSED, f".self_attn.{part}.")
            stored = info.num_stored_bytes * count // heads
            tensors[own] = replace(info, name=own, shape=(num_heads * size, *info.shape[1:]), num_stored_bytes=stored)
            rows = slice(first * size, (first + count) * size)
            readers[own] = partial(_read_rows, name, rows, size, num_heads // count)
            first += count
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _heads(tower: Any) -> tuple[int, int]:
    """Return the heads of a tower and its KV heads, or 1 each if they are as many."""
    config = tower if isinstance(tower, dict) else {}
    num_heads, num_kv_heads = config.get("num_heads"), config.get("num_key_value_heads")
    if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int) or not 0 < num_kv_heads < num_heads:
        return 1, 1
    return num_heads, num_kv_heads


def without_single_axes(checkpoint: Checkpoint) -> Checkpoint:
    """Return a tower's class token as a vector and its positions as a matrix, without axes of size 1 before them (InternVL)."""
    tensors = dict(checkpoint.tensors)
    readers: dict[str, Callable[[Checkpoint], Tensor]] = {}
    for name, count in ((f"{VISION}class_embedding", 1), (f"{VISION}position_embedding.weight", 2)):
        info = tensors.get(name)
        if info is None or len(info.shape) <= count or set(info.shape[:-count]) != {1}:
            continue
        tensors[name] = replace(info, shape=info.shape[-count:])
        readers[name] = partial(_read_as, name, info.shape[-count:])
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def with_axes_first(checkpoint: Checkpoint) -> Checkpoint:
    """Return the positions of each axis of a tower as a table for each axis, if both share a row for each place (Gemma 4 12B)."""
    name = f"{VISION}position_embedding.weight"
    info = checkpoint.tensors.get(name)
    if info is None or len(info.shape) != 3 or info.shape[0] == 2 or info.shape[1] != 2:
        return checkpoint
    tensors = {**checkpoint.tensors, name: replace(info, shape=(2, info.shape[0], info.shape[2]))}
    return CheckpointView(checkpoint, tensors, {name: partial(_read_axes_first, name)})


def with_class_first(checkpoint: Checkpoint) -> Checkpoint:
    """Return the positions of a tower with that of the class token before the others, if it is stored after them (Llama 4)."""
    name, stored = (f"{VISION}position_embedding.{last}" for last in ("weight", "weight_and_class"))
    if stored not in checkpoint.tensors:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    tensors[name] = replace(tensors.pop(stored), name=name)
    return CheckpointView(checkpoint, tensors, {name: partial(_read_class_first, stored)})


def _read_class_first(stored: str, inner: Checkpoint) -> np.ndarray:
    return np.roll(np.asarray(inner.read(stored)), 1, axis=0)


def _read_axes_first(stored: str, inner: Checkpoint) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(inner.read(stored)).swapaxes(0, 1))


def with_position_table(checkpoint: Checkpoint) -> Checkpoint:
    """Return a grid of positions, rows by columns by width (MoonViT), as a table with a row for each place."""
    grid, table = f"{VISION}position_embedding.grid", f"{VISION}position_embedding.weight"
    info = checkpoint.tensors.get(grid)
    if info is None or len(info.shape) != 3:
        return checkpoint
    shape = (info.shape[0] * info.shape[1], info.shape[2])
    tensors = {name: each for name, each in checkpoint.tensors.items() if name != grid}
    tensors[table] = replace(info, name=table, shape=shape)
    return CheckpointView(checkpoint, tensors, {table: partial(_read_as, grid, shape)})


def _read_as(stored: str, shape: tuple[int, ...], inner: Checkpoint) -> np.ndarray:
    return np.asarray(inner.read(stored)).reshape(shape)


def _read_bounds(stored: list[str], inner: Checkpoint) -> np.ndarray:
    return np.concatenate([np.asarray(inner.read(name)).reshape(1) for name in stored])


def _read_rows(stored: str, rows: slice, size: int, copies: int, inner: Checkpoint) -> np.ndarray:
    """Return rows of a matrix, of heads of `size` rows, each as often as `copies` says."""
    whole = inner.read(stored)
    assert isinstance(whole, np.ndarray), "towers are not quantised"
    own = whole[rows]
    return own if copies == 1 else own.reshape(-1, size, *own.shape[1:]).repeat(copies, 0).reshape(-1, *own.shape[1:])
