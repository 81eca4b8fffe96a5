"""A checkpoint whose next token depends only on the current one, so that its multi-token-prediction layer can always be right.

Its layers add nothing: the output of attention and of feed-forward blocks is zero. The embeddings of the tokens of a ring are
orthonormal, and the head's row of each of them is the embedding of the one before it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final, Literal

import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from tests.models.goldens import mtp_golden
from tests.unit.checkpoint.checkpoint_files import write_safetensors

RING: Final = tuple(range(10, 34))
Source = Literal["token", "hidden"]
"""The input from which the layer predicts: the embedding of the following token, or the hidden state of the token before it."""


def certain_predictor(folder: Path, source: Source) -> Path:
    """Write the checkpoint in the shapes of the tiny GLM-4.5 and return its folder."""
    golden = mtp_golden("glm4_moe")
    shutil.copytree(golden.path, folder)
    stored, rng = open_safetensors(golden.path / "model.safetensors"), np.random.default_rng(0)
    tensors = {name: 0.02 * rng.standard_normal(info.shape) for name, info in stored.tensors.items()}
    dim = tensors["lm_head.weight"].shape[1]
    ring = np.array(RING)
    directions = np.linalg.qr(rng.standard_normal((dim, dim)))[0][: len(ring)]  # (M, D), orthonormal rows
    follows = np.roll(directions, -1, 0).T @ directions  # turns the direction of a token to that of the next one
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
            tensor[:] = 0
        elif "norm" in name:
            tensor[:] = 1
        elif name.endswith("embed_tokens.weight"):
            tensor[ring] = directions
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensor[np.roll(ring, -1)] = directions
        elif name.endswith("eh_proj.weight"):
            parts = (np.eye(dim), np.zeros((dim, dim))) if source == "token" else (np.zeros((dim, dim)), follows)
            tensor[:] = np.concatenate(parts, 1)
    write_safetensors(folder / "model.safetensors", {name: each.astype(np.float32) for name, each in tensors.items()})
    return folder
