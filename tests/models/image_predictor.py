"""A checkpoint of Qwen3.5 that reads images and has a multi-token-prediction layer, and the layer in NumPy from its description:
embeddings of images where the model has them, and positions in time, rows and columns (M-RoPE, arXiv 2409.12191)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.quant.tensor import as_floats
from tests.models.goldens import DATA
from tests.unit.checkpoint.checkpoint_files import write_safetensors

PLAIN = DATA / "vision" / "qwen3_5_vision_tiny"
_LAYER = "model.language_model.layers.1."
"""A layer with attention."""


def with_predictor(folder: Path, seed: int = 0) -> Path:
    """Write the tiny Qwen3.5 that reads images with a random multi-token-prediction layer, and return the folder."""
    shutil.copytree(PLAIN, folder)
    stored, rng = open_safetensors(PLAIN / "model.safetensors"), np.random.default_rng(seed)
    tensors = {name: stored.read(name) for name in stored.tensors}
    dim = stored.tensors["model.language_model.norm.weight"].shape[0]
    shapes = {"mtp.fc.weight": (dim, 2 * dim)}
    shapes |= {f"mtp.{name}.weight": (dim,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    for name, info in stored.tensors.items():
        if name.startswith(_LAYER):
            shapes["mtp.layers.0." + name.removeprefix(_LAYER)] = info.shape
    dtype = tensors[_LAYER + "self_attn.q_proj.weight"].dtype
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else 2 * shape[1] ** -0.5
        tensors[name] = (scale * rng.standard_normal(shape)).astype(dtype)
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class NumpyPredictor:
    """The layer of a checkpoint of `with_predictor`, with the model's embedding and head."""

    def __init__(self, path: Path) -> None:
        self._config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))["text_config"]
        stored = open_safetensors(path / "model.safetensors")
        self._tensors = {
            name: as_floats(stored.read(name)).astype(np.float64)
            for name in stored.tensors
            if name.startswith("mtp.") or name in ("model.language_model.embed_tokens.weight", "lm_head.weight")
        }

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        return self._tensors["model.language_model.embed_tokens.weight"][token_ids]

    def logits(self, outputs: np.ndarray) -> np.ndarray:
        return outputs @ self._tensors["lm_head.weight"].T

    def __call__(self, embeddings: np.ndarray, hidden: np.ndarray, rope: np.ndarray) -> np.ndarray:
        """Return the outputs (T, D) of the layer for hidden states (T, D), embeddings of the tokens that follow them, and
        positions (3, T)."""
        both = [self._norm("pre_fc_norm_embedding", embeddings), self._norm("pre_fc_norm_hidden", hidden)]
        x = self._linear("fc", np.concatenate(both, 1))
        x = x + self._attention(self._norm("layers.0.input_layernorm", x), rope)
        y = self._norm("layers.0.post_attention_layernorm", x)
        gate = self._linear("layers.0.mlp.gate_proj", y)
        y = gate / (1 + np.exp(-gate)) * self._linear("layers.0.mlp.up_proj", y)
        return self._norm("norm", x + self._linear("layers.0.mlp.down_proj", y))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self._tensors[f"mtp.{name}.weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = 1 + self._tensors[f"mtp.{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self._config["rms_norm_eps"]) * scale

    def _attention(self, x: np.ndarray, rope: np.ndarray) -> np.ndarray:
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        size, count = self._config["head_dim"], len(x)
        queries, gates = np.split(self._linear("layers.0.self_attn.q_proj", x).reshape(count, heads, 2 * size), 2, -1)
        keys = self._linear("layers.0.self_attn.k_proj", x).reshape(count, kv_heads, size)
        values = self._linear("layers.0.self_attn.v_proj", x).reshape(count, kv_heads, size)
        queries = self._rotated(self._norm("layers.0.self_attn.q_norm", queries), rope)
        keys = self._rotated(self._norm("layers.0.self_attn.k_norm", keys), rope)
        keys, values = (np.repeat(each, heads // kv_heads, 1) for each in (keys, values))
        scores = np.einsum("tnh,snh->nts", queries, keys) * size**-0.5
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), values)
        return self._linear("layers.0.self_attn.o_proj", (mixed / (1 + np.exp(-gates))).reshape(count, -1))

    def _rotated(self, x: np.ndarray, rope: np.ndarray) -> np.ndarray:
        """Turn the first dimensions of each head. Frequencies take time, rows and columns in turns, as many as each has."""
        given = self._config["rope_parameters"]
        turning = round(self._config["head_dim"] * given["partial_rotary_factor"])
        half, (_, *sections) = turning // 2, given["mrope_section"]
        angles = np.empty((len(x), half))
        for index in range(half):
            axis = index % 3
            axis = axis if axis and index < 3 * sections[axis - 1] else 0
            angles[:, index] = rope[axis] / given["rope_theta"] ** (2 * index / turning)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second, rest = x[..., :half], x[..., half:turning], x[..., turning:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
