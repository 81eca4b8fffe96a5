"""GGUF files with experts: the tokens of the safetensors they were made from, and experts in blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.quant.tensor import as_floats
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import quantization_notes
from tests.models.goldens import golden_checkpoint
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import stored, write_safetensors
from tests.unit.checkpoint.gguf_families import write_as_gguf

pytestmark = pytest.mark.slow
KEPT = "gguf-weight-only"


def written(folder: Path, name: str, kind: str = "F32") -> Path:
    source = golden_checkpoint(name).path
    hf = json.loads((source / "config.json").read_text())
    return write_as_gguf(folder / "a.gguf", open_model(source), hf, kind)


@pytest.mark.parametrize(
    "name", ["mixtral_tiny", "qwen2_moe_tiny", "granitemoe_tiny", "granitemoeshared_odd_tiny", "glm4_moe_tiny"]
)
def test_tokens_equal_those_of_the_safetensors(tmp_path: Path, name: str) -> None:
    """Files named as Llama's, with rows in llama.cpp's order, with factors, and with shared experts and dense layers."""
    golden, model = golden_checkpoint(name), TinyModel(written(tmp_path, name))
    logits = model.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits, golden.logits, atol=1e-4, rtol=0)
    assert model.greedy(logits[-1], 64) == golden.output_ids.tolist()


def test_experts_in_blocks_are_served_dequantised(tmp_path: Path) -> None:
    name = "qwen3_moe_tiny"
    golden, path = golden_checkpoint(name), written(tmp_path, name, "Q8_0")
    expected, found = open_model(golden.path), open_model(path)
    own = "model.layers.2.mlp.experts.5.up_proj.weight"
    rows = expected.read(own).astype(np.float32)
    np.testing.assert_array_equal(found.read(own).blocks, stored("Q8_0", rows)[1])  # type: ignore[union-attr]
    (note,) = quantization_notes(
        Config(model=ModelConfig(model="any", quantization=KEPT)), decoder_of(found), Chip("cpu")
    )
    assert note == "36 matrices of experts are served dequantised: blocks are kept of other matrices"
    kept = TinyModel(path, quantization=KEPT).logits(golden.prompt_ids)
    np.testing.assert_array_equal(kept, TinyModel(path).logits(golden.prompt_ids))
    assert 0 < np.abs(kept - golden.logits).mean() < 0.02 * golden.logits.std()


def test_gpt_oss_in_mxfp4_gives_the_tokens_of_its_safetensors(tmp_path: Path) -> None:
    """The numbers of the file are written as safetensors in float32, with the limit of gates that llama.cpp hard-codes."""
    name = "gpt_oss_tiny"
    golden, path = golden_checkpoint(name), written(tmp_path, name, "MXFP4")
    found, folder = open_model(path), tmp_path / "safetensors"
    shutil.copytree(golden.path, folder)
    hf = json.loads((folder / "config.json").read_text()) | {"swiglu_limit": 7.0}
    (folder / "config.json").write_text(json.dumps(hf))
    tensors = {}
    for stored_name, values in ((each, as_floats(found.read(each))) for each in found.tensors):
        tensors[stored_name.replace(".mlp.gate.", ".mlp.router.")] = values.astype(np.float32)
    assert found.tensors["model.layers.1.mlp.experts.3.down_proj.weight"].stored_dtype == "MXFP4"
    write_safetensors(folder / "model.safetensors", tensors)
    model, expected = TinyModel(path), TinyModel(folder)
    logits, others = model.logits(golden.prompt_ids), expected.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits, others, atol=1e-5, rtol=0)
    tokens = expected.greedy(others[-1], 64)
    assert model.greedy(logits[-1], 64) == tokens
    assert np.abs(logits - golden.logits).max() > 0.01
    kept = TinyModel(path, quantization="mxfp4-weight-only")
    in_blocks = kept.logits(golden.prompt_ids)
    np.testing.assert_allclose(in_blocks, others, atol=1e-5, rtol=0)
    assert kept.greedy(in_blocks[-1], 64) == tokens
