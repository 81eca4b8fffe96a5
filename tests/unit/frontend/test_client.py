"""The client of the engine: one terminal output per request, whatever happens to the engine."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConnectionConfig
from jaxserve.errors import InvalidRequestError, RateLimitError, StartupError, UnavailableError
from jaxserve.frontend.engine_client import watch as watch_module
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.engine_client.commands import MAX_COMMANDS
from jaxserve.frontend.engine_client.connection import MAX_SENT_IDS
from jaxserve.frontend.engine_client.output_stream import OutputStream
from jaxserve.frontend.engine_client.watch import STALL_LOOKS, EngineWatch
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.http.listener import NUM_SURPLUS
from jaxserve.ipc.messages import (
    ENGINE_STOPPED,
    AdaptersChanged,
    AddRequest,
    CommandDone,
    ErrorInfo,
    FromEngine,
    Heartbeat,
    LoadedAdapter,
    Ready,
    RequestOutput,
    StartupFailed,
    StartupProgress,
    StepOutputs,
    ToEngine,
)
from jaxserve.ipc.stats import EngineStats
from jaxserve.metrics import Metrics
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.tokenizer.tokenizer import Tokenizer
from jaxserve.types import RequestId
from tests.loop_clock import NUM_TURNS, LoopClock
from tests.unit.running_api import ALONE, MODEL_INFO, Api, ScriptedEngine, running_api

STALL_TIMEOUT_S = 4.0
LOOK_S = 2 * STALL_TIMEOUT_S / STALL_LOOKS
HEADER_TIMEOUT_S = 20.0


def add(name: str) -> AddRequest:
    return AddRequest(RequestId(name), [1], EngineSamplingParams())


async def drained(generation: OutputStream) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []

    def keep(more: list[RequestOutput]) -> bool:
        outputs.extend(more)
        return True

    while not generation.is_finished:
        await generation.consume(keep)
    return outputs


async def test_outputs_reach_their_stream_in_order(api: Api) -> None:
    with api.client.submit([add("a"), add("b")]) as mine, api.client.submit([add("c")]) as other:
        requests = {request.request_id: request for request in [await api.engine.added() for _ in range(3)]}
        api.engine.output(requests[RequestId("a")], [1])
        api.engine.output(requests[RequestId("c")], [3], finish_reason="stop")
        api.engine.output(requests[RequestId("b")], [2], finish_reason="stop")
        api.engine.output(requests[RequestId("a")], [4], finish_reason="length")
        assert [(o.request_id, o.token_ids) for o in await drained(mine)] == [("a", [1]), ("b", [2]), ("a", [4])]
        assert [o.token_ids for o in await drained(other)] == [[3]]
    assert api.engine.aborted == []


async def test_leaving_a_generation_aborts_only_what_still_runs(api: Api) -> None:
    with api.client.submit([add("a"), add("b")]) as generation:
        requests = [await api.engine.added() for _ in range(2)]
        api.engine.output(requests[0], [1], finish_reason="stop")
        await generation.consume(lambda more: False)
    assert await api.engine.was_aborted() == "b"
    api.engine.output(requests[1], [], finish_reason="abort")
    with api.client.submit([add("c")]) as generation:
        api.engine.output(await api.engine.added(), [1], finish_reason="stop")
        assert [o.request_id for o in await drained(generation)] == ["c"]
    assert api.engine.aborted == ["b"]


async def test_dead_engine_ends_every_request_once_and_takes_no_more(api: Api) -> None:
    with api.client.submit([add("a"), add("b")]) as generation:
        api.client.fail("the engine process was ended by signal 9")
        api.client.fail("a second reason")
        outputs = await drained(generation)
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error")]
    assert all(o.error is not None and o.error.error_class == "UnavailableError" for o in outputs)
    assert api.client.ailment() == "the engine process was ended by signal 9"
    with pytest.raises(UnavailableError):
        api.client.require_ready()
    with pytest.raises(UnavailableError), api.client.submit([add("c")]):
        pass
    for path, status in (("/live", 503), ("/health", 503), ("/ready", 503)):
        async with api.http.get(path) as response:
            assert response.status == status
    assert api.engine.aborted == []


async def test_dead_engine_ends_a_command(api: Api) -> None:
    waiting = asyncio.create_task(api.client.command("reset_prefix_cache"))
    left = asyncio.create_task(api.client.command("start_profile"))
    await api.engine.is_heard()
    left.cancel()
    api.client.fail("the engine process ended with exit code 1")
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        await api.client.command("reset_prefix_cache")


async def test_a_command_ends_if_its_engine_dies_before_it_is_sent(api: Api) -> None:
    command = asyncio.create_task(api.client.command("reset_prefix_cache"))
    await asyncio.sleep(0)
    api.connection.end()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(command, 60)


async def test_commands_that_a_frozen_engine_leaves_unanswered_are_bounded(api: Api) -> None:
    callers = [asyncio.create_task(api.client.command("reset_prefix_cache")) for _ in range(MAX_COMMANDS)]
    await api.engine.is_heard()
    for caller in callers:
        caller.cancel()  # what they sent still lies in the socket
    await asyncio.wait(callers)
    with pytest.raises(RateLimitError, match="64 commands"):
        await api.client.command("reset_prefix_cache")


async def test_a_command_ends_with_its_own_answer(api: Api) -> None:
    commands = [asyncio.create_task(api.client.command(name)) for name in ("start_profile", "stop_profile")]
    await api.engine.is_heard()
    commands[1].cancel()
    for command_id in (1, 0, 7):  # a cancelled one, and one that was never sent
        api.engine.say(CommandDone(command_id, ErrorInfo("InvalidRequestError", f"no, {command_id}")))
    with pytest.raises(InvalidRequestError, match="no, 0"):
        await commands[0]


async def test_each_of_many_long_prompts_is_sent_in_its_own_turn(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    sent_in: list[int] = []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def note_turn(message: ToEngine) -> None:
        sent_in.append(turns)
        await send(message)

    send = api.engine.send
    monkeypatch.setattr(api.engine, "send", note_turn)
    long, short, half = [1] * (MAX_SENT_IDS + 1), [1], [1] * (MAX_SENT_IDS // 2)
    counting = asyncio.create_task(count_turns())
    for prompts, num_turns in (([short] * 4, 1), ([long] * 4, 4), ([half, half, half, short], 2), ([half, long], 2)):
        sent_in.clear()
        requests = [
            AddRequest(RequestId(f"{num_turns}-{len(prompts)}-{i}"), prompt, EngineSamplingParams())
            for i, prompt in enumerate(prompts)
        ]
        with api.client.submit(requests):
            assert [(await api.engine.added()).request_id for _ in requests] == [each.request_id for each in requests]
        assert len(set(sent_in[: len(prompts)])) == num_turns, sent_in
        for _ in requests:
            await api.engine.was_aborted()
    counting.cancel()


async def test_broken_connection_counts_as_a_dead_engine() -> None:
    class Broken:
        async def send(self, message: ToEngine) -> None:
            return None

        async def receive(self) -> FromEngine:
            raise OSError("gone")

    client = EngineClient(Metrics("tiny"), max_queued_requests=1, peers=ALONE, stall_timeout_s=60.0)
    async with client.connected(Broken()) as connection:
        await connection.wait_over()
        assert client.ailment() == connection.reason == "the connection to the engine broke"
        with pytest.raises(StartupError):
            await connection.wait_started()
    assert client.ailment() is None, "there may be a next one"


async def test_requests_without_output_are_submitted_to_the_next_engine_once(api: Api) -> None:
    with (
        api.client.submit([add("begun")]) as begun,
        api.client.submit([add("a"), add("b")]) as waits,
        api.client.submit([add("left")]) as left,
    ):
        api.engine.output(await api.engine.added(), [1])
        await api.engine.is_heard()
        await api.exit_stack.aclose()
        assert [(o.finish_reason, o.token_ids) for o in await drained(begun)] == [(None, [1]), ("error", [])]
        left.stop(RequestId("left"))
        engine = ScriptedEngine()
        async with api.client.connected(engine) as connection:
            engine.say(Ready(MODEL_INFO))
            await connection.wait_started()
            again = [await engine.added() for _ in range(2)]
            assert again == [add("a"), add("b")]
            engine.output(again[0], [7], finish_reason="stop")
            await asyncio.sleep(0)
            stopped = ErrorInfo("InternalError", "broken", code=ENGINE_STOPPED)
            engine.say(StepOutputs([RequestOutput(RequestId("b"), [], finish_reason="error", error=stopped)]))
            ends = {o.request_id: o.finish_reason for o in await drained(waits)}
            assert ends == {"a": "stop", "b": "error"}, "once only"
            assert engine.aborted == []
        assert api.metrics.value("request_retries") == 3


async def test_an_engine_that_was_given_up_ends_no_request_of_the_next_one(api: Api) -> None:
    """It was silent for too long, and revives before its process is killed."""
    with api.client.submit([add("a")]) as generation:
        request = await api.engine.added()
        api.connection.end("silent")
        api.engine.output(request, [1], finish_reason="stop")
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
        await api.exit_stack.aclose()
        engine = ScriptedEngine()
        async with api.client.connected(engine):
            engine.say(Ready(MODEL_INFO))
            engine.output(await engine.added(), [7], finish_reason="stop")
            assert [(o.request_id, o.token_ids) for o in await drained(generation)] == [("a", [7])]


async def test_the_last_words_of_an_engine_that_breaks_do_not_end_what_it_never_began(api: Api) -> None:
    with api.client.submit([add("a")]) as generation:
        request = await api.engine.added()
        stopped = ErrorInfo("InternalError", "broken", code=ENGINE_STOPPED)
        api.engine.say(StepOutputs([RequestOutput(request.request_id, [], finish_reason="error", error=stopped)]))
        await api.engine.is_heard()
        with pytest.raises(UnavailableError, match="loading"), api.client.submit([add("late")]):
            pass
        api.client.fail("no engine will follow")
        (end,) = await drained(generation)
        assert end.error is not None and end.error.message == "The engine stopped while the request was running."


async def test_next_engine_hears_nothing_that_was_meant_for_the_last(api: Api) -> None:
    with api.client.submit([add("a")]) as generation:
        api.engine.output(await api.engine.added(), [9])
        api.engine.say(Heartbeat(EngineStats(1, 2, kv_cache_usage_perc=0.5, compilations={"warmup": 7})))
        await api.engine.is_heard()
        await api.exit_stack.aclose()
        for path, status in (("/live", 200), ("/health", 503), ("/ready", 503)):
            async with api.http.get(path) as response:
                assert response.status == status
        with pytest.raises(UnavailableError, match="loading"), api.client.submit([add("b")]):
            pass
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert api.metrics.value(name) == 0
        engine = ScriptedEngine()
        async with api.client.connected(engine) as connection:
            with pytest.raises(UnavailableError, match="loading"), api.client.submit([add("b")]):
                pass
            engine.say(Ready(MODEL_INFO))
            await connection.wait_started()
            engine.say(Heartbeat(EngineStats(compilations={"warmup": 5})))
            with api.client.submit([add("c")]) as other:
                request = await engine.added()
                assert request.request_id == "c"
                engine.output(request, [3], finish_reason="stop")
                assert [o.token_ids for o in await drained(other)] == [[3]]
            outputs = await drained(generation)
            assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", None), ("a", "error")]
            generation.stop(RequestId("a"))
            with api.client.submit([add("d")]):
                await engine.added()
            assert await engine.was_aborted() == "d"
    assert (engine.said_hello, engine.aborted, api.engine.aborted) == (True, ["d"], [])
    assert api.metrics.value("compilations", phase="warmup") == 12


async def test_failed_start_is_reported_in_the_engines_words(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, is_ready=False) as api:
        api.engine.say(StartupProgress("load", 3, 9))
        api.engine.say(StartupFailed("model.safetensors: truncated"))
        with pytest.raises(StartupError, match=r"^model.safetensors: truncated$"):
            await api.connection.wait_started()
        assert api.engine.said_hello
        assert api.engine.marks.get_nowait() == StartupProgress("load", 3, 9)


async def test_silence_with_work_is_sick_and_without_work_is_not(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: now)
    now += 500
    assert api.client.ailment() is None
    with api.client.submit([add("a")]) as generation:
        request = await api.engine.added()
        now += 59
        assert api.client.ailment() is None
        now += 2
        assert "silent" in (api.client.ailment() or "")
        for path, status in (("/live", 200), ("/health", 503), ("/ready", 503)):
            async with api.http.get(path) as response:
                assert response.status == status, "it is mended here: a probe that restarts the pod would come first"
        api.engine.output(request, [1], finish_reason="stop")
        await drained(generation)
    assert api.client.ailment() is None


async def test_engine_that_stays_silent_counts_as_dead() -> None:
    engine, clock = ScriptedEngine(), LoopClock()
    client = EngineClient(Metrics("tiny"), max_queued_requests=1, peers=ALONE, stall_timeout_s=STALL_TIMEOUT_S)
    async with client.connected(engine) as connection:
        stalled = asyncio.create_task(connection.wait_stalled())
        await clock.advance(0)
        for _ in range(3 * STALL_LOOKS):
            engine.say(Heartbeat())
            await clock.advance(LOOK_S)
        assert not stalled.done()
        for _ in range(STALL_LOOKS):
            await clock.advance(LOOK_S)
        await stalled
        assert connection.reason == "the engine has been silent for more than 8 s"


async def test_time_in_which_this_process_was_stopped_does_not_count_as_silence() -> None:
    engine, clock = ScriptedEngine(), LoopClock()
    client = EngineClient(Metrics("tiny"), max_queued_requests=1, peers=ALONE, stall_timeout_s=STALL_TIMEOUT_S)
    async with client.connected(engine) as connection:
        stalled = asyncio.create_task(connection.wait_stalled())
        await clock.advance(0)
        await clock.advance(100 * STALL_TIMEOUT_S)
        assert not stalled.done()
        stalled.cancel()


async def test_a_start_may_take_any_time_while_it_makes_progress() -> None:
    watch, clock = EngineWatch(STALL_TIMEOUT_S, startup_timeout_s=8.0), LoopClock()
    stuck = asyncio.create_task(watch.wait_stuck())
    await clock.advance(0)
    for done in range(5 * STALL_LOOKS):
        watch.note(StartupProgress("load", done, 99))
        await clock.advance(8.0 / STALL_LOOKS)
    assert not stuck.done()
    for _ in range(STALL_LOOKS + 1):
        watch.note(StartupProgress("load", 5 * STALL_LOOKS - 1, 99))  # a sign of exit_stack, and no progress
        await clock.advance(8.0 / STALL_LOOKS)
    assert await stuck == (
        "the start of the engine made no progress for 8 s after 39 of 99 of phase 'load' (--startup-timeout)"
    )


async def test_a_start_without_a_limit_is_never_stuck() -> None:
    clock, stuck = LoopClock(), asyncio.create_task(EngineWatch(0.0, 0.0).wait_stuck())
    for _ in range(3 * STALL_LOOKS):
        await clock.advance(1e6)
    assert not stuck.done()
    stuck.cancel()


async def test_admission_holds_room_until_the_request_is_over(api: Api) -> None:
    with api.client.admission.places(5), api.client.admission.places(3):
        assert api.client.admission.num_sequences == 8
        with pytest.raises(RateLimitError), api.client.admission.places(1):
            pass
    assert api.client.admission.num_sequences == 0
    await api.client.admission.wait_idle()


async def test_one_of_several_processes_may_take_all_places() -> None:
    """Connections are spread by a hash, so one process may get all of them; the engine refuses what is too much."""
    engine, peers = ScriptedEngine(), PeerProcesses(0, 4, Path())
    client = EngineClient(Metrics("tiny"), max_queued_requests=5, peers=peers, stall_timeout_s=60.0)
    async with client.connected(engine):
        engine.say(Ready(MODEL_INFO))
        await client.wait_started()
        with (
            client.admission.places(MODEL_INFO.max_num_seqs + 5),
            pytest.raises(RateLimitError),
            client.admission.places(1),
        ):
            pass


async def test_prompts_wait_up_to_a_number_of_tokens(tokenizer: Tokenizer) -> None:
    three, five = {"prompt": [5, 6, 7], "n": 2}, {"prompt": [5, 6, 7, 8, 9]}
    async with running_api(tokenizer, max_queued_tokens=4) as api:
        first = asyncio.create_task(api.post("/v1/completions", five))  # alone, it is more than may wait
        request = await api.engine.added()
        status, body = await api.post("/v1/completions", {"prompt": [5]})
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (
            "prompts of 5 tokens wait, yours has 1, and at most 4 may (--max-queued-tokens)" in body["error"]["message"]
        )
        assert api.metrics.value("admission_rejections", reason="queued_tokens") == 1
        api.engine.output(request, [5])
        await api.engine.is_heard()
        second = asyncio.create_task(api.post("/v1/completions", three))
        choices = [await api.engine.added(), await api.engine.added()]  # one prompt
        third = asyncio.create_task(api.post("/v1/completions", {"prompt": [5]}))
        other = await api.engine.added()
        assert (await api.post("/v1/completions", {"prompt": [5]}))[0] == 429
        for each in (request, *choices, other):
            api.engine.output(each, [5], finish_reason="length")
        assert [(await reply)[0] for reply in (first, second, third)] == [200, 200, 200]


async def test_a_prompt_that_no_client_waits_for_makes_room(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, max_queued_tokens=4) as api:
        leaving = asyncio.create_task(api.post("/v1/completions", {"prompt": [5, 6, 7, 8]}))
        request = await api.engine.added()
        leaving.cancel()
        assert await api.engine.was_aborted() == request.request_id
        await api.client.admission.wait_idle()
        await api.engine.is_heard()
        staying = asyncio.create_task(api.post("/v1/completions", {"prompt": [5, 6, 7, 8]}))
        api.engine.output(await api.engine.added(), [5], finish_reason="length")
        assert (await staying)[0] == 200


async def test_aborts_that_a_frozen_engine_does_not_answer_are_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients come and go: their prompts lie in the socket until the engine reads them."""
    monkeypatch.setattr("jaxserve.frontend.engine_client.connection.MAX_UNANSWERED", 3)
    async with running_api(tokenizer, max_queued_tokens=100) as api:
        api.engine.is_frozen = True
        left = []
        for _ in range(3):
            leaving = asyncio.create_task(api.post("/v1/completions", {"prompt": [5, 6]}))
            left.append(await api.engine.added())
            leaving.cancel()
            await api.engine.was_aborted()
            await api.client.admission.wait_idle()
        status, body = await api.post("/v1/completions", {"prompt": [5]})
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "has not answered 3 aborted requests" in body["error"]["message"]
        assert api.metrics.value("admission_rejections", reason="unanswered") == 1
        assert api.connection.waiting.num_tokens == 6, "they count as waiting, too"
        for request in left:
            api.engine.output(request, [], finish_reason="abort")
        await api.engine.is_heard()
        assert api.connection.waiting.num_tokens == 0
        staying = asyncio.create_task(api.post("/v1/completions", {"prompt": [5]}))
        api.engine.output(await api.engine.added(), [5], finish_reason="length")
        assert (await staying)[0] == 200


async def test_draining_refuses_new_requests_and_finishes_old_ones(api: Api) -> None:
    reply = asyncio.create_task(api.post("/v1/completions", {"prompt": "x"}))
    request = await api.engine.added()
    api.client.start_draining()
    status, body = await api.post("/v1/completions", {"prompt": "x"})
    assert (status, body["error"]["type"]) == (503, "service_unavailable")
    async with api.http.get("/ready") as response:
        assert (response.status, await response.json()) == (503, {"status": "draining"})
    async with api.http.get("/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "draining"})
    async with api.http.get("/live") as response:
        assert response.status == 200
        assert response.headers["Connection"] == "close", "the next request is to go to another server"
    api.engine.output(request, [5], finish_reason="length")
    assert (await reply)[0] == 200
    await api.client.admission.wait_idle()


async def test_abort_all_ends_requests_with_an_error(api: Api) -> None:
    reply = asyncio.create_task(api.post("/v1/completions", {"prompt": "x"}))
    request = await api.engine.added()
    api.client.engines.abort_all("The server is shutting down.")
    status, body = await reply
    assert (status, body["error"]["message"]) == (503, "The server is shutting down.")
    assert await api.engine.was_aborted() == request.request_id


async def test_stats_become_metrics(api: Api) -> None:
    stats = EngineStats(
        num_requests_running=2,
        num_requests_waiting=1,
        num_requests_waiting_by_reason={"capacity": 1},
        kv_cache_usage_perc=0.5,
        num_preemptions=1,
        prompt_tokens=10,
        generation_tokens=4,
        prefix_cache_queries=10,
        prefix_cache_hits=3,
        bucket_steps={"decode/8": 3},
        padding_tokens={"decode": 5},
        iteration_tokens_total=[3, 4],
        device_step_seconds=[0.1],
        host_gap_seconds=[0.01, 0.02],
        compilations={"warmup": 7, "serving": 0},
    )
    api.engine.say(Heartbeat(stats))
    api.engine.say(StepOutputs([], stats))
    await api.engine.is_heard()
    value = api.metrics.value
    assert (value("num_requests_running"), value("num_requests_waiting"), value("kv_cache_usage_perc")) == (2, 1, 0.5)
    assert value("num_requests_waiting_by_reason", reason="capacity") == 1
    assert (value("prompt_tokens"), value("generation_tokens"), value("num_preemptions")) == (20, 8, 2)
    assert (value("prefix_cache_queries"), value("prefix_cache_hits")) == (20, 6)
    assert value("bucket_steps", kind="decode", bucket="8") == 6
    assert value("padding_tokens", kind="decode") == 10
    assert (value("iteration_tokens_total"), value("device_step_seconds"), value("host_gap_seconds")) == (4, 2, 4)
    assert (value("compilations", phase="warmup"), value("compilations", phase="serving")) == (7, 0)


async def test_adapters_of_an_engine_are_published(api: Api) -> None:
    api.engine.say(AdaptersChanged([LoadedAdapter("sql", "adapters/sql", 1)]))
    await api.engine.is_heard()
    [(_, labels, _)] = [
        sample
        for family in api.metrics.snapshot()
        if family.name == "jaxserve:lora_requests_info"
        for sample in family.samples
    ]
    assert labels["running_lora_adapters"] == "sql"


async def test_second_ready_changes_nothing(api: Api) -> None:
    api.engine.say(Ready(MODEL_INFO))
    await api.engine.is_heard()
    assert api.client.is_ready


async def test_connection_beyond_the_limit_hears_of_it_and_carries_health_checks(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api(tokenizer, max_connections=1) as api:
        async with api.http.get("/health") as response:
            assert response.status == 200
        for path, status, sign in (
            ("/v1/models", b" 503 ", b"1 connections are open and no more may be (--max-connections)"),
            ("/health", b" 200 ", b"\r\n\r\n{"),
            ("/metrics", b" 200 ", b'jaxserve:surplus_connections_total{engine="0",model_name="tiny"} 3.0'),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            reply = await asyncio.wait_for(reader.read(), 60)  # to the end: it is closed after the reply
            assert status in reply.splitlines()[0]
            assert sign in reply
            assert b"\r\nConnection: close\r\n" in reply
            writer.close()
        assert b"Retry-After" not in reply
        assert api.metrics.value("surplus_connections") == 3
    assert caplog.text.count("more are refused (--max-connections)") == 1


async def test_connection_far_beyond_the_limit_is_closed_at_once(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, max_connections=1) as api:
        opened = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(1 + NUM_SURPLUS + 1)]
        assert await asyncio.wait_for(opened[-1][0].read(), 60) == b""
        assert not any(reader.at_eof() for reader, _ in opened[:-1])
        for _, writer in opened:
            writer.close()


async def test_connection_that_sends_no_headers_is_closed(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, connection=ConnectionConfig(header_timeout=HEADER_TIMEOUT_S)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: ")
        assert (await api.post("/tokenize", {"prompt": "x"}))[0] == 200  # by now the server has both connections
        await LoopClock().advance(HEADER_TIMEOUT_S)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_silence_is_allowed_once_a_request_was_made(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, connection=ConnectionConfig(header_timeout=HEADER_TIMEOUT_S)) as api:
        reply: Any = asyncio.create_task(api.post("/v1/completions", {"prompt": "x"}))
        request = await api.engine.added()
        await LoopClock().advance(HEADER_TIMEOUT_S)
        api.engine.output(request, [5], finish_reason="length")
        assert (await reply)[0] == 200


async def test_reader_that_takes_nothing_is_given_up(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, connection=ConnectionConfig(write_timeout=0.05)) as api:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", api.port))
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "logprobs": true, "top_logprobs": 20}'
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        narrow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        request = await api.engine.added()
        api.engine.output(request, [40] * 8000)  # 10 MB: more than the kernel's buffers hold
        assert await api.engine.was_aborted() == request.request_id
        await api.client.admission.wait_idle()
        assert api.metrics.value("client_disconnects") == 1
        narrow.close()
