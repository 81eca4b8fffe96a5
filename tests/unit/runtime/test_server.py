"""The start of a server and what ends meanwhile."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import StartupError
from jaxserve.ipc.engine_spec import FakeOptions
from jaxserve.ipc.messages import EmbeddingInfo
from jaxserve.runtime import server
from jaxserve.runtime.api_worker import ApiWorker
from jaxserve.runtime.api_workers import ApiWorkerSpec
from jaxserve.runtime.replicas import NextEngine
from tests.unit.running_api import MODEL_INFO


async def test_api_processes_connect_to_the_engine_that_replaced_one_before_they_were_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A replica that has been ready is restarted while the server still loads its tokenizer."""
    switched = threading.Event()

    class Replicas:
        def __init__(self, model: Any, spec: Any, process: Any, on_next: NextEngine, devices: Any) -> None:
            self.on_next = on_next

    class Engines:
        def __init__(self, models: Any, replicas: list[Replicas]) -> None:
            self.replicas = replicas

        async def run(self) -> str:
            await self.replicas[0].on_next(0, "ipc:///x.1")
            switched.set()
            return "end"

    specs = []

    async def start(module: str, line: bytes, listeners: object) -> ApiWorker:
        specs.append(msgspec.json.decode(line, type=ApiWorkerSpec))
        raise StartupError("enough")

    config = Config(model=ModelConfig(model="tiny"))
    stubs = {
        "ReplicaSupervisors": Replicas,
        "ModelSupervisors": Engines,
        "EngineSpec": MagicMock(),
        "divide_among_models": lambda configs, environment: [SimpleNamespace(config=config, devices=None)],
        "share_listeners": lambda listeners, count: [[], []],
        "_resolve": lambda config: tmp_path,
        "tokenizer_of": lambda config, path: switched.wait(60),
        "install": lambda *arguments: None,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(server, name, stub)
    monkeypatch.setattr(ApiWorker, "start", start)
    one = server._Server([config], [], "fake", FakeOptions(), None, server.Upgrade(), None)
    one.display = cast(Any, contextlib.nullcontext())
    api = SimpleNamespace(models=[MagicMock(config=config)])
    with pytest.raises(StartupError, match="enough"):
        await one._run_others(cast(Any, api), "ipc:///x")
    assert [spec.engines for spec in specs] == [["ipc:///x.1"]]


def test_the_request_that_a_start_shows_is_one_that_the_model_takes() -> None:
    cross = msgspec.structs.replace(MODEL_INFO, embedding=EmbeddingInfo(1, "cls", normalizes=False, labels=("one",)))
    labels = msgspec.structs.replace(MODEL_INFO, embedding=EmbeddingInfo(2, "cls", normalizes=False, labels=("a", "b")))
    vectors = msgspec.structs.replace(MODEL_INFO, embedding=EmbeddingInfo(8, "cls", normalizes=True))
    assert server.first_request(cross, has_chat=True)[0] == "rerank"
    assert server.first_request(labels, has_chat=True)[0] == "classify"
    assert server.first_request(vectors, has_chat=True)[0] == "embeddings"
    assert server.first_request(MODEL_INFO, has_chat=True)[0] == "chat/completions"
    assert server.first_request(MODEL_INFO, has_chat=False)[0] == "completions"
