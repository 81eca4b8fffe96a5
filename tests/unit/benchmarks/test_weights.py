"""Copies of one model that must hold the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.peers.weights import (
    Weights,
    WeightsError,
    compare_tensors,
    model_type_of,
    write_directory,
    write_safetensors,
)
from jaxserve.quant.tensor import TensorInfo


class MemoryCheckpoint:
    """Tensors without a file."""

    def __init__(self, name: str, **arrays: np.ndarray) -> None:
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.path = Path(name)
        self._arrays = arrays
        self.tensors = {
            name: TensorInfo(name, array.shape, str(array.dtype), array.nbytes, self.path)
            for name, array in arrays.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]


def test_written_safetensors_hold_every_tensor_in_float32(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3) / 8
    original = MemoryCheckpoint("model", a=values, b=values[0].astype(ml_dtypes.bfloat16))
    write_safetensors(tmp_path / "model.safetensors", original)
    copy = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(copy["a"], values)
    np.testing.assert_array_equal(copy["b"], values[0])
    assert {array.dtype for array in copy.values()} == {np.dtype(np.float32)}


def test_equal_tensors_of_different_types_are_the_same_weights() -> None:
    values = np.array([0.5, 0.25], dtype=np.float32)
    compare_tensors(MemoryCheckpoint("copy", a=values), MemoryCheckpoint("original", a=values.astype(np.float16)))


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        ({"a": np.array([1.0, 2.25])}, "a: copy and original differ in up to 0.25"),
        ({"a": np.array([1.0])}, "differ in shape"),
        ({"b": np.array([1.0, 2.0])}, "copy and original differ in a and 1 more"),
    ],
)
def test_weights_that_differ_are_refused(copy: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        compare_tensors(MemoryCheckpoint("copy", **copy), MemoryCheckpoint("original", a=np.array([1.0, 2.0])))


def test_a_conversion_may_round_as_much_as_is_said() -> None:
    original = MemoryCheckpoint("original", a=np.array([1.0, 2.0]))
    compare_tensors(MemoryCheckpoint("copy", a=np.array([1.0, 2.0 + 1e-6])), original, 1e-6)
    with pytest.raises(WeightsError, match="a: copy and original differ"):
        compare_tensors(MemoryCheckpoint("copy", a=np.array([1.0, 2.0 + 1e-5])), original, 1e-6)


def test_formats_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.weights.source_format", lambda source: "q4_1")
    weights = Weights(Path("m/Model-1B.Q4_1.gguf"), Path("copies"))
    assert weights.gguf("q4_1") == weights.source
    assert weights.gguf("f16") == Path("copies/Model-1B.f16.gguf")


def test_a_folder_is_read_as_it_is_and_has_a_gguf_file_of_each_format(tmp_path: Path) -> None:
    weights = Weights(tmp_path, Path("copies"))
    write_directory(weights)
    assert weights.directory == tmp_path
    assert weights.gguf("f32") == Path("copies") / f"{tmp_path.name}.f32.gguf"


def test_a_class_has_transformers_own_type_and_an_unknown_one_is_refused() -> None:
    assert [model_type_of(name) for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM")] == ["llama", "qwen3_moe"]
    with pytest.raises(WeightsError, match="no NoSuchForCausalLM"):
        model_type_of("NoSuchForCausalLM")
