"""The client of several engines: where requests go, and what becomes of them when one engine dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxserve.errors import RateLimitError, UnavailableError
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.ipc.messages import AddRequest, Heartbeat, PagesChanged, Ready
from jaxserve.ipc.stats import EngineStats
from jaxserve.metrics import Metrics
from jaxserve.routing.page_affinity import PageAffinity
from jaxserve.routing.request import page_hashes
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import RequestId
from tests.unit.frontend.test_client import drained
from tests.unit.running_api import ALONE, MODEL_INFO, ScriptedEngine

PREFIX = list(range(1, 34))
"""Two full pages of 16 tokens."""


def add(name: str, prompt: list[int] | None = None) -> AddRequest:
    return AddRequest(RequestId(name), [7] if prompt is None else prompt, EngineSamplingParams(max_tokens=8))


@dataclass
class Fleet:
    """Ready engines of one client."""

    client: EngineClient
    metrics: Metrics
    engines: list[ScriptedEngine] = field(default_factory=list)
    lives: list[contextlib.AsyncExitStack] = field(default_factory=list)

    async def start(self, replica: int) -> ScriptedEngine:
        """Connect a new engine of this replica."""
        engine, life = ScriptedEngine(), contextlib.AsyncExitStack()
        connection = await life.enter_async_context(self.client.connected(engine, replica))
        engine.say(Ready(MODEL_INFO))
        await connection.wait_started()
        self.engines[replica : replica + 1] = [engine]
        self.lives[replica : replica + 1] = [life]
        return engine

    async def kill(self, replica: int) -> None:
        await self.lives[replica].aclose()


@contextlib.asynccontextmanager
async def fleet(count: int = 2) -> AsyncIterator[Fleet]:
    metrics = Metrics("tiny")
    client = EngineClient(
        metrics,
        max_queued_requests=1,
        max_queued_tokens=100,
        stall_timeout_s=60.0,
        peers=ALONE,
        num_replicas=count,
        policy=PageAffinity(),
    )
    replicas = Fleet(client, metrics)
    for replica in range(count):
        await replicas.start(replica)
    try:
        yield replicas
    finally:
        for life in replicas.lives:
            await life.aclose()


async def test_requests_spread_and_follow_published_pages() -> None:
    async with fleet() as replicas:
        with replicas.client.submit([add("a")]), replicas.client.submit([add("b", [9])]):
            assert (await replicas.engines[0].added()).request_id == "a"
            assert (await replicas.engines[1].added()).request_id == "b"
        engine = replicas.engines[1]
        engine.say(PagesChanged([*page_hashes(np.array(PREFIX, np.int32), 16)]))
        with replicas.client.submit([add("c")]):
            taken = {"c"}
            for other in replicas.engines:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        taken.discard((await other.added()).request_id)
            assert not taken
        with replicas.client.submit([add("d", PREFIX)]):
            assert (await engine.added()).request_id == "d"


async def test_pages_that_were_hashed_before_are_not_hashed_again() -> None:
    pages = page_hashes(np.array(PREFIX, np.int32), 16)
    async with fleet() as replicas:
        replicas.client.engines.note_pages(1, PagesChanged([*pages]))
        prompt = [7] * len(PREFIX)
        with replicas.client.submit([add("a", prompt)], {id(prompt): pages}):
            assert (await replicas.engines[1].added()).request_id == "a"


async def test_choices_of_a_prompt_stay_together_and_prompts_spread() -> None:
    shared = [1, 2, 3]
    requests = [add("a0", shared), add("a1", shared), add("b0", [4, 5, 6])]
    async with fleet() as replicas:
        with replicas.client.submit(requests) as stream:
            first = [await replicas.engines[0].added() for _ in range(2)]
            assert [request.request_id for request in first] == ["a0", "a1"]
            other = await replicas.engines[1].added()
            replicas.engines[0].output(first[0], [1], finish_reason="stop")
            replicas.engines[1].output(other, [2], finish_reason="stop")
            stream.stop(RequestId("a1"))
            assert await replicas.engines[0].was_aborted() == "a1"
            assert {output.request_id for output in await drained(stream)} == {"a0", "b0"}
        assert replicas.engines[1].aborted == []


async def test_request_without_output_moves_to_another_engine_and_one_with_output_fails() -> None:
    async with fleet() as replicas:
        with replicas.client.submit([add("begun")]) as begun:
            request = await replicas.engines[0].added()
            replicas.engines[0].output(request, [1])
            collected = asyncio.create_task(drained(begun))
            with replicas.client.submit([add("other", [9, 9])]), replicas.client.submit([add("waits")]) as waits:
                while "waits" not in {(await replicas.engines[0].added()).request_id}:
                    pass
                await replicas.kill(0)
                assert [(o.finish_reason, o.token_ids) for o in await collected] == [(None, [1]), ("error", [])]
                assert (await replicas.engines[1].added()).request_id == "other"
                retried = await replicas.engines[1].added()
                assert retried == add("waits")
                replicas.engines[1].output(retried, [3], finish_reason="stop")
                assert [output.token_ids for output in await drained(waits)] == [[3]]
        assert replicas.metrics.value("request_retries") == 1


async def test_request_is_retried_once_only() -> None:
    async with fleet(3) as replicas:
        with replicas.client.submit([add("a")]) as stream:
            await replicas.engines[0].added()
            await replicas.kill(0)
            await replicas.engines[1].added()
            await replicas.kill(1)
            assert [output.finish_reason for output in await drained(stream)] == ["error"]
        assert replicas.client.is_ready and replicas.client.ailment() is None


async def test_all_prompts_of_a_request_are_submitted_or_none() -> None:
    """100 prompt tokens may wait on each engine; one prompt alone is never too long."""
    async with fleet() as replicas:
        filler = [add("x", [1] * 80), add("y", [2] * 80)]
        with replicas.client.submit(filler):
            with pytest.raises(RateLimitError), replicas.client.submit([add("a", [3]), add("b", [4] * 90)]):
                pass
            taken = [(await engine.added()).request_id for engine in replicas.engines]
            assert sorted(taken) == ["x", "y"]
            aborted = [engine for engine in replicas.engines if not engine._added.empty()]
            assert [await engine.was_aborted() for engine in aborted] == ["a"]


async def test_requests_go_where_there_is_room() -> None:
    """Each engine may run 3 and queue 1."""
    async with fleet() as replicas:
        assert replicas.client.admission.max_sequences == 8
        replicas.client.engines.note_pages(0, PagesChanged([*page_hashes(np.array(PREFIX[:17], np.int32), 16)]))
        with contextlib.ExitStack() as streams:
            for name in range(6):
                streams.enter_context(replicas.client.submit([add(str(name), [*PREFIX[:17], name])]))
            taken = [(await replicas.engines[0].added()).request_id for _ in range(4)]
            assert taken == ["0", "1", "2", "3"]
            assert [(await replicas.engines[1].added()).request_id for _ in range(2)] == ["4", "5"]


async def test_prompts_beyond_the_queued_tokens_of_one_engine_go_to_the_next() -> None:
    async with fleet() as replicas:
        replicas.client.engines.note_pages(0, PagesChanged([*page_hashes(np.array(PREFIX, np.int32), 16)]))
        with contextlib.ExitStack() as streams:
            for name in range(4):
                streams.enter_context(replicas.client.submit([add(str(name), [*PREFIX, name])]))
            assert [(await replicas.engines[0].added()).request_id for _ in range(2)] == ["0", "1"]
            assert [(await replicas.engines[1].added()).request_id for _ in range(2)] == ["2", "3"]
            assert replicas.metrics.value("admission_rejections", reason="queued_tokens") == 0
            with pytest.raises(RateLimitError), replicas.client.submit([add("4", [*PREFIX, 4])]):
                pass
            assert replicas.metrics.value("admission_rejections", reason="queued_tokens") == 1


async def test_a_new_engine_is_used_and_its_numbers_have_its_label() -> None:
    async with fleet() as replicas:
        await replicas.kill(1)
        assert replicas.client.admission.max_sequences == 4
        engine = await replicas.start(1)
        engine.say(Heartbeat(EngineStats(2, 0, prompt_tokens=5)))
        with replicas.client.submit([add("a")]), replicas.client.submit([add("b", [9])]) as stream:
            request = await engine.added()
            engine.output(request, [1], finish_reason="stop")
            await drained(stream)
        assert replicas.metrics.of_engine(1).value("num_requests_running") == 2
        assert replicas.metrics.of_engine(1).value("prompt_tokens") == 5
        assert replicas.metrics.value("num_requests_running") == 0
        await replicas.kill(1)
        assert replicas.metrics.of_engine(1).value("num_requests_running") == 0
        samples = {name: labels for f in replicas.metrics.snapshot() for name, labels, _ in f.samples}
        assert samples["jaxserve:cache_config_info"]["engine"] == "0", "the ended engine has no settings any more"


async def test_server_ends_with_its_last_replica() -> None:
    async with fleet() as replicas:
        with replicas.client.submit([add("a")]) as stream:
            replicas.client.give_up(1, "gone")
            assert replicas.client.is_ready
            replicas.client.give_up(0, "gone as well")
            assert [output.finish_reason for output in await drained(stream)] == ["error"]
        assert replicas.client.ailment() == "gone as well"
        with pytest.raises(UnavailableError, match="not running"):
            replicas.client.submit([add("b")])
