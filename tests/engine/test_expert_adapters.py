"""Adapters of experts in an engine: the tokens of PEFT, in any batch, and loading while serving."""

from __future__ import annotations

import pytest
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.engine.adapters import AdapterPlaces
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_weight_updates import Operator
from tests.models.goldens import DATA, adapter_goldens

pytestmark = pytest.mark.slow

NAME = "qwen3_moe_tiny"
GOLDENS = adapter_goldens(NAME)
SOURCES = {name: str(GOLDENS[name].path) for name in ("experts", "down")}
NUMBERS = {"base": 0, "experts": 1, "down": 2}


def check(engine: ModelEngine, numbers: dict[str, int]) -> None:
    """Generate with all adapters in one batch, and compare with PEFT's tokens."""
    messages = [
        request(name, GOLDENS[name].prompt_ids, adapter=number, max_tokens=32) for name, number in numbers.items()
    ]
    for name, result in engine.run(messages).items():
        assert result.token_ids == GOLDENS[name].output_ids.tolist()


@pytest.mark.parametrize("kernels", [pytest.param("xla", marks=pytest.mark.exhaustive), "native"])
def test_requests_of_all_adapters_share_steps(kernels: str) -> None:
    if kernels == "native":
        try:
            build()
        except BuildError as error:
            pytest.skip(f"native kernels: {error}")
    modules = ",".join(f"{name}={source}" for name, source in SOURCES.items())
    engine = ModelEngine(DATA / NAME, cpu_kernels=kernels, lora_modules=modules)  # type: ignore[arg-type]
    check(engine, NUMBERS)
    engine.close()


def test_adapters_of_experts_are_loaded_and_unloaded_without_compiling() -> None:
    engine = ModelEngine(DATA / NAME, max_loras=2)
    places = AdapterPlaces({}, 2)
    operator = Operator(engine, places)
    check(engine, {"base": 0})
    for name in SOURCES:
        operator.finish("load_adapter", adapter=name, source=SOURCES[name])
    check(engine, {"base": 0} | {adapter.name: adapter.number for adapter in places.loaded})
    operator.finish("unload_adapter", adapter="experts")
    operator.finish("load_adapter", adapter="experts", source=SOURCES["experts"])
    check(engine, {adapter.name: adapter.number for adapter in places.loaded})
    assert engine.executor.compilations()["serving"] == 0
    engine.close()
