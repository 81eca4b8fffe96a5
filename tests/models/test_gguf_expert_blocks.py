"""Experts served in the blocks of a GGUF file, of several types in one model, on one device and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.block_kinds import BLOCK_KINDS

from jaxserve.config import Config, ModelConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import LeafSpec, make_skeleton
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy, quantization_notes
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.planning.devices import find_device
from jaxserve.tools.planning.fit import model_sizes
from tests.models.goldens import GoldenCheckpoint
from tests.models.mesh_model import MeshModel
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import decoder_metadata, write_gguf

KEPT: Final = "gguf-weight-only"
TOKENS: Final = np.arange(7, 27)
WIDTH, HEADS, EXPERTS, VOCAB = 256, 4, 4, 96


def random_matrix(kind: str, random: np.random.Generator, *shape: int) -> tuple[str, np.ndarray]:
    """Return a matrix in blocks of a type with two levels of scales: weights of about 0.1 with a mean near 0."""
    own = BLOCK_KINDS[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // own.num_inputs, own.stored_bytes)).astype(np.uint8)
    scales = {0: 4e-4, 2: 3e-3} if own.has_minimum else {208: 7e-5}
    for at, scale in scales.items():
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return kind, blocks.reshape(*shape[:-1], -1)


def write_mixed(path: Path) -> Path:
    """Write a Qwen3-MoE with the types of llama.cpp's Q4_K_M: Q4_K, and Q6_K for values and down projections of some layers. Inputs of one
    layer's experts are in Q5_K, which gates are not."""
    random, tensors = np.random.default_rng(3), dict[str, tuple[str, np.ndarray]]()
    tensors["token_embd.weight"] = random_matrix("Q4_K", random, VOCAB, WIDTH)
    tensors["output.weight"] = random_matrix("Q6_K", random, VOCAB, WIDTH)
    norms = {"output_norm": WIDTH}
    for layer in range(2):
        of_down, of_up = ("Q4_K", "Q5_K") if layer else ("Q6_K", "Q4_K")
        block: dict[str, tuple[Any, ...]] = {
            "attn_q": ("Q4_K", WIDTH, WIDTH),
            "attn_k": ("Q4_K", WIDTH // 2, WIDTH),
            "attn_v": (of_down, WIDTH // 2, WIDTH),
            "attn_output": ("Q4_K", WIDTH, WIDTH),
            "ffn_gate_exps": ("Q4_K", EXPERTS, 2 * WIDTH, WIDTH),
            "ffn_up_exps": (of_up, EXPERTS, 2 * WIDTH, WIDTH),
            "ffn_down_exps": (of_down, EXPERTS, WIDTH, 2 * WIDTH),
        }
        for name, (kind, *shape) in block.items():
            tensors[f"blk.{layer}.{name}.weight"] = random_matrix(kind, random, *shape)
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = "F32", random.standard_normal((EXPERTS, WIDTH), np.float32)
        norms |= {f"blk.{layer}.{name}": WIDTH for name in ("attn_norm", "ffn_norm")}
        norms |= {f"blk.{layer}.{name}": WIDTH // HEADS for name in ("attn_q_norm", "attn_k_norm")}
    tensors |= {f"{name}.weight": ("F32", np.ones(size, np.float32)) for name, size in norms.items()}
    keys = {
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": 2 * WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS // 2,
        "attention.key_length": WIDTH // HEADS,
        "attention.value_length": WIDTH // HEADS,
        "rope.dimension_count": WIDTH // HEADS,
    }
    metadata = decoder_metadata("qwen3moe") | {f"qwen3moe.{key}": value for key, value in keys.items()}
    return write_gguf(path, "qwen3moe", metadata, tensors)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "a.gguf")


@pytest.fixture(scope="module")
def dequantised(path: Path) -> TinyModel:
    return TinyModel(path, quantization="none")


@pytest.fixture(scope="module")
def expected(dequantised: TinyModel) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt with dequantised weights, and the greedy tokens that follow."""
    logits = dequantised.logits(TOKENS)
    return logits, dequantised.greedy(logits[-1], 8)


def leaves(path: Path, chip: Chip) -> dict[str, LeafSpec]:
    config, decoder = Config(model=ModelConfig(model="any", quantization=KEPT)), decoder_of(open_model(path))
    skeleton = make_skeleton(decoder, make_policy(config, decoder, chip))
    return {leaf.name: leaf for leaf in skeleton.leaves}


def format_of(leaf: LeafSpec) -> str:
    return repr(leaf.declared.format)  # type: ignore[union-attr]


def test_each_matrix_of_experts_keeps_the_type_of_the_file(path: Path) -> None:
    found = leaves(path, Chip("cpu"))
    for layer, (up, down) in enumerate((("Q4_K", "Q6_K"), ("Q5_K", "Q4_K"))):
        names = {part: f"model.layers.{layer}.mlp.experts.{part}_proj.weight" for part in ("gate", "up", "down")}
        kinds = {part: format_of(found[name]) for part, name in names.items()}
        assert kinds == {"gate": f"{KEPT} Q4_K", "up": f"{KEPT} {up}", "down": f"{KEPT} {down}"}
    (values,) = found["model.layers.0.mlp.experts.down_proj.weight"].arrays
    assert values.shape == (EXPERTS, WIDTH // 16, 2, BLOCK_KINDS["Q6_K"].tile_bytes)


def test_matrices_of_one_input_are_one_on_gpus_if_they_have_one_type(path: Path) -> None:
    found = {name: format_of(leaf) for name, leaf in leaves(path, Chip("gpu", (9, 0))).items() if "proj" in name}
    layers = [
        {
            "self_attn.q_proj": "Q4_K",
            "self_attn.k_proj": "Q4_K",
            "self_attn.v_proj": "Q6_K",
            "self_attn.o_proj": "Q4_K",
            "mlp.experts.gate_up_proj": "Q4_K",
            "mlp.experts.down_proj": "Q6_K",
        },
        {
            "self_attn.qkv_proj": "Q4_K",
            "self_attn.o_proj": "Q4_K",
            "mlp.experts.gate_proj": "Q4_K",
            "mlp.experts.up_proj": "Q5_K",
            "mlp.experts.down_proj": "Q4_K",
        },
    ]
    assert found == {
        f"model.layers.{layer}.{name}.weight": f"{KEPT} {kind}"
        for layer, kinds in enumerate(layers)
        for name, kind in kinds.items()
    }


def test_tpus_have_experts_in_words(path: Path) -> None:
    found = leaves(path, Chip("tpu"))
    (words,) = found["model.layers.0.mlp.experts.down_proj.weight"].arrays
    assert (words.dtype, words.shape[0], words.shape[2]) == (np.int32, EXPERTS, WIDTH)


def test_no_note_says_that_experts_are_dequantised(path: Path) -> None:
    config = Config(model=ModelConfig(model="any", quantization=KEPT))
    assert quantization_notes(config, decoder_of(open_model(path)), Chip("cpu")) == []


@pytest.mark.parametrize("device", ["h200", "v6e"])
def test_the_plan_counts_the_bytes_of_the_file(path: Path, device: str) -> None:
    checkpoint = open_model(path)
    decoder = decoder_of(checkpoint)
    config = Config(model=ModelConfig(model="any", quantization=KEPT))
    planned = model_sizes(config, decoder, find_device(device)).weights_bytes
    of_file = sum(info.num_stored_bytes for info in checkpoint.tensors.values())
    assert of_file < planned < 1.1 * of_file, "words of matrices as small as these are padded by up to 8 %"


@pytest.mark.slow
@pytest.mark.parametrize("cpu_kernels", ["xla", "native"])
def test_tokens_are_those_of_dequantised_experts(
    path: Path, expected: tuple[np.ndarray, list[int]], cpu_kernels: Any
) -> None:
    if cpu_kernels == "native" and not native.has("jaxserve_block_matmul"):
        pytest.skip("the native kernels are not built")
    logits, tokens = expected
    model = TinyModel(path, quantization=KEPT, cpu_kernels=cpu_kernels)
    found = model.logits(TOKENS)
    np.testing.assert_allclose(found, logits, atol=1e-5 * np.abs(logits).max())
    assert model.greedy(found[-1], 8) == tokens


@pytest.mark.slow
def test_rounded_activations_stay_close(path: Path, expected: tuple[np.ndarray, list[int]]) -> None:
    logits, _ = expected
    found = TinyModel(path, quantization="gguf").logits(TOKENS)
    error = np.linalg.norm(found - logits, axis=1) / np.linalg.norm(logits, axis=1)
    assert 1e-4 < np.median(error) < 0.05, "of a token here and there another expert is chosen"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "fused_for"),
    [pytest.param(MeshShape(2), 0, marks=pytest.mark.exhaustive), (MeshShape(2), 2), (MeshShape(2, expert=2), 0)],
    ids=str,
)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_devices_split_experts_in_blocks(
    path: Path, expected: tuple[np.ndarray, list[int]], shape: MeshShape, fused_for: int, platform: str
) -> None:
    """Devices split outputs and inputs, whole experts, and the words of TPUs, whose scales follow the codes of each share of the inputs."""
    decoder = decoder_of(open_model(path))
    assert decoder.stored is not None
    quant = QuantPolicy(KEPT, stored_kinds=decoder.stored.stored_kinds, platform=platform)
    logits, tokens = expected
    golden = GoldenCheckpoint("mixed", path, TOKENS, logits, np.array(tokens), np.array(()))
    model = MeshModel(golden, shape, quant=quant, fused_for=fused_for)
    found = model.logits(TOKENS)
    np.testing.assert_allclose(found[:, -8:], np.stack([logits, logits]), atol=1e-5 * np.abs(logits).max())
    names = {format_of(leaf) for leaf in model.skeleton.leaves if ".experts." in leaf.name}
    assert names == {f"{KEPT} {kind}" for kind in ("Q4_K", "Q5_K", "Q6_K")}
    assert model.greedy(found, 8) == [tokens, tokens]
