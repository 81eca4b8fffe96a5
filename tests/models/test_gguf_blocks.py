"""GGUF files whose matrices are served in their blocks: the numbers of the dequantised weights, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from jaxserve_kernels import native

from jaxserve.checkpoint.huggingface import open_tensors
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.preparation import prepare
from jaxserve.executor.served_weights import ServedWeights
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.models.registry import decoder_of, families, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.array import QuantArray
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy, quantization_notes
from jaxserve.weights.loader import load_changed, load_params
from tests.models.goldens import DATA
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import (
    decoder_metadata,
    decoder_weights,
    stored,
    write_gguf,
    write_safetensors,
)

KINDS: Final = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_1",
    "attn_k": "Q5_1",
    "attn_v": "Q5_0",
    "attn_output": "Q4_0",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q8_0",
}
"""Types by parts of llama.cpp's names. The matrix of `ffn_down` has 48 inputs, which no block divides."""
TOKENS: Final = np.arange(7, 27)
KEPT: Final = "gguf-weight-only"


def write_blocks(path: Path, seed: int = 0, num_files: int = 1, **changes: str) -> Path:
    """Write a tiny Llama in blocks. changes: types by part, other than in KINDS."""
    kinds = KINDS | changes
    tensors = {}
    for name, value in decoder_weights(seed).items():
        kind = kinds.get(name.split(".")[-2])
        tensors[name] = ("F32", value) if kind is None else stored(kind, 0.3 * value)
    return write_gguf(path, "llama", decoder_metadata("llama"), tensors, num_files)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blocks(tmp_path_factory.mktemp("blocks") / "a.gguf")


@pytest.fixture(scope="module")
def dequantised(path: Path) -> np.ndarray:
    """Logits of the dequantised weights."""
    return TinyModel(path, quantization="none").logits(TOKENS)


def formats(path: Path, quantization: str = KEPT, **adapters: Any) -> dict[str, str]:
    """Return the format of each matrix by its name."""
    config, decoder = Config(model=ModelConfig(model="any", quantization=quantization)), decoder_of(open_model(path))
    skeleton = make_skeleton(decoder, make_policy(config, decoder, Chip("cpu")), **adapters)
    return {leaf.name: repr(leaf.declared.format) for leaf in skeleton.leaves if isinstance(leaf.declared, QuantArray)}


def test_each_matrix_keeps_the_type_of_the_file(path: Path) -> None:
    found = formats(path)
    layer = "model.layers.1."
    assert found["model.embed_tokens.weight"] == "gguf-weight-only Q8_0"
    assert found[layer + "self_attn.q_proj.weight"] == "gguf-weight-only Q4_1"
    assert found[layer + "self_attn.v_proj.weight"] == "gguf-weight-only Q5_0"
    assert found[layer + "mlp.down_proj.weight"] == "none"
    assert set(formats(path, "auto").values()) == {"none"}


def test_adapters_of_matrices_in_blocks_are_not_quantised(path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    found = formats(path, adapters=AdaptersConfig(1, 8, (module,)))
    assert found[f"{module}.weight"] == "gguf-weight-only Q4_1"
    assert (found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"]) == ("none", "none")


@pytest.mark.slow
@pytest.mark.parametrize("cpu_kernels", ["xla", "native"])
def test_blocks_give_the_logits_of_the_dequantised_weights(
    path: Path, dequantised: np.ndarray, cpu_kernels: Any
) -> None:
    """Rows of queries and keys are in llama.cpp's order, and embeddings are looked up and multiplied with in blocks."""
    if cpu_kernels == "native" and not native.has("jaxserve_block_matmul"):
        pytest.skip("the native kernels are not built")
    found = TinyModel(path, quantization=KEPT, cpu_kernels=cpu_kernels).logits(TOKENS)
    np.testing.assert_allclose(found, dequantised, atol=1e-5 * np.abs(dequantised).max())


@pytest.mark.slow
def test_rounded_activations_stay_close(path: Path, dequantised: np.ndarray) -> None:
    found = TinyModel(path, quantization="gguf").logits(TOKENS)
    error = np.linalg.norm(found - dequantised, axis=1) / np.linalg.norm(dequantised, axis=1)
    assert 1e-4 < error.max() < 0.1


@pytest.mark.slow
def test_devices_share_blocks(path: Path, dequantised: np.ndarray) -> None:
    """Keys and values have one tile of outputs, which two devices cannot share: these matrices are dequantised."""
    found = TinyModel(path, quantization=KEPT, tensor_parallel_size=2).logits(TOKENS)
    np.testing.assert_allclose(found, dequantised, atol=1e-5 * np.abs(dequantised).max())


def served(path: Path) -> tuple[ServedWeights, SimpleNamespace, Any]:
    """Return the weights of an engine without programs, its runner, and its preparation."""
    config = Config(model=ModelConfig(model=str(path), quantization=KEPT))
    checkpoint = open_model(path)
    model = decoder_of(checkpoint)
    prepared = prepare(config, model)
    runner = SimpleNamespace(params=load_params(checkpoint, prepared.skeleton, prepared.sharding, lambda *_: None))
    state: Any = None
    return ServedWeights(config, prepared, checkpoint, model, (), runner, state), runner, prepared  # type: ignore[arg-type]


def test_weights_are_replaced_by_those_of_a_file_or_a_split_model_of_the_same_types(path: Path, tmp_path: Path) -> None:
    weights, runner, _ = served(path)
    other = write_blocks(tmp_path / "other.gguf", seed=1)
    weights.load(str(other))()
    _, expected, _ = served(other)
    for found, array in zip(runner.params, expected.params, strict=True):
        np.testing.assert_array_equal(found, array)
    split = write_blocks(tmp_path / "split.gguf", num_files=3)
    weights.load(str(split))()
    for found, array, first in zip(runner.params, served(split)[1].params, served(path)[1].params, strict=True):
        np.testing.assert_array_equal(found, array)
        np.testing.assert_array_equal(array, first)
    of_other_type = write_blocks(tmp_path / "type.gguf", attn_q="Q8_0")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is 'Q8_0' and, in the model that is served, 'Q4_1'"):
        weights.load(str(of_other_type))


def test_float_weights_are_rounded_to_the_types_that_are_served(path: Path, tmp_path: Path) -> None:
    """The weights here are those of another file in blocks, which the rounding finds again."""
    _, runner, prepared = served(path)
    name = "model.layers.0.self_attn.o_proj.weight"
    other = write_blocks(tmp_path / "other.gguf", seed=1)
    floats = open_model(other).read(name).dequantize()  # type: ignore[union-attr]
    write_safetensors(tmp_path / "model.safetensors", {name: floats})
    tensors = open_tensors(tmp_path / "model.safetensors", open_model(path), families())
    ((index, found),) = load_changed(tensors, prepared.skeleton, prepared.sharding).items()
    _, expected, _ = served(other)
    np.testing.assert_array_equal(found, expected.params[index])
    assert found.dtype == runner.params[index].dtype == np.uint8


@pytest.mark.parametrize("quantization", ["gguf", KEPT])
def test_a_checkpoint_without_blocks_is_refused(quantization: str) -> None:
    config = Config(model=ModelConfig(model="any", quantization=quantization))
    with pytest.raises(
        ConfigError, match=rf"^--quantization {quantization}: keeps the quantised blocks of a GGUF file"
    ):
        make_policy(config, decoder_of(open_model(DATA / "llama3_tiny")), Chip("cpu"))


def test_a_gpu_says_if_it_reads_blocks_as_they_are_stored(path: Path) -> None:
    config = Config(model=ModelConfig(model="any", quantization=KEPT))
    for capability, said in (
        ((9, 0), "steps of up to 128 tokens read blocks as they are stored"),
        ((8, 0), "costs time"),
    ):
        (note,) = quantization_notes(config, decoder_of(open_model(path)), Chip("gpu", capability))
        assert said in note


def test_types_without_a_kernel_are_named(path: Path) -> None:
    decoder = decoder_of(open_model(path))
    assert decoder.stored is not None
    kinds = (*decoder.stored.stored_kinds, ("a", "Q3_K"), ("b", "Q2_K"), ("c", "Q3_K"))
    decoder = replace(decoder, stored=replace(decoder.stored, stored_kinds=kinds))
    config = Config(model=ModelConfig(model="any", quantization=KEPT))
    (note,) = quantization_notes(config, decoder, Chip("cpu"))
    assert note.startswith("3 matrices in Q2_K, Q3_K are served dequantised: blocks are kept of Q4_0, Q4_1, Q4_K, ")
