"""One model of an API process: its settings, its frontend, and the record of its engine's start."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from jaxserve.config import Config
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.frontend.frontend import Frontend
from jaxserve.http.operations.startup import StartupLog, total_seconds
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.report import PhaseSpan
from jaxserve.ipc.transport import ClientSocket


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """A model that is served; its engines come and go."""

    config: Config
    frontend: Frontend
    startup: StartupLog
    label: str = ""
    """Start of each line of the log about this model: its name and a colon, or nothing if it is the only one."""

    @property
    def client(self) -> EngineClient:
        return self.frontend.client

    @contextlib.asynccontextmanager
    async def connected(self, address: str, replica: int = 0) -> AsyncIterator[EngineConnection]:
        """Connect to the engine that listens at `address`, for the block. After it the next engine's start-up is recorded anew."""
        with contextlib.closing(ClientSocket(address)) as socket:
            async with self.client.connected(socket, replica) as connection:
                yield connection
        if not self.client.engines.connections:
            self.startup.begin_again()

    def record_start(self, model_info: ModelInfo, replica: int = 0) -> list[PhaseSpan]:
        """Set the start-up metrics of a replica; returns all phases of its start."""
        spans = model_info.startup.phases if replica else self.startup.spans(model_info.startup)
        metrics = self.frontend.metrics.of_engine(replica)
        for span in spans:
            metrics.set("startup_phase_seconds", span.seconds, phase=span.phase)
        metrics.set("startup_phase_seconds", total_seconds(spans), phase="total")
        for source, number in Counter(program.source for program in model_info.startup.programs).items():
            metrics.set("startup_programs", number, source=source)
        return spans
