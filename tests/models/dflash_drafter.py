"""Random DFlash drafters for tiny models, in the forms in which they are published, such a drafter in NumPy from its description
(arXiv 2602.06036), and one that must be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from tests.models.certain_predictor import RING
from tests.unit.checkpoint.checkpoint_files import write_safetensors

DFlashForm = Literal["z-lab", "speculators"]
TAPPED: Final = (1, 2)
"""Tapped layers of the drafters, by their inputs; the models have at least three."""
MASK: Final = 7
BLOCK_SIZE: Final = 6
VOCAB_SIZE: Final = 96
"""Tokens of drafters in the form of the library speculators."""
WINDOW: Final = 9


def write_dflash(
    folder: Path, target: Path, form: DFlashForm = "z-lab", *, tapped: tuple[int, ...] = TAPPED, **options: Any
) -> Path:
    """Write a random drafter of two layers for the model at `target` and return its folder. options: further keys of its layers."""
    folder.mkdir(parents=True)
    model = json.loads((target / "config.json").read_text(encoding="utf-8"))
    layers = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": model["hidden_size"],
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        **options,
    }
    own: dict[str, Any]
    if form == "speculators":
        own = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": layers,
            "draft_vocab_size": VOCAB_SIZE,
            "aux_hidden_state_layer_ids": list(tapped),
            "mask_token_id": MASK,
            "block_size": BLOCK_SIZE,
        }
    else:
        nested = {"target_layer_ids": [each - 1 for each in tapped], "mask_token_id": MASK}
        own = {"architectures": ["DFlashDraftModel"], **layers, "block_size": BLOCK_SIZE, "dflash_config": nested}
    (folder / "config.json").write_text(json.dumps(own), encoding="utf-8")
    tensors = _random_tensors(layers, len(tapped), np.random.default_rng(0), has_own_head=form == "speculators")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _random_tensors(
    layers: dict[str, Any], num_tapped: int, rng: np.random.Generator, *, has_own_head: bool
) -> dict[str, np.ndarray]:
    dim, size, width = layers["hidden_size"], layers["head_dim"], layers["intermediate_size"]
    heads, kv_heads = layers["num_attention_heads"] * size, layers["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"fc": (dim, num_tapped * dim), "hidden_norm": (dim,), "norm": (dim,)}
    for index in range(layers["num_hidden_layers"]):
        shapes |= {
            f"layers.{index}.{name}": shape
            for name, shape in {
                "input_layernorm": (dim,),
                "post_attention_layernorm": (dim,),
                "self_attn.q_proj": (heads, dim),
                "self_attn.k_proj": (kv_heads, dim),
                "self_attn.v_proj": (kv_heads, dim),
                "self_attn.o_proj": (dim, heads),
                "self_attn.q_norm": (size,),
                "self_attn.k_norm": (size,),
                "mlp.gate_proj": (width, dim),
                "mlp.up_proj": (width, dim),
                "mlp.down_proj": (dim, width),
            }.items()
        }
    if has_own_head:
        shapes["lm_head"] = (VOCAB_SIZE, dim)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        value = 1 + 0.2 * noise if len(shape) == 1 else 2 * noise * shape[1] ** -0.5
        tensors[f"{name}.weight"] = value.astype(ml_dtypes.bfloat16)
    if has_own_head:
        tokens = np.sort(rng.permutation(layers["vocab_size"])[:VOCAB_SIZE])
        tensors["d2t"] = (tokens - np.arange(VOCAB_SIZE)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(layers["vocab_size"]), tokens).astype(np.uint8)
    return tensors


def write_certain_dflash(folder: Path, target: Path) -> Path:
    """Write a drafter that is always right for texts that follow the ring of the model at `target`, of `certain_predictor`, for more than
    a round; returns its folder.

    Its one layer attends to the token one round before the token before its own, by their distance: queries and keys are the same for
    all tokens. The direction of that token is what the model's head turns to the next one.
    """
    size, num_heads = 16, 2
    shape = {"num_hidden_layers": 1, "num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    write_dflash(folder, target, tapped=(1,), rope_theta=100.0, head_dim=size, **shape)
    stored = open_safetensors(folder / "model.safetensors")
    tensors = {name: np.array(stored.read(name)).astype(np.float32) for name in stored.tensors}
    embedding = np.asarray(open_safetensors(target / "model.safetensors").read("model.embed_tokens.weight"))
    directions = embedding[np.array(RING)]  # (M, D), orthonormal
    dim = embedding.shape[1]
    numbers = np.zeros((num_heads * size, dim))
    numbers[: len(RING)] = directions  # a value is the coordinates of a token's direction
    # A vector rotated by the distance: its product with a key is largest where positions differ by that much.
    angles = -(len(RING) + 1) * 100.0 ** (-np.arange(0, size, 2) / size)
    query, mask = np.concatenate([np.cos(angles), np.sin(angles)]), embedding[MASK]
    key = np.concatenate([np.ones(size // 2), np.zeros(size // 2)])
    parts = {
        "fc": np.eye(dim),
        "self_attn.q_proj": np.outer(np.tile(query, num_heads), mask / np.linalg.norm(mask)),
        "self_attn.k_proj": np.outer(np.tile(key, num_heads), directions.sum(0)),
        "self_attn.v_proj": numbers,
        "self_attn.o_proj": numbers.T,
        "mlp.down_proj": np.zeros_like(tensors["layers.0.mlp.down_proj.weight"]),
    }
    for name, tensor in tensors.items():
        own = name.removeprefix("layers.0.").removesuffix(".weight")
        if own in parts:
            tensor[:] = parts[own]
        elif "norm" in name:
            tensor[:] = 100 if own == "self_attn.q_norm" else 1
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


class NumpyDFlash:
    """The drafter in a folder of `write_dflash`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers = config.get("transformer_layer_config", config)
        stored = open_safetensors(folder / "model.safetensors")
        self.tensors = {name: np.asarray(stored.read(name)).astype(np.float64) for name in stored.tensors}

    def __call__(self, tapped: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Return the outputs (W, D) of a block with these embeddings, after a text of which the model's layers have these inputs (T, K D)."""
        features = self._norm("hidden_norm", self._linear("fc", tapped))
        x = block
        for index in range(self.layers["num_hidden_layers"]):
            kinds = self.layers.get("layer_types")
            is_window = kinds is not None and kinds[index] == "sliding_attention"
            normed = self._norm(f"layers.{index}.input_layernorm", x)
            x = x + self._attention(f"layers.{index}.self_attn", features, normed, is_window=is_window)
            y = self._norm(f"layers.{index}.post_attention_layernorm", x)
            gate, up = (self._linear(f"layers.{index}.mlp.{name}", y) for name in ("gate_proj", "up_proj"))
            x = x + self._linear(f"layers.{index}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return self._norm("norm", x)

    def logits(self, made: np.ndarray, head: np.ndarray) -> np.ndarray:
        """Return logits (R, V) of the model's vocabulary. head: the model's output head."""
        if "lm_head.weight" not in self.tensors:
            return made @ head.T
        own = self._linear("lm_head", made)
        logits = np.full((len(own), len(head)), -np.inf)
        logits[:, np.arange(VOCAB_SIZE) + self.tensors["d2t"].astype(int)] = own
        return logits

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        root = np.sqrt((x * x).mean(-1, keepdims=True) + self.layers["rms_norm_eps"])
        return x / root * self.tensors[f"{name}.weight"]

    def _attention(self, name: str, features: np.ndarray, block: np.ndarray, *, is_window: bool) -> np.ndarray:
        heads, kv_heads = self.layers["num_attention_heads"], self.layers["num_key_value_heads"]
        size, first, both = self.layers["head_dim"], len(features), np.concatenate([features, block])
        queries = self._norm(f"{name}.q_norm", self._linear(f"{name}.q_proj", block).reshape(-1, heads, size))
        keys = self._norm(f"{name}.k_norm", self._linear(f"{name}.k_proj", both).reshape(-1, kv_heads, size))
        values = self._linear(f"{name}.v_proj", both).reshape(-1, kv_heads, size)
        positions = np.arange(len(both))
        queries, keys = self._rotated(queries, positions[first:]), self._rotated(keys, positions)
        keys, values = (np.repeat(each, heads // kv_heads, 1) for each in (keys, values))
        scores = np.einsum("tnh,snh->nts", queries, keys) * size**-0.5
        if is_window:  # causal, as z-lab's code has it
            ahead = positions[first:, None] - positions
            scores = np.where((ahead >= 0) & (ahead < self.layers["sliding_window"]), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), values)
        return self._linear(f"{name}.o_proj", mixed.reshape(len(block), -1))

    def _rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = self.layers["head_dim"]
        angles = positions[:, None, None] * self.layers["rope_theta"] ** (-np.arange(0, size, 2) / size)
        first, second = np.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
