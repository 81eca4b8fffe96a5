"""Every architecture and quantisation format with the CPU kernels that users have, and with XLA's, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jaxserve_kernels.native.build import BuildError, build
from scipy.special import log_softmax

from jaxserve.config import CpuKernels
from tests.engine.test_sparse import IN_CI as IN_ENGINES
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint, golden_names
from tests.models.layer_kinds import names_of_all_choices
from tests.models.tiny_model import TinyModel

pytestmark = pytest.mark.slow
CHUNK = 20
"""Prompt tokens per step, of 40: no multiple of a page."""
NUM_AGAIN = 6
"""Tokens generated after a preemption or a prefix hit."""


@pytest.fixture(params=[pytest.param("xla", marks=pytest.mark.versions), "native"])
def cpu_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    kernels: CpuKernels = request.param
    if kernels == "native":
        try:
            build()
        except BuildError as error:
            pytest.skip(f"native kernels: {error}")
    return kernels


IN_CI = tuple(name for name in names_of_all_choices(has_odd_shapes=False) if name not in IN_ENGINES)


@pytest.mark.parametrize("name", [name for name in golden_names() if "_odd_" not in name and name not in IN_CI])
def test_logits_of_every_architecture_equal_transformers(name: str) -> None:
    """With native kernels where they can be built. One program: its first step begins the cache, and the second one reads it."""
    golden = golden_checkpoint(name)
    check_prompt(TinyModel(golden.path, cpu_kernels="auto"), golden)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.exhaustive]) for name in golden_names()],
)
def test_logits_and_greedy_tokens_equal_transformers(name: str) -> None:
    """With native kernels where they can be built; also of a request that is computed again after a preemption, and of one whose
    prefix an earlier request has left in the cache.
    """
    golden = golden_checkpoint(name)
    model = check(golden, "auto")
    text = np.concatenate([golden.prompt_ids, golden.output_ids])
    expected = golden.output_ids[CHUNK : CHUNK + NUM_AGAIN].tolist()
    model.restart()
    for start in range(0, len(golden.prompt_ids) + CHUNK, CHUNK):
        logits = model.logits(text[start : start + CHUNK])
    assert model.greedy(logits[-1], NUM_AGAIN) == expected, "preempted"
    model.restart()
    model.logits(text[:CHUNK])
    kept = model.states()
    model.logits(text[CHUNK : 2 * CHUNK] ^ 1)  # another request with the same prefix
    model.resume(CHUNK, kept)
    np.testing.assert_allclose(model.logits(golden.prompt_ids[CHUNK:]), golden.logits, atol=1e-4, rtol=0)
    assert model.greedy(golden.logits[-1], NUM_AGAIN) == golden.output_ids[:NUM_AGAIN].tolist(), "prefix hit"


def check(golden: GoldenCheckpoint, cpu_kernels: CpuKernels) -> TinyModel:
    """Compare with transformers, and return the model. The prompt comes in two steps, whose border is within a page and within a chunk of the recurrent kernels."""
    model = TinyModel(golden.path, cpu_kernels=cpu_kernels)
    logits = check_prompt(model, golden)
    assert model.greedy(logits[-1], 64) == golden.output_ids.tolist()
    return model


def check_prompt(model: TinyModel, golden: GoldenCheckpoint) -> np.ndarray:
    model.logits(golden.prompt_ids[:CHUNK])
    logits = model.logits(golden.prompt_ids[CHUNK:])
    np.testing.assert_allclose(logits, golden.logits, atol=1e-4, rtol=0)
    return logits


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("deepseek_v3_tiny", 2),  # a latent cache, of which every device has all
        ("olmoe_tiny", 2),  # whole experts on each device
        ("qwen2_sliding_tiny", 4),  # a cache of its own for layers with a window
        ("smollm2_tiny", 4),  # six heads, which do not divide
    ],
)
def test_devices_that_share_a_model_give_the_tokens_of_one(name: str, size: int) -> None:
    """test_parallel.py has more meshes."""
    golden = golden_checkpoint(name)
    model = TinyModel(golden.path, tensor_parallel_size=size)
    logits = model.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits, golden.logits, atol=1e-4, rtol=0)
    assert model.greedy(logits[-1], 64) == golden.output_ids.tolist()


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"quantization": "int8"}, 0.5),
        ({"quantization": "int8-weight-only"}, 0.25),
        ({"quantization": "fp8"}, 0.75),
        ({"quantization": "fp8-weight-only"}, 0.75),
        ({"quantization": "fp8-block-weight-only"}, 0.75),
        ({"quantization": "int4-weight-only"}, 2.0),
        ({"dtype": "float16"}, 0.01),
        ({"dtype": "bfloat16"}, 0.05),
    ],
    ids=str,
)
def test_smaller_weights_stay_close_to_float32(
    options: dict[str, Any], tolerance: float, cpu_kernels: CpuKernels
) -> None:
    """Compare the log-probabilities of the likeliest tokens after a prompt."""
    golden = golden_checkpoint("llama3_tiny")
    full = log_softmax(golden.logits[-1])
    small = log_softmax(TinyModel(golden.path, cpu_kernels=cpu_kernels, **options).logits(golden.prompt_ids)[-1])
    likeliest = np.intersect1d(*(np.argsort(each)[-20:] for each in (full, small)))
    assert len(likeliest) >= 12
    difference = np.abs(full - small)[likeliest].max()
    assert difference < tolerance
    if "quantization" in options:  # the checkpoint is small enough a type to be exact in the others
        assert difference > 1e-3, "nothing was quantised"
