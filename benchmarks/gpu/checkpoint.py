"""A checkpoint with random weights on disk, for a server."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.gpu.random_weights import kind_of
from benchmarks.gpu.shapes import decoder
from jaxserve.layers.policy import plain
from jaxserve.models.skeleton import LeafSpec, make_skeleton

BLOCK_VALUES = 1 << 22
"""Random numbers of the whole file: tensors are cut out of their repetition, each from another place."""
TEXT_IDS = range(3, 97)
"""Printable ASCII characters of the tokenizer below: other tokens are never the most likely ones, so that every token of
an answer is text."""
TOKENIZER = Path(__file__).parents[2] / "tests" / "fixtures" / "tokenizers" / "byte_level"


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int) -> int:
    """config.json, tokenizer and one safetensors file in bfloat16; returns the file's bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2, "bos_token_id": 1}), encoding="utf-8")
    for part in TOKENIZER.glob("*.json"):
        shutil.copy(part, folder)
    leaves = make_skeleton(decoder(config), plain(jnp.dtype("bfloat16"))).leaves
    header: dict[str, Any] = {}
    end = 0
    for leaf in leaves:
        size = 2 * math.prod(leaf.shape)
        header[leaf.name] = {"dtype": "BF16", "shape": list(leaf.shape), "data_offsets": [end, end + size]}
        end += size
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    random = np.random.default_rng(seed)
    block = random.standard_normal(BLOCK_VALUES, np.float32)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for leaf in leaves:
            for piece in _pieces(leaf, block, int(random.integers(BLOCK_VALUES))):
                file.write(piece.tobytes())
    return end


def _pieces(leaf: LeafSpec, block: np.ndarray, start: int) -> Iterator[np.ndarray]:
    """The leaf's values in order."""
    if kind_of(leaf) == "norm":
        yield np.ones(leaf.shape, ml_dtypes.bfloat16)
        return
    scaled = (np.roll(block, start) * np.float32(leaf.shape[-1] ** -0.5)).astype(ml_dtypes.bfloat16)
    left = math.prod(leaf.shape)
    if kind_of(leaf) == "embedding":
        rows = np.zeros(leaf.shape, ml_dtypes.bfloat16)
        text = scaled[: len(TEXT_IDS) * leaf.shape[1]]
        rows[TEXT_IDS.start : TEXT_IDS.stop] = np.resize(text, (len(TEXT_IDS), leaf.shape[1])) * 2
        yield rows
        return
    while left > 0:
        yield scaled[:left]
        left -= len(scaled)
