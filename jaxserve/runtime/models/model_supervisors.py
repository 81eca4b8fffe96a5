"""Runs the engines of all models of one server.

The engines start one after another, so that the memory of each is sized when the earlier ones have taken theirs. From
then on they are independent: one that dies is restarted while the others serve, and when it has died too often the
server goes on without its model, and ends with the last one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from jaxserve.runtime.models.model_runtime import ModelRuntime
from jaxserve.runtime.replicas import ReplicaSupervisors

_log = logging.getLogger(__name__)


class ModelSupervisors:
    """The supervisors of each model's replicas."""

    def __init__(self, models: Sequence[ModelRuntime], supervisors: Sequence[ReplicaSupervisors]) -> None:
        self._pairs = list(zip(models, supervisors, strict=True))
        self._running: dict[asyncio.Task[str], tuple[ModelRuntime, ReplicaSupervisors]] = {}
        self._may_lose_models = False

    def allow_restarts(self) -> None:
        """Restart engines that die from now on. Before this call the end of an engine is a failed start."""
        self._may_lose_models = True
        for _, supervisors in self._pairs:
            supervisors.allow_restarts()

    async def suspend(self) -> None:
        """End all engines, and start none until `resume`. Returns when they have ended."""
        await asyncio.gather(*(supervisors.suspend() for _, supervisors in self._running.values()))

    async def resume(self) -> None:
        """Start the engines after `suspend`, one after another; returns when all are ready or given up."""
        for _, supervisors in list(self._running.values()):
            await supervisors.resume()

    async def run(self) -> str:
        """Keep the engines running; returns why the last one is gone. Raises StartupError if one cannot start."""
        waiting: list[asyncio.Task[Any]] = []
        try:
            for model, supervisors in self._pairs:
                self._running[asyncio.create_task(supervisors.run())] = (model, supervisors)
                waiting.append(asyncio.create_task(model.client.engines.all_started.wait()))
                await asyncio.wait({*self._running, waiting[-1]}, return_when=asyncio.FIRST_COMPLETED)
                if any(task.done() for task in self._running):
                    break
            while True:
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                reasons = [task.result() for task in done]
                lost = [self._running.pop(task)[0].frontend.model_name for task in done]
                if not self._running or not self._may_lose_models:
                    return reasons[-1]
                left = ", ".join(model.frontend.model_name for model, _ in self._running.values())
                _log.error("%s: not served any more; what is left: %s", ", ".join(lost), left)
        finally:
            tasks = [*waiting, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
