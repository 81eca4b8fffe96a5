"""The names under which a server answers, its end without an engine, and the end of its traces."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.http.tracing import Tracing
from jaxserve.runtime.api_process import ABORT_FLUSH_S, DEATH_GRACE_S, TRACES_FLUSH_S, ApiProcess, _closing
from jaxserve.runtime.models.model_runtime import ModelRuntime, model_names
from tests.loop_clock import LoopClock


def test_names_are_separated_by_commas_and_a_models_path_is_not() -> None:
    model = ModelConfig(model="/models/a,b.gguf")
    assert model_names(Config(model=model)) == ("/models/a,b.gguf",)
    named = Config(model=replace(model, served_model_name=" one, two,one, "))
    assert model_names(named) == ("one", "two")
    with pytest.raises(ConfigError, match="--served-model-name ' , ': expected names"):
        model_names(Config(model=replace(model, served_model_name=" , ")))


class HangingTracing:
    """Its collector takes what is sent, and never answers."""

    def __init__(self) -> None:
        self.was_asked, self.answer = threading.Event(), threading.Event()

    def close(self) -> None:
        self.was_asked.set()
        self.answer.wait()


async def test_a_collector_that_hangs_does_not_hold_up_the_end_of_the_server() -> None:
    tracing, clock = HangingTracing(), LoopClock()

    async def end() -> None:
        async with _closing(cast(Tracing, tracing)):
            pass

    ending = asyncio.create_task(end())
    await asyncio.to_thread(tracing.was_asked.wait)
    assert not ending.done()
    await clock.advance(TRACES_FLUSH_S)
    await asyncio.wait_for(ending, 60)
    tracing.answer.set()


class Failing:
    """A model whose requests have failed, and whose errors are being sent."""

    def __init__(self) -> None:
        self.client = self.admission = self
        self.num_sequences = 1
        self.reason = ""
        self.sent = asyncio.Event()

    def fail(self, reason: str) -> None:
        self.reason = reason

    async def wait_idle(self) -> None:
        await self.sent.wait()
        self.num_sequences = 0


@pytest.mark.parametrize("are_sent", [True, False])
async def test_a_process_without_an_engine_ends_after_its_errors_were_sent(are_sent: bool) -> None:
    model, clock = Failing(), LoopClock()
    api = ApiProcess(
        Config(model=ModelConfig(model="m")), (cast(ModelRuntime, model),), cast(Any, None), cast(Any, None), None
    )
    ending = asyncio.create_task(api.fail("the engine is gone", asyncio.Event()))
    for seconds in (0, DEATH_GRACE_S, 0, 0):  # it waits, its time is over, and it goes on
        await clock.advance(seconds)
    assert model.reason == "the engine is gone" and not ending.done()
    if are_sent:
        model.sent.set()
    else:
        await clock.advance(ABORT_FLUSH_S)
    await asyncio.wait_for(ending, 60)
