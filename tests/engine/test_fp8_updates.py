"""Updates of a running engine whose weights are in fp8 blocks: by such a checkpoint, and by floats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine
from tests.engine.test_weight_updates import MODEL, PROMPTS, Operator, changed, run
from tests.models.loading import array_specs
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors
from tests.unit.checkpoint.fp8_files import E4M3, in_blocks, write_fp8

pytestmark = pytest.mark.slow
NAME = "model.layers.0.mlp.down_proj.weight"
PROMPT = PROMPTS["a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the model `old`, another one `new`, and `new` in blocks of another size `other`."""
    root = tmp_path_factory.mktemp("blocks")
    changed(root / "floats", -0.7)
    for name, source, block in (("old", MODEL, 32), ("new", root / "floats", 32), ("other", root / "floats", 16)):
        (root / name).mkdir()
        write_fp8(root / name, source, in_blocks(40, block))
    return root


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ModelEngine]:
    engine = ModelEngine(folder / "old", quantization="auto", max_num_seqs=4, max_num_batched_tokens=64)
    yield engine
    engine.close()


def tokens_of(path: Path) -> list[int]:
    model = TinyModel(path, quantization="none")
    return model.greedy(model.logits(np.array(PROMPT))[-1], 24)


def test_weights_in_blocks_replace_those_in_blocks(engine: ModelEngine, folder: Path) -> None:
    operator, old, new = Operator(engine), tokens_of(folder / "old"), tokens_of(folder / "new")
    operator.finish("update_weights", model=str(folder / "old"))
    assert run(engine, {"a": PROMPT})["a"] == old != new
    num_compilations = engine.executor.compilations()
    operator.finish("update_weights", model=str(folder / "new"))
    assert run(engine, {"a": PROMPT})["a"] == new
    assert engine.executor.compilations() == num_compilations
    refused = operator.refused("update_weights", model=str(folder / "other"))
    assert "quantization.group_size is '16' and, in the model that is served, '32'" in refused


def test_floats_are_rounded_in_groups_of_inputs(engine: ModelEngine, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    file = write_safetensors(tmp_path / "some", {NAME: values})
    Operator(engine).finish("update_weights", tensors=str(file))
    weights: Any = engine.executor.weights
    named = array_specs(weights._prepared.skeleton)
    params = dict(zip(named, weights._runner.params, strict=True))
    stored, scales = (np.asarray(params[name]) for name in (NAME, f"{NAME}_scale"))
    assert (stored.dtype, scales.shape) == (E4M3, (3, 64))
    by_input = scales.T.repeat(32, axis=1)
    errors = np.abs(stored.astype(np.float32) * by_input - values)
    assert (errors <= np.abs(values) / 16 + 2**-10 * by_input).all()
