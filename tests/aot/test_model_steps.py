"""Decode steps of large models, compiled for accelerators that are not there: bytes against the ideal.

One layer of each kind at real widths. docs/benchmarks/model-steps.md has the table of all of them.
"""

from __future__ import annotations

import re

import pytest
from jaxserve_kernels.linear_attention.gpu import FEWEST_TOKENS

from benchmarks.model_steps.shapes import (
    DEEPSEEK_V3_BLOCKS,
    FALCON_MAMBA_7B,
    QWEN3_6_35B,
    QWEN3_8B_BLOCKS,
    QWEN3_8B_GGUF,
    QWEN3_8B_NVFP4,
    QWEN3_30B_NVFP4,
    Model,
)
from benchmarks.model_steps.steps import make_case
from tests.aot.devices import H200, V6E, Target
from tests.aot.test_embed_programs import require_compiler

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.newest]


@pytest.mark.parametrize(
    ("model", "target", "num_devices", "most"),
    [
        pytest.param(QWEN3_6_35B, H200, 8, 1.35, id="qwen3.6-35b-h200-x8"),
        pytest.param(DEEPSEEK_V3_BLOCKS, H200, 8, 1.25, id="deepseek-v3-blocks-h200-x8"),
        pytest.param(QWEN3_8B_BLOCKS, H200, 1, 1.3, id="qwen3-8b-blocks-h200", marks=pytest.mark.exhaustive),
        pytest.param(QWEN3_8B_BLOCKS, V6E, 1, 1.1, id="qwen3-8b-blocks-v6e", marks=pytest.mark.exhaustive),
        pytest.param(QWEN3_8B_GGUF, V6E, 1, 1.1, id="qwen3-8b-gguf-v6e", marks=pytest.mark.exhaustive),
        pytest.param(QWEN3_8B_GGUF, V6E, 4, 1.1, id="qwen3-8b-gguf-v6e-x4"),
        pytest.param(QWEN3_8B_NVFP4, V6E, 1, 1.1, id="qwen3-8b-nvfp4-v6e", marks=pytest.mark.exhaustive),
        pytest.param(QWEN3_30B_NVFP4, V6E, 1, 1.1, id="qwen3-30b-nvfp4-v6e"),
        # Selective scans: XLA moves each state a second time.
        pytest.param(FALCON_MAMBA_7B, H200, 1, 1.55, id="falcon-mamba-7b-h200", marks=pytest.mark.exhaustive),
        pytest.param(FALCON_MAMBA_7B, V6E, 1, 1.3, id="falcon-mamba-7b-v6e", marks=pytest.mark.exhaustive),
    ],
)
def test_a_decode_step_moves_little_more_than_it_must(
    model: Model, target: Target, num_devices: int, most: float
) -> None:
    require_compiler(target)
    case = make_case(model, target.device, num_devices, "decode")
    step = case.step(*case.compile())
    # Less than all would mean that something is not counted: on TPUs what is fetched in the scope of no layer.
    assert (0.9 if target is V6E else 0.95) < step.ratio < most
    assert step.num_loops == 0
    assert "While" not in step.outside_graphs
    assert "CollectivePermute" not in step.outside_graphs


@pytest.mark.parametrize(
    ("num_tokens", "num_kernels", "most"),
    # The states of all rows are counted for both kernels, though each row is one kernel's.
    [
        pytest.param(256, 1, 1.2, id="tokens in turn", marks=pytest.mark.exhaustive),
        pytest.param(FEWEST_TOKENS, 2, 1.4, id="chunks"),
    ],
)
def test_a_mixed_step_of_recurrent_layers_is_one_cuda_graph(num_tokens: int, num_kernels: int, most: float) -> None:
    """A gated delta net and attention: the host waits for no loop over the tokens or chunks of prompts."""
    require_compiler(H200)
    case = make_case(QWEN3_6_35B, H200.device, 1, "mixed", num_mixed_tokens=num_tokens)
    step = case.step(*case.compile())
    assert len(re.findall(r'custom_call_target="mosaic_gpu[^\n]*/linear_attention/', step.text)) == num_kernels
    assert 1 < step.ratio < most
    assert step.num_loops == 0
    assert step.outside_graphs == ()
