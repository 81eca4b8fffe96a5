"""Random EAGLE-3 heads for tiny models, in the forms in which heads are published, and such a head in NumPy from its description
(arXiv 2503.01840)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from tests.models.certain_predictor import RING
from tests.unit.checkpoint.checkpoint_files import write_safetensors

HeadForm = Literal["original", "speculators"]
TAPPED: Final = (1, 2, 3)
"""Tapped layers of the heads, by their inputs; the models have at least three."""
VOCAB_SIZE: Final = 96
"""Tokens of the heads."""


def write_head(
    folder: Path,
    target: Path,
    form: HeadForm = "original",
    *,
    tapped: tuple[int, ...] = TAPPED,
    **options: Any,
) -> Path:
    """Write a random head for the model at `target` and return its folder. options: further keys of the config."""
    folder.mkdir(parents=True)
    model = json.loads((target / "config.json").read_text(encoding="utf-8"))
    model = model.get("text_config", model)
    heads = model["num_attention_heads"]
    layer = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": options.pop("hidden_size", model["hidden_size"]),
        "intermediate_size": 40,
        "num_attention_heads": heads,
        "num_key_value_heads": model["num_key_value_heads"],
        "head_dim": model.get("head_dim") or model["hidden_size"] // heads,
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20_000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": model["vocab_size"] - 1,
        "tie_word_embeddings": False,
    } | options.pop("layer", {})
    ids = "eagle_aux_hidden_state_layer_ids"
    config: dict[str, Any] = {"draft_vocab_size": VOCAB_SIZE, **options}
    if form == "speculators":
        config |= {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**layer, "layer_types": ["full_attention"]},
            ids: list(tapped),
        }
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **config}
        config["eagle_config"] = {ids: [each - 1 for each in tapped]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = _random_tensors(layer, model["hidden_size"], config, np.random.default_rng(0))
    old = "layers.0." if form == "speculators" else "midlayer."
    write_safetensors(
        folder / "model.safetensors", {name.replace("layers.0.", old): value for name, value in tensors.items()}
    )
    return folder


def _random_tensors(
    layer: dict[str, Any], target_dim: int, config: dict[str, Any], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    dim, count, size = layer["hidden_size"], len(TAPPED), layer["head_dim"]
    heads, kv_heads = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (dim, count * target_dim),
        "layers.0.self_attn.q_proj": (heads, 2 * dim),
        "layers.0.self_attn.k_proj": (kv_heads, 2 * dim),
        "layers.0.self_attn.v_proj": (kv_heads, 2 * dim),
        "layers.0.self_attn.o_proj": (dim, heads),
        "layers.0.mlp.gate_proj": (layer["intermediate_size"], dim),
        "layers.0.mlp.up_proj": (layer["intermediate_size"], dim),
        "layers.0.mlp.down_proj": (dim, layer["intermediate_size"]),
        "lm_head": (config["draft_vocab_size"], dim),
        "embed_tokens": (layer["vocab_size"], dim),
    }
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    shapes |= {f"layers.0.{name}": (dim,) for name in norms} | {"norm": (dim,)}
    if layer["model_type"] == "qwen3":
        shapes |= {f"layers.0.self_attn.{name}": (size,) for name in ("q_norm", "k_norm")}
    if config.get("norm_before_fc"):
        shapes["input_norm"] = (count * target_dim,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}": (target_dim,) for index in range(count)}
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        value = 1 + 0.2 * noise if len(shape) == 1 else 2 * noise * shape[1] ** -0.5
        tensors[f"{name}.weight"] = value.astype(ml_dtypes.bfloat16)
    tokens = np.sort(rng.permutation(layer["vocab_size"])[: config["draft_vocab_size"]])
    tensors["d2t"] = (tokens - np.arange(len(tokens))).astype(np.int64)
    return tensors


def write_certain_head(folder: Path, target: Path) -> Path:
    """Write a head that is always right for the model at `target`, of `certain_predictor`, and return its folder.

    It begins from the embedding of the token, and its feed-forward block turns the direction of each token of the ring to that of the
    next one: the gate is the same for all of them.
    """
    model = open_safetensors(target / "model.safetensors")
    embedding = np.asarray(model.read("model.embed_tokens.weight"), np.float64)
    dim = embedding.shape[1]
    write_head(folder, target, "speculators", tapped=(0, 1, 2), layer={"intermediate_size": dim})
    stored = open_safetensors(folder / "model.safetensors")
    tensors = {name: np.array(stored.read(name)).astype(np.float32) for name in stored.tensors if name != "d2t"}
    ring = np.array(RING)
    directions = embedding[ring]  # (M, D), orthonormal
    gate = 4.0
    turned = np.roll(directions, -1, 0).T @ directions - directions.T @ directions
    parts = {
        "fc": np.concatenate([np.eye(dim), np.zeros((dim, 2 * dim))], 1),
        "layers.0.mlp.gate_proj": np.tile(gate / dim**0.5 * directions.sum(0), (dim, 1)),
        "layers.0.mlp.up_proj": np.eye(dim),
        "layers.0.mlp.down_proj": turned / (dim**0.5 * gate / (1 + np.exp(-gate))),
    }
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor[:] = 1
        elif name.endswith("o_proj.weight"):
            tensor[:] = 0
        elif name.removesuffix(".weight") in parts:
            tensor[:] = parts[name.removesuffix(".weight")]
    tokens = np.arange(ring[0], ring[0] + len(tensors["lm_head.weight"]))  # the ring, and others
    tensors["lm_head.weight"][:] = 0.02
    tensors["lm_head.weight"][np.roll(ring, -1) - tokens[0]] = directions
    whole = tensors | {"d2t": (tokens - np.arange(len(tokens))).astype(np.int64)}
    write_safetensors(folder / "model.safetensors", whole)
    return folder


class NumpyHead:
    """The head in a folder of `write_head`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layer = config.get("transformer_layer_config", config)
        self.options = config | config.get("eagle_config", {})
        stored = open_safetensors(folder / "model.safetensors")
        self.tensors = {
            name.replace("midlayer.", "layers.0."): np.asarray(stored.read(name)).astype(np.float64)
            for name in stored.tensors
        }

    def start(self, tapped: np.ndarray) -> np.ndarray:
        """Return the first hidden states (T, D) for inputs (T, K D) of the model's layers."""
        if self.options.get("norm_before_fc"):
            tapped = self._norm("input_norm", tapped)
        if self.options.get("fc_norm"):
            parts = np.split(tapped, len(TAPPED), -1)
            tapped = np.concatenate([self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], -1)
        return self._linear("fc", tapped)

    def __call__(self, embeddings: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """Return the outputs (T, D) of a text from its first position on."""
        normed = self._norm("layers.0.hidden_norm", hidden)
        both = np.concatenate([self._norm("layers.0.input_layernorm", embeddings), normed], -1)
        x = (normed if self.options.get("norm_before_residual") else hidden) + self._attention(both)
        y = self._norm("layers.0.post_attention_layernorm", x)
        gate = self._linear("layers.0.mlp.gate_proj", y)
        x = x + self._linear(
            "layers.0.mlp.down_proj", gate / (1 + np.exp(-gate)) * self._linear("layers.0.mlp.up_proj", y)
        )
        return self._norm("norm", x) if self.options.get("norm_output") else x

    def logits(self, made: np.ndarray) -> np.ndarray:
        """Return logits (T, V) of the model's vocabulary."""
        own = self._linear("lm_head", made if self.options.get("norm_output") else self._norm("norm", made))
        logits = np.full((len(own), self.layer["vocab_size"]), -np.inf)
        for index, shift in enumerate(self.tensors["d2t"].astype(int)):
            logits[:, index + shift] = own[:, index]
        return logits

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        root = np.sqrt((x * x).mean(-1, keepdims=True) + self.layer["rms_norm_eps"])
        return x / root * self.tensors[f"{name}.weight"]

    def _attention(self, x: np.ndarray) -> np.ndarray:
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        size, count = self.layer["head_dim"], len(x)
        parts = ("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)
        queries, keys, values = (
            self._linear(f"layers.0.self_attn.{name}", x).reshape(count, number, size) for name, number in parts
        )
        if self.layer["model_type"] == "qwen3":
            queries = self._norm("layers.0.self_attn.q_norm", queries)
            keys = self._norm("layers.0.self_attn.k_norm", keys)
        frequencies = self.layer["rope_theta"] ** (-np.arange(0, size, 2) / size)
        angles = np.arange(count)[:, None, None] * frequencies
        queries, keys = (_rotated(each, np.cos(angles), np.sin(angles)) for each in (queries, keys))
        keys, values = (np.repeat(each, heads // kv_heads, 1) for each in (keys, values))
        scores = np.einsum("tnh,snh->nts", queries, keys) * size**-0.5
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), values)
        return self._linear("layers.0.self_attn.o_proj", mixed.reshape(count, -1))


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
