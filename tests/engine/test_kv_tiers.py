"""Pages of real models leave the device and come back with the same bits: keys and values, vectors of latent attention, and
groups of several shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.config import TierConfig
from jaxserve.errors import DoesNotFitError
from jaxserve.types import BlockId
from tests.engine.model_engine import MODEL_NAME, ModelEngine, request
from tests.models.goldens import golden_checkpoint

PROMPT = [5 + 3 * i % 200 for i in range(100)]

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((MODEL_NAME, {}), marks=pytest.mark.exhaustive),
        (MODEL_NAME, {"tensor_parallel_size": 2}),
        pytest.param(("deepseek_v3_tiny", {}), marks=pytest.mark.exhaustive),
        ("mistral4_tiny", {"tensor_parallel_size": 2}),
        pytest.param(("gemma4_tiny", {}), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def engine(request: pytest.FixtureRequest) -> Iterator[ModelEngine]:
    name, devices = request.param
    engine = ModelEngine(
        golden_checkpoint(name).path,
        **devices,
        tiers=TierConfig(kv_offload_memory=4 << 20, kv_fetch="always"),
    )
    yield engine
    engine.close()


def content(engine: ModelEngine) -> list[bytes]:
    """Return the bytes of the prompt's full pages as they are on the device."""
    assert engine.executor.pages is not None
    chain = engine.kv.new_table(None).chain
    blocks = [engine.kv.pool.find(chain.hash(index, np.array(PROMPT, np.int32))) for index in range(6)]
    pages = engine.executor.pages.read([BlockId(block) for block in blocks if block is not None]).pages()
    return [b"".join(block.tobytes() for block in page) for page in pages]


def test_evicted_pages_come_back_with_equal_bits_and_tokens(engine: ModelEngine) -> None:
    engine.restart()
    assert engine.tiers is not None
    computed = engine.run([request("first", PROMPT)])["first"]
    before = content(engine)
    assert len(set(before)) == 6, "six different pages"
    engine.tiers.saver.settle()
    engine.kv.reset_prefix_cache()
    assert content(engine) == []

    other = engine.run([request("other", PROMPT[::-1])])["other"]  # takes the pages of the first
    fetched = engine.run([request("again", PROMPT)])["again"]
    assert fetched.num_cached_tokens == 96
    assert content(engine) == before
    assert fetched.token_ids == computed.token_ids != other.token_ids
    assert engine.executor.compilations()["serving"] == 0
    engine.tiers.close()


def test_pages_move_among_requests_that_run(engine: ModelEngine) -> None:
    """Pages are saved and written while other requests decode, in a pool that holds two of them."""
    engine.restart()
    requests = [request(f"r{i}", PROMPT[i % 3 :][:70]) for i in range(9)]
    expected = {item.request_id: engine.run([item])[item.request_id].token_ids for item in requests[:3]}
    engine.restart(num_blocks=15)
    assert engine.tiers is not None
    results = engine.run(requests)
    for index, item in enumerate(requests):
        assert results[item.request_id].token_ids == expected[f"r{index % 3}"]
    engine.tiers.close()


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match=r"--kv-offload-memory of 1048576\.00 GiB is more than the"):
        ModelEngine(golden_checkpoint(MODEL_NAME).path, tiers=TierConfig(kv_offload_memory=1 << 50))
