"""Adapters of a model: the tokens of PEFT, in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jaxserve_kernels.native.build import BuildError, build

from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import DATA, AdapterGolden, adapter_goldens

LLAMA, PHI = adapter_goldens("llama3_tiny"), adapter_goldens("phi3_tiny")
pytestmark = pytest.mark.slow

NUMBERS = {"base": 0, "first": 1, "second": 2}


def modules(goldens: dict[str, AdapterGolden], *names: str) -> str:
    return ",".join(f"{name}={goldens[name].path}" for name in names)


@pytest.fixture(scope="module")
def engine() -> Iterator[ModelEngine]:
    engine = ModelEngine(DATA / "llama3_tiny", lora_modules=modules(LLAMA, "first", "second"))
    yield engine
    engine.close()


def test_native_kernels_give_the_same_tokens_in_any_batch() -> None:
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    both = modules(LLAMA, "first", "second")
    engine = ModelEngine(DATA / "llama3_tiny", cpu_kernels="native", max_num_seqs=2, lora_modules=both)
    requests = [request(name, LLAMA[name].prompt_ids, adapter=NUMBERS[name], max_tokens=32) for name in NUMBERS]
    results = engine.run(requests)
    engine.close()
    for name in NUMBERS:
        assert results[name].token_ids == LLAMA[name].output_ids.tolist()


@pytest.mark.parametrize("name", NUMBERS)
def test_tokens_are_those_of_peft(engine: ModelEngine, name: str) -> None:
    engine.restart()
    golden = LLAMA[name]
    result = engine.run([request("a", golden.prompt_ids, adapter=NUMBERS[name], max_tokens=32)])["a"]
    assert result.token_ids == golden.output_ids.tolist()


@pytest.mark.parametrize("drafts", [0, 4])
def test_requests_of_all_adapters_share_steps(engine: ModelEngine, drafts: int) -> None:
    engine.restart(num_speculative_tokens=drafts)
    requests = [
        request(f"{name}-{turn}", LLAMA[name].prompt_ids, adapter=number, max_tokens=32)
        for turn in range(2)
        for name, number in NUMBERS.items()
    ]
    results = engine.run(requests)
    for name in NUMBERS:
        for turn in range(2):
            assert results[f"{name}-{turn}"].token_ids == LLAMA[name].output_ids.tolist()


def test_cached_pages_are_those_of_one_adapter(engine: ModelEngine) -> None:
    engine.restart()
    found = []
    for turn in range(2):
        for name, number in NUMBERS.items():
            result = engine.run([request(f"{name}-{turn}", LLAMA[name].prompt_ids, adapter=number, max_tokens=32)])
            assert result[f"{name}-{turn}"].token_ids == LLAMA[name].output_ids.tolist()
            found.append(result[f"{name}-{turn}"].num_cached_tokens)
    assert found[:3] == [0, 0, 0]
    assert all(found[3:])


def test_adapters_of_joined_matmuls() -> None:
    """Phi-3 has one matrix for queries, keys and values, and so have its adapters."""
    engine = ModelEngine(DATA / "phi3_tiny", max_num_seqs=2, lora_modules=modules(PHI, "fused"))
    requests = [
        request(name, PHI[name].prompt_ids, adapter=i, max_tokens=32) for i, name in enumerate(("base", "fused"))
    ]
    results = engine.run(requests)
    engine.close()
    for name in ("base", "fused"):
        assert results[name].token_ids == PHI[name].output_ids.tolist()
