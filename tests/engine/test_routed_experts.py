"""An engine returns the experts of every token that it has computed, however it has computed them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from jaxserve.config import Config, ModelConfig, SchedulerConfig, TierConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.preparation import prepare
from jaxserve.executor.routed_experts import routed_experts_info
from jaxserve.ipc.messages import AddRequest
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.runner.steps import lower
from tests.engine.model_engine import Generated, ModelEngine, request
from tests.engine.test_overlap import shown
from tests.models.goldens import golden_checkpoint, routing_goldens

pytestmark = pytest.mark.slow

GOLDEN, ROUTING = golden_checkpoint("mixtral_tiny"), routing_goldens()["mixtral_tiny"]
INFO = RoutedExpertsInfo(num_layers=2, num_per_token=2, num_experts=4)
NUM_DRAFTS = 3


def made(**options: Any) -> Iterator[ModelEngine]:
    engine = ModelEngine(GOLDEN.path, max_num_seqs=4, max_num_batched_tokens=16, returns_experts=True, **options)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def returning() -> Iterator[ModelEngine]:
    yield from made()


def golden_request(name: str = "golden", **options: Any) -> AddRequest:
    return request(name, GOLDEN.prompt_ids, max_tokens=64, returns_experts=True, **options)


def experts(found: Generated) -> np.ndarray:
    """Return the experts of a request, ascending."""
    return np.sort(np.frombuffer(found.routed_experts, INFO.dtype).reshape(-1, *INFO.shape), axis=2)


def mix() -> list[AddRequest]:
    """Prompts of several chunks with a shared start, greedy and seeded; one request wants no experts."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 300, 20)
    options: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"returns_experts": False}, {"max_tokens": 1}]
    own = [rng.integers(3, 300, length) for length in (1, 30, 17, 40)]
    return [
        request(str(i), [*shared, *tail], **({"max_tokens": 25, "returns_experts": True} | each))
        for i, (tail, each) in enumerate(zip(own, options, strict=True))
    ]


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"max_burst_ms": 0.0, "overlap": False}], ids=repr
)
def test_experts_are_those_of_transformers(returning: ModelEngine, options: dict[str, Any]) -> None:
    returning.restart(**options)
    found = returning.run([golden_request()])["golden"]
    assert found.token_ids == GOLDEN.output_ids.tolist()
    assert np.array_equal(experts(found), ROUTING)


def test_prompt_from_the_prefix_cache_has_its_experts(returning: ModelEngine) -> None:
    """Also if the requests before did not ask for theirs."""
    returning.restart()
    returning.run([request("first", GOLDEN.prompt_ids, max_tokens=64)])
    found = returning.run([golden_request()])["golden"]
    assert found.num_cached_tokens >= 32
    assert np.array_equal(experts(found), ROUTING)


def predicted(found: Generated) -> list[int]:
    """Return the reply with every seventh token wrong."""
    return [token + (i % 7 == 6) for i, token in enumerate(found.token_ids)]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 7}, {"max_num_batched_tokens": 5}, {"max_burst_ms": 1e6}, {"num_speculative_tokens": 3}],
    ids=repr,
)
def test_experts_do_not_depend_on_the_other_requests(returning: ModelEngine, options: dict[str, Any]) -> None:
    """Alone they are the same as together, with preemption, chunks, multi-step decode and drafts."""
    alone: dict[str, Generated] = {}
    for item in mix():
        returning.restart(overlap=False, max_burst_ms=0.0)
        alone |= returning.run([item])
    before = returning.executor.compilations()
    returning.restart(**options)
    items, size = mix(), 4
    if "num_speculative_tokens" in options:  # drafts are made while half of the rows are free, here from a prediction
        size = 2
        items = [structs.replace(each, prediction_token_ids=predicted(alone[each.request_id])) for each in items]
    parts = [items[start : start + size] for start in range(0, 4, size)]
    together = {name: each for part in parts for name, each in returning.run(part).items()}
    assert returning.executor.compilations() == before
    assert (returning.num_draft_tokens > 0) == ("num_speculative_tokens" in options)
    assert shown(together) == shown(alone)
    assert (returning.num_preemptions > 0) == ("num_blocks" in options)
    for item in mix():
        assert together[item.request_id].routed_experts == alone[item.request_id].routed_experts
        count = len(item.prompt_token_ids) + len(alone[item.request_id].token_ids) - 1
        assert len(experts(alone[item.request_id])) == (count if item.returns_routed_experts else 0)


@pytest.mark.usefixtures("speculates")
def test_experts_are_the_same_with_a_draft_model() -> None:
    """The drafts are right; wrong ones are among those from predictions."""
    for engine in made(draft_model=GOLDEN.path, num_speculative_tokens=NUM_DRAFTS):
        engine.restart(num_speculative_tokens=NUM_DRAFTS)
        found = engine.run([golden_request(), golden_request("other", temperature=1.0, seed=4)])
        assert engine.num_draft_tokens > 60
        assert found["golden"].token_ids == GOLDEN.output_ids.tolist()
        assert np.array_equal(experts(found["golden"]), ROUTING)
        engine.restart()
        plain = engine.run([golden_request("other", temperature=1.0, seed=4)])["other"]
        assert found["other"].routed_experts == plain.routed_experts


@pytest.mark.parametrize(
    "split",
    [
        {"tensor_parallel_size": 2, "expert_parallel_size": 2},
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=repr,
)
def test_several_devices_return_the_same_experts(split: dict[str, int]) -> None:
    for engine in made(**split):
        found = engine.run([golden_request(str(i)) for i in range(2)])
        for each in found.values():
            assert np.array_equal(experts(each), ROUTING)


def settings(path: Path, **sections: Any) -> Config:
    return Config(model=ModelConfig(model=str(path), enable_return_routed_experts=True), **sections)


def test_what_has_no_experts_to_return_is_refused_in_one_line() -> None:
    dense = golden_checkpoint("llama3_tiny").path
    mixture = decoder_of(open_model(GOLDEN.path))
    assert routed_experts_info(settings(GOLDEN.path), mixture) == INFO
    assert routed_experts_info(Config(model=ModelConfig(model="x")), mixture) is None
    with pytest.raises(ConfigError, match="--enable-return-routed-experts: this model has no experts"):
        routed_experts_info(settings(dense), decoder_of(open_model(dense)))
    with pytest.raises(ConfigError, match="--kv-offload-memory: not with --enable-return-routed-experts"):
        routed_experts_info(settings(GOLDEN.path, tiers=TierConfig(kv_offload_memory=1 << 20)), mixture)
    embeds = Config(model=ModelConfig(model=str(GOLDEN.path), task="embed", enable_return_routed_experts=True))
    with pytest.raises(ConfigError, match="a model that embeds returns no experts"):
        routed_experts_info(embeds, mixture)


def test_programs_without_the_flag_have_no_further_output() -> None:
    """Two outputs, tokens and scores of prompts; with the flag a third."""
    plain, returning = (
        prepare(
            replace(small, model=replace(small.model, enable_return_routed_experts=is_on)),
            decoder_of(open_model(GOLDEN.path)),
        )
        for is_on in (False, True)
        for small in [settings(GOLDEN.path, scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8))]
    )
    found = []
    for prepared in (plain, returning):
        program = next(each for each in prepared.programs if each.kind == "mixed")
        lowered = lower(prepared.skeleton, prepared.sharding, program, prepared.limits.shapes, prepared.task)
        found.append([(each.shape, str(each.dtype)) for each in lowered.out_info[1]])
    assert len(found[0]) == 2
    assert found[1] == [found[0][0], ((1, 8, *INFO.shape), "uint8"), found[0][1]]
    assert plain.key_parts()["task"] != returning.key_parts()["task"]
