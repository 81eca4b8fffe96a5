"""Native kernels and smaller weights under the whole engine: the same text, or text as good as the format allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.errors import ConfigError
from tests.engine.model_engine import Generated, ModelEngine
from tests.engine.model_engine import request as ask
from tests.models.goldens import golden_checkpoint

MODEL = "mistral_sliding_tiny"


@pytest.fixture(scope="module")
def built() -> Path:
    try:
        return build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")


@pytest.fixture(scope="module")
def native(built: Path) -> Iterator[ModelEngine]:
    engine = ModelEngine(
        golden_checkpoint(MODEL).path,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        cpu_kernels="native",
        has_all_buckets=True,
    )
    yield engine
    engine.close()


def prompts(count: int, longest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 300, rng.integers(1, longest)) for _ in range(count)]


@pytest.mark.slow
def test_native_kernels_give_the_tokens_of_transformers(native: ModelEngine) -> None:
    golden = golden_checkpoint(MODEL)
    native.restart()
    assert native.run([ask("a", golden.prompt_ids, max_tokens=64)])["a"].token_ids == golden.output_ids.tolist()


@pytest.mark.slow
@pytest.mark.versions
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


def test_native_kernels_are_rejected_where_they_cannot_run() -> None:
    with pytest.raises(ConfigError, match="--cpu-kernels native: only on one CPU device"):
        ModelEngine(golden_checkpoint("llama3_tiny").path, tensor_parallel_size=2, cpu_kernels="native")
