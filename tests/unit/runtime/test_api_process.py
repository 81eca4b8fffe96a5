"""The names under which a server answers, and the end of its traces."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import cast

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.http.tracing import Tracing
from jaxserve.runtime.api_process import TRACES_FLUSH_S, _closing
from jaxserve.runtime.models.model_runtime import model_names
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
