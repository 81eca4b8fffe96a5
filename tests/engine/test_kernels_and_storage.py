"""Native kernels and smaller weights under the whole engine: the same text, or text as good as the format allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.config import CpuKernels
from jaxserve.errors import ConfigError
from tests.engine.model_engine import Generated, ModelEngine
from tests.engine.model_engine import request as ask
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint, golden_checkpoints

MODEL = "mistral_sliding_tiny"


@pytest.fixture(scope="module")
def built() -> Path:
    try:
        return build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")


@pytest.fixture(scope="module")
def native(built: Path) -> Iterator[ModelEngine]:
    engine = ModelEngine(golden_checkpoint(MODEL).path, max_num_seqs=8, max_num_batched_tokens=64, cpu_kernels="native")
    yield engine
    engine.close()


def prompts(count: int, longest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 300, rng.integers(1, longest)) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("golden", golden_checkpoints(), ids=lambda golden: golden.name)
def test_native_kernels_give_the_tokens_of_transformers(built: Path, golden: GoldenCheckpoint) -> None:
    engine = ModelEngine(golden.path, max_num_seqs=1, max_num_batched_tokens=16, cpu_kernels="native")
    result = engine.run([ask("a", golden.prompt_ids, max_tokens=64)])["a"]
    engine.close()
    assert result.token_ids == golden.output_ids.tolist()


@pytest.mark.slow
def test_neighbours_and_chunks_do_not_change_a_request(native: ModelEngine) -> None:
    mix = [ask(str(i), prompt, num_top_logprobs=5) for i, prompt in enumerate(prompts(8, longest=70))]
    native.restart(enable_prefix_caching=False)
    together = native.run(mix)
    for item in mix:
        native.restart(enable_prefix_caching=False)
        _assert_same(native.run([item])[item.request_id], together[item.request_id])
    native.restart(enable_prefix_caching=False, max_num_batched_tokens=16)
    for name, result in native.run(mix).items():
        _assert_same(result, together[name])


def _assert_same(one: Generated, other: Generated) -> None:
    assert one.token_ids == other.token_ids
    for mine, yours in zip(one.logprobs, other.logprobs, strict=True):
        assert mine.logprob == pytest.approx(yours.logprob, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cpu_kernels", ["xla", "native"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"quantization": "int8"}, 0.5),
        ({"quantization": "int8-weight-only"}, 0.25),
        ({"dtype": "float16"}, 0.01),
        ({"dtype": "bfloat16"}, 0.05),
    ],
    ids=str,
)
def test_smaller_weights_stay_close_to_the_full_model(
    request: pytest.FixtureRequest, cpu_kernels: CpuKernels, options: dict[str, Any], tolerance: float
) -> None:
    """Log-probabilities of the first token after a prompt, which no earlier choice can have changed."""
    if cpu_kernels == "native":
        request.getfixturevalue("built")
    golden = golden_checkpoint("llama3_tiny")
    first = {}
    for name, chosen in (("full", {}), ("small", options)):
        engine = ModelEngine(golden.path, max_num_seqs=1, max_num_batched_tokens=16, cpu_kernels=cpu_kernels, **chosen)
        (news,) = engine.run([ask("a", golden.prompt_ids, max_tokens=1, num_top_logprobs=20)])["a"].logprobs
        first[name] = dict(zip(news.top_token_ids, news.top_logprobs, strict=True))
        engine.close()
    common = first["full"].keys() & first["small"].keys()
    assert len(common) >= 15
    assert max(abs(first["full"][token] - first["small"][token]) for token in common) < tolerance
    if "quantization" in options:  # the checkpoint is small enough a type to be exact in the others
        assert any(first["full"][token] != first["small"][token] for token in common), "nothing was quantised"


def test_native_kernels_are_refused_where_they_cannot_run() -> None:
    with pytest.raises(ConfigError, match="--cpu-kernels native: only on one CPU device"):
        ModelEngine(golden_checkpoint("llama3_tiny").path, tensor_parallel_size=2, cpu_kernels="native")
