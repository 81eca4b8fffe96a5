"""Train a small hybrid or a small mixture of experts on this project's own text, and write it as a Hugging Face directory.

python -m tests.trained.training hybrid OUT --steps 400
jaxserve serve OUT
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tests.trained.forward import SmallModel, Weights

ROOT: Final = Path(__file__).parents[2]
TOKENIZER: Final = ROOT / "tests" / "fixtures" / "tokenizers" / "byte_level"
TEXT_TOKENS: Final = 64
BATCH: Final = 16
_PEAK_RATE: Final = 4e-3
_WARM_UP: Final = 20

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 384,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
HYBRID: Final = SmallModel(
    "hybrid",
    _COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "intermediate_size": 320,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    },
)
MIXTURE: Final = SmallModel(
    "mixture",
    _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "intermediate_size": 320,
        "moe_intermediate_size": 160,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
)
MODELS: Final = {model.name: model for model in (HYBRID, MIXTURE)}


class Step(NamedTuple):
    """One step of training."""

    loss: float
    """Mean over the step's texts before it, in nats per token."""
    weights: Weights
    """After it."""


class _State(NamedTuple):
    weights: dict[str, Array]
    first: dict[str, Array]
    second: dict[str, Array]
    count: Int[Array, ""]


def own_text() -> np.ndarray:
    """Return the tokens of this project's README and pages, int32 (N)."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/decisions").glob("*.md"))]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    encoder = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    return np.asarray(encoder.encode(text, add_special_tokens=False).ids, np.int32)


def train(model: SmallModel, tokens: np.ndarray, *, steps: int, seed: int = 0) -> Iterator[Step]:
    """Train with Adam (arXiv 1412.6980) and a cosine schedule. tokens: int32 (N), the text."""
    rng = np.random.default_rng(seed)
    weights = {name: jnp.asarray(array) for name, array in initial_weights(model, rng).items()}
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = _State(weights, zeros, zeros, jnp.int32(0))

    @jax.jit
    def step(state: _State, texts: Int[Array, "B S"]) -> tuple[Array, _State]:
        loss, gradients = jax.value_and_grad(lambda own: mean_loss(model, own, texts))(state.weights)
        count = state.count + 1
        norm = jnp.sqrt(sum(jnp.sum(each * each) for each in gradients.values()))
        gradients = jax.tree.map(lambda each: each / jnp.maximum(norm, 1), gradients)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state.second, gradients)
        rate = _PEAK_RATE * jnp.minimum(count / _WARM_UP, 0.5 + 0.5 * jnp.cos(jnp.pi * count / (steps + 1)))
        scale = rate * jnp.sqrt(1 - 0.95**count) / (1 - 0.9**count)
        moved = jax.tree.map(lambda w, m, v: w - scale * m / (jnp.sqrt(v) + 1e-8), state.weights, first, second)
        return loss, _State(moved, first, second, count)

    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - TEXT_TOKENS, BATCH)
        loss, state = step(state, jnp.asarray(tokens[starts[:, None] + np.arange(TEXT_TOKENS + 1)]))
        yield Step(float(loss), state.weights)


def mean_loss(model: SmallModel, weights: Weights, texts: Int[Array, "B S"]) -> Float[Array, ""]:
    """Return the mean negative log-likelihood of each text's tokens after its first, in nats."""
    logprobs = jax.nn.log_softmax(model.logits(weights, texts[:, :-1]))
    return -jnp.take_along_axis(logprobs, texts[:, 1:, None], 2).mean()


def initial_weights(model: SmallModel, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random matrices, and vectors that begin as in the published models."""
    found = {}
    for name, shape in _shapes(model).items():
        if name.endswith("A_log"):
            array = np.log(rng.uniform(1, 16, shape))
        elif name.endswith("dt_bias"):
            array = np.log(np.expm1(rng.uniform(0.001, 0.1, shape)))
        elif len(shape) == 1:
            is_less_one = model.is_hybrid and "linear_attn" not in name
            array = np.zeros(shape) if is_less_one else np.ones(shape)
        else:
            array = rng.normal(0, 0.3 if "conv1d" in name else 0.02, shape)
        found[name] = array.astype(np.float32)
    return found


def _shapes(model: SmallModel) -> dict[str, tuple[int, ...]]:
    config, d = model.config, model.config["hidden_size"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens", "lm_head"), (config["vocab_size"], d))
    shapes["model.norm"] = (d,)
    for layer in range(config["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
        if model.has_attention(layer):
            own |= {f"self_attn.{name}_norm": (dim,) for name in "qk"}
            own |= {f"self_attn.{name}_proj": (kv_heads * dim, d) for name in "kv"}
            own["self_attn.q_proj"] = (heads * dim * (2 if model.is_hybrid else 1), d)
            own["self_attn.o_proj"] = (d, heads * dim)
        else:
            own |= _delta_shapes(config)
        blocks, width = ["mlp"], config["intermediate_size"]
        if not model.is_hybrid:
            own["mlp.gate"] = (config["num_experts"], d)
            width = config["moe_intermediate_size"]
            blocks = [f"mlp.experts.{expert}" for expert in range(config["num_experts"])]
        for block in blocks:
            own |= {f"{block}.{name}_proj": (width, d) for name in ("gate", "up")} | {f"{block}.down_proj": (d, width)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    is_bare = ("A_log", "dt_bias")
    return {name if name.endswith(is_bare) else f"{name}.weight": shape for name, shape in shapes.items()}


def _delta_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads = config["hidden_size"], config["linear_num_value_heads"]
    width = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + width
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv": (channels, d),
        "in_proj_z": (width, d),
        "in_proj_a": (heads, d),
        "in_proj_b": (heads, d),
        "conv1d": (channels, 1, config["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm": (config["linear_value_head_dim"],),
        "out_proj": (d, width),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def write_checkpoint(model: SmallModel, weights: Weights, folder: Path) -> None:
    """Write config, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(model.config, indent=1), "utf-8")
    save_file({name: np.asarray(array) for name, array in weights.items()}, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    words = parser.parse_args()
    model = MODELS[words.model]
    for number, step in enumerate(train(model, own_text(), steps=words.steps), 1):
        if number % 20 == 0 or number == words.steps:
            print(f"step {number:4}  loss {step.loss:.3f}", flush=True)
    write_checkpoint(model, step.weights, words.out)


if __name__ == "__main__":
    main()
