"""A real run of a trace: `jaxserve serve --replicas` in real processes, with the fake executor, over HTTP.

The same sessions as in a simulation, at the same times. Of a token only its id differs: the server's vocabulary is small,
and the fake model replies with one token only, so that the next prompt of a session is known.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp
import numpy as np

from benchmarks.servers import TOKENIZER, served_fake
from benchmarks.simulator.cell import CellSettings
from benchmarks.simulator.device import REPLY_TOKEN
from benchmarks.simulator.records import Records, RequestColumns, frozen
from benchmarks.simulator.step_times import EngineShape
from benchmarks.simulator.trace import Conversation, Session
from jaxserve.config import CacheConfig, Config, ModelConfig, ParallelConfig
from jaxserve.executor.fake.executor import powers_of_two
from jaxserve.ipc.engine_spec import FakeOptions, Script

_VOCAB_SIZE, _FIRST, _CUE, _REPLY = 384, 100, 61, 60
"""Prompts consist of tokens from _FIRST on and end with the cue, after which the fake model repeats one reply token."""
_LONGEST_REPLY = 1024
_NUM_LONE = 20


def fake_shape(
    *, max_num_seqs: int, max_num_batched_tokens: int, num_kv_blocks: int, block_size: int, max_model_len: int
) -> EngineShape:
    """Return the sizes of an engine on the fake executor."""
    return EngineShape(
        decode_buckets=powers_of_two(max_num_seqs),
        mixed_buckets=powers_of_two(max_num_batched_tokens),
        max_num_seqs=max_num_seqs,
        max_decode_steps=1,
        num_kv_blocks=num_kv_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )


@dataclass(frozen=True, slots=True)
class RealRun:
    """Records of a real run; the replica of a request is not known."""

    records: Records
    lone_ttft_s: float
    """Median time to first token of short requests, one at a time: one step, and everything that is not simulated."""


def run_real(
    settings: CellSettings, sessions: Sequence[Session], step_s: float, *, is_in_turn: bool = False
) -> RealRun:
    """Serve `sessions` with real processes.

    settings.table must be one of the fake executor, of `step_s` seconds a step. is_in_turn: one request after the
    other, without waiting, so that no time decides anything.
    """
    engine = settings.table.engine
    if settings.policy == "text-prefix":
        raise ValueError("jaxserve serve has no policy text-prefix")
    fake = FakeOptions(
        vocab_size=_VOCAB_SIZE,
        num_blocks=engine.num_kv_blocks,
        max_model_len=engine.max_model_len,
        eos_token_ids=(),
        device_seconds=step_s,
        script=Script(cue=_CUE, token_ids=(_REPLY,) * _LONGEST_REPLY),
    )
    config = Config(
        model=ModelConfig(model=str(TOKENIZER), served_model_name="fake"),
        cache=CacheConfig(block_size=engine.block_size),
        scheduler=replace(
            settings.scheduler,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=max(engine.mixed_buckets),
        ),
        parallel=ParallelConfig(replicas=settings.num_replicas, routing=settings.policy),
    )
    with served_fake(config, fake) as (port, _):
        client = _Client(f"http://127.0.0.1:{port}", engine.block_size)
        return asyncio.run(client.run(sessions, settings.num_replicas, is_in_turn=is_in_turn))


class _Client:
    """Sends the turns of sessions at their times."""

    def __init__(self, url: str, block_size: int) -> None:
        self._url = url
        self._block_size = block_size
        self._columns = RequestColumns()
        self._start_s = 0.0

    async def run(self, sessions: Sequence[Session], num_replicas: int, *, is_in_turn: bool) -> RealRun:
        started_s = time.process_time()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await self._warm_up(http, num_replicas)
            lone_ttft_s = await self._lone_ttft_s(http)
            self._start_s = time.perf_counter()
            if is_in_turn:
                for session in sessions:
                    await self._converse(http, session)
            else:
                async with asyncio.TaskGroup() as group:
                    for session in sessions:
                        group.create_task(self._converse_in_time(http, session))
        records = frozen(
            self._columns,
            busy_s=np.zeros(num_replicas),
            num_steps=0,
            num_calls=0,
            num_preemptions=0,
            imbalances=np.zeros(0),
            routing_s=0.0,
            cpu_s=time.process_time() - started_s,
        )
        return RealRun(records, lone_ttft_s)

    async def _warm_up(self, http: aiohttp.ClientSession, num_replicas: int) -> None:
        """Wait until every replica serves: each gets requests only once it is ready."""
        ready: set[str] = set()
        while len(ready) < num_replicas:
            await asyncio.gather(*(self._send(http, [_FIRST + i, _CUE], 1) for i in range(4 * num_replicas)))
            async with http.get(f"{self._url}/metrics") as response:
                lines = (await response.text()).splitlines()
            steps = [line for line in lines if line.startswith("jaxserve:program_calls_total{")]
            ready = {line.rpartition(" ")[0] for line in steps if float(line.rpartition(" ")[2]) > 0}

    async def _lone_ttft_s(self, http: aiohttp.ClientSession) -> float:
        times_s = []
        for number in range(_NUM_LONE):
            started_s = time.perf_counter()
            first_s, *_ = await self._send(http, [_FIRST + number, _CUE], 1)
            times_s.append(first_s - started_s)
        return statistics.median(times_s)

    async def _converse_in_time(self, http: aiohttp.ClientSession, session: Session) -> None:
        await asyncio.sleep(max(0.0, self._start_s + session.arrival_s - time.perf_counter()))
        await self._converse(http, session, waits=True)

    async def _converse(self, http: aiohttp.ClientSession, session: Session, *, waits: bool = False) -> None:
        conversation = Conversation(session, self._block_size)
        while (turn := conversation.next_turn) is not None:
            if waits:
                await asyncio.sleep(turn.wait_s)
            tokens, num_output_tokens = conversation.take_prompt()
            number = self._columns.add(time.perf_counter() - self._start_s, len(tokens), 0)
            first_s, end_s, num_cached, num_output = await self._send(http, served_tokens(tokens), num_output_tokens)
            self._columns.first_s[number] = first_s - self._start_s
            self._columns.end_s[number] = end_s - self._start_s
            self._columns.num_cached_tokens[number] = num_cached
            self._columns.num_output_tokens[number] = num_output

    async def _send(
        self, http: aiohttp.ClientSession, prompt: list[int], max_tokens: int
    ) -> tuple[float, float, int, int]:
        """Return the times of the first token and of the end, cached prompt tokens, and output tokens."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s, usage = 0.0, {}
        async with http.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                first_s = first_s or time.perf_counter()
                if b'"usage":{' in line:
                    usage = json.loads(line[6:])["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return first_s, time.perf_counter(), details.get("cached_tokens", 0), usage["completion_tokens"]


def served_tokens(tokens: np.ndarray) -> list[int]:
    """Return the prompt in the server's vocabulary: equal prefixes stay equal, and the last token is the cue."""
    found = np.where(tokens == REPLY_TOKEN, _REPLY, _FIRST + tokens)
    is_last = np.append(tokens[1:] == REPLY_TOKEN, True) & (tokens != REPLY_TOKEN)
    found[is_last] = _CUE
    return [int(token) for token in found]
