"""Pages of real models leave the device and come back with the same bits: keys and values, vectors of latent attention, and
groups of several shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import TierConfig
from jaxserve.errors import DoesNotFitError
from jaxserve.types import BlockId
from tests.engine.model_engine import MODEL_NAME, ModelEngine, request
from tests.engine.test_weight_updates import changed_adapter
from tests.models.goldens import adapter_goldens, golden_checkpoint

PROMPT = [5 + 3 * i % 200 for i in range(100)]

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((MODEL_NAME, {}), marks=pytest.mark.exhaustive),
        (MODEL_NAME, {"tensor_parallel_size": 2}),
        pytest.param(("deepseek_v3_tiny", {}), marks=pytest.mark.exhaustive),
        pytest.param(("glm_moe_dsa_tiny", {}), marks=pytest.mark.exhaustive),
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


def test_pages_of_an_adapter_that_was_trained_again_have_another_layout(tmp_path: Path) -> None:
    """Folders and peers are chosen by the layout; adapters have the same number after each start."""
    goldens = adapter_goldens("llama3_tiny")
    first, second = goldens["first"].path, goldens["second"].path

    def identity(*folders: Path) -> str:
        modules = ",".join(f"{name}={folder}" for name, folder in zip("ab", folders, strict=True))
        tiers = TierConfig(kv_offload_memory=1 << 20)
        engine = ModelEngine(golden_checkpoint("llama3_tiny").path, lora_modules=modules, tiers=tiers)
        engine.close()
        assert engine.executor.pages is not None
        return engine.executor.pages.layout.identity

    again = changed_adapter(tmp_path / "again", second, -1.0)
    assert len({identity(first, second), identity(first, again), identity(second, first)}) == 3
