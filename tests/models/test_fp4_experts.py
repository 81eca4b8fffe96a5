"""DeepSeek-V4 with its published weights: fp8 in blocks and experts of two e2m1 numbers to a byte, both with e8m0 scales."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.errors import CheckpointError
from jaxserve.models.registry import open_model
from jaxserve.quant.formats import _mxfp4_tensors as mxfp4
from tests.models.goldens import golden_checkpoint
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors

pytestmark = pytest.mark.slow
SOURCE = golden_checkpoint("deepseek_v4_tiny").path
WIDER = {48: 64, 144: 192, 16: 32}
"""Widths of the model, of its three streams and of experts, which blocks of 32 inputs divide."""
BLOCK = 32
IN_FP8 = (".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", ".shared_experts.")
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def wide_tensors() -> dict[str, np.ndarray]:
    """Return random tensors like those of the tiny checkpoint, of the widths that `WIDER` says."""
    random, found = np.random.default_rng(4), {}
    for name, tensor in load_file(SOURCE / "model.safetensors").items():
        if name.endswith("tid2eid"):
            found[name] = tensor
            continue
        wide = tensor.astype(np.float32)
        shape = [WIDER.get(size, size) for size in wide.shape]
        found[name] = (wide.mean() + wide.std() * random.standard_normal(shape)).astype(np.float32)
    return found


def in_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return e4m3 values, powers of two for blocks, and what both mean."""
    rows, columns = (-(-size // BLOCK) for size in matrix.shape)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = np.abs(matrix)
    largest = padded.reshape(rows, BLOCK, columns, BLOCK).max((1, 3))
    scales = np.exp2(np.ceil(np.log2(largest / 448)))
    factors = np.kron(scales, np.ones((BLOCK, BLOCK)))[: matrix.shape[0], : matrix.shape[1]].astype(np.float32)
    values = (matrix / factors).astype(ml_dtypes.float8_e4m3fn)
    return values, scales.astype(E8M0), values.astype(np.float32) * factors


def in_fp4(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bytes of two e2m1 numbers, powers of two for 32 inputs, and what both mean."""
    codes, exponents = mxfp4.quantize(matrix, BLOCK)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(len(matrix), -1, BLOCK)
    scales = np.exp2(exponents.astype(np.float32) - 127)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
    return packed, exponents.view(E8M0), (numbers * scales[:, :, None]).reshape(matrix.shape)


def write(folder: Path, *, num_scales: int | None = None) -> Path:
    """Write a checkpoint as it is published in `folder`, and a plain one with the same weights in `folder`/plain. num_scales: those of an output
    of an expert; None: as many as there are blocks."""
    stored, meant = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, tensor in wide_tensors().items():
        quantize = in_fp4 if ".experts." in name else in_fp8 if any(part in name for part in IN_FP8) else None
        if quantize is None or ".indexer.compressor." in name or ".attn.compressor." in name:
            stored[name] = meant[name] = tensor
            continue
        stored[name], scales, meant[name] = quantize(tensor)
        stored[name.removesuffix("weight") + "scale"] = scales[:, :num_scales] if quantize is in_fp4 else scales
    config = json.loads((SOURCE / "config.json").read_text()) | {"hidden_size": 64, "moe_intermediate_size": 32}
    method = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
    published = config | {"quantization_config": method, "expert_dtype": "fp4"}
    for path, tensors, keys in ((folder, stored, published), (folder / "plain", meant, config)):
        path.mkdir(exist_ok=True)
        write_safetensors(path / "model.safetensors", tensors)
        (path / "config.json").write_text(json.dumps(keys))
    return folder


def test_logits_and_tokens_are_those_of_the_dequantised_model(tmp_path: Path) -> None:
    path, prompt = write(tmp_path), golden_checkpoint("deepseek_v4_tiny").prompt_ids
    kept, plain = TinyModel(path), TinyModel(path / "plain")
    assert (kept.policy.quant.name, plain.policy.quant.name) == ("mxfp4-weight-only", "none")
    logits, expected = kept.logits(prompt), plain.logits(prompt)
    np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=0)
    assert kept.greedy(logits[-1], 8) == plain.greedy(expected[-1], 8)


def test_scales_of_another_shape_are_rejected_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected an F8_E8M0 scale for each 32 inputs of \(32, 64\)"):
        open_model(write(tmp_path, num_scales=1))
