"""Adapters of models with recurrent layers: the tokens of PEFT, in any batch, and snapshots that belong to one adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.engine.adapters import AdapterPlaces
from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_weight_updates import Operator
from tests.models.goldens import DATA, adapter_goldens

pytestmark = [pytest.mark.slow]

NUMBERS = {"base": 0, "all": 1, "states": 2}
STEM = np.random.default_rng(3).integers(3, 300, 70)
"""Tokens that requests have in common: their first 64 end at a snapshot."""


def source(model: str, name: str) -> str:
    return str(adapter_goldens(model)[name].path)


@pytest.fixture(
    scope="module",
    params=[("lfm2_tiny", "native"), pytest.param(("qwen3_next_tiny", "xla"), marks=pytest.mark.exhaustive)],
    ids=str,
)
def served(request: Any) -> Iterator[tuple[str, ModelEngine]]:
    name, kernels = request.param
    if kernels == "native":
        try:
            build()
        except BuildError as error:
            pytest.skip(f"native kernels: {error}")
    modules = ",".join(f"{each}={source(name, each)}" for each in ("all", "states"))
    engine = ModelEngine(DATA / name, cpu_kernels=kernels, lora_modules=modules)
    yield name, engine
    engine.close()


def messages(name: str) -> list[AddRequest]:
    """Return a request of each adapter, and of none, for as many tokens as PEFT's reference has."""
    return [
        request(each, golden.prompt_ids, adapter=NUMBERS[each], max_tokens=32)
        for each, golden in adapter_goldens(name).items()
    ]


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 12}, {"overlap": False}], ids=str
)
def test_requests_of_all_adapters_share_steps(served: tuple[str, ModelEngine], options: dict[str, Any]) -> None:
    name, engine = served
    engine.restart(**options)
    results = engine.run(messages(name))
    assert {each: result.token_ids for each, result in results.items()} == {
        each: golden.output_ids.tolist() for each, golden in adapter_goldens(name).items()
    }
    assert bool(engine.num_preemptions) == ("num_blocks" in options)


def test_snapshots_are_those_of_one_adapter(served: tuple[str, ModelEngine]) -> None:
    """A snapshot of another adapter is not used, and one of the same adapter gives the bits of a cold request."""
    engine = served[1]
    scored = [
        request(name, STEM, adapter=number, max_tokens=20, num_top_logprobs=3) for name, number in NUMBERS.items()
    ]
    cold = []
    for message in scored:
        engine.restart(max_burst_ms=0)
        cold.append(engine.run([message])[message.request_id])
    engine.restart(max_burst_ms=0)
    found = []
    for _ in range(3):  # the second time, a snapshot is left where the pages end
        found += [engine.run([message])[message.request_id] for message in scored]
    assert [each.num_cached_tokens for each in found[:3] + found[-3:]] == [0] * 3 + [64] * 3
    assert [each.logprobs for each in found] == 3 * [each.logprobs for each in cold]


@pytest.mark.usefixtures("speculates")
@pytest.mark.exhaustive
def test_drafts_change_no_token_of_an_adapter() -> None:
    """The draft model has no adapters, so its drafts are mostly wrong; states go back, each kind in test_hybrid_speculation.py."""
    name = "lfm2_tiny"
    modules = ",".join(f"{each}={source(name, each)}" for each in ("all", "states"))
    draft_model = DATA / "smollm2_tiny"
    engine = ModelEngine(DATA / name, lora_modules=modules, draft_model=draft_model, num_speculative_tokens=3)
    results = {}
    for together in (messages(name)[:2], messages(name)[1:]):  # more rows do not speculate
        engine.restart(num_speculative_tokens=3)
        results |= engine.run(together)
        assert engine.num_draft_tokens > 0
    engine.close()
    assert {each: result.token_ids for each, result in results.items()} == {
        each: golden.output_ids.tolist() for each, golden in adapter_goldens(name).items()
    }


def test_adapters_are_loaded_and_unloaded_while_states_are_kept() -> None:
    """An adapter that gets the place of another finds neither its pages nor its snapshots, and nothing is compiled."""
    model = "lfm2_tiny"
    goldens = adapter_goldens(model)
    engine = ModelEngine(DATA / model, max_loras=1)
    places = AdapterPlaces({}, 1)
    operator = Operator(engine, places)
    for name in ("all", "states", "all"):
        operator.finish("load_adapter", adapter=name, source=source(model, name))
        (adapter,) = places.loaded
        stem = request("stem", STEM, adapter=adapter.number, max_tokens=4)
        found = [engine.run([stem])["stem"].num_cached_tokens for _ in range(3)]
        assert (found[0], found[2]) == (0, 64)
        results = engine.run(
            [
                request(each, goldens[each].prompt_ids, adapter=number, max_tokens=32)
                for each, number in (("base", 0), (name, adapter.number))
            ]
        )
        for each, result in results.items():
            assert result.token_ids == goldens[each].output_ids.tolist()
        operator.finish("unload_adapter", adapter=name)
    assert engine.executor.compilations()["serving"] == 0
    engine.close()
