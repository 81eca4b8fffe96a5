"""Two engine processes: one computes prompts and serves their pages, the other fetches them and continues."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxserve.config import CacheConfig, CompileConfig, Config, ModelConfig, SchedulerConfig, TierConfig
from jaxserve.ipc.address import new_address
from jaxserve.ipc.engine_spec import EngineSpec, FakeOptions
from jaxserve.ipc.messages import (
    AddRequest,
    Command,
    CommandDone,
    CommandName,
    CommandOptions,
    Heartbeat,
    Hello,
    Ready,
    StartupFailed,
    StepOutputs,
)
from jaxserve.ipc.stats import EngineStats
from jaxserve.ipc.transport import ClientSocket
from jaxserve.runtime.engine_process import EngineProcess
from jaxserve.tools.bench.startup import free_port
from tests.engine.model_engine import MODEL_NAME, Generated, request
from tests.engine.rig import add, prompt
from tests.models.goldens import golden_checkpoint
from tests.processes import freeze
from tests.programs import shared_programs

FAKE = FakeOptions(vocab_size=101, num_blocks=64)


class Engine:
    """An engine process and a connection to it."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.connection = ClientSocket(spec.address)
        self.failures: dict[str, int] = {}
        self.fetched: dict[str, int] = {}

    async def start(self) -> Ready | StartupFailed:
        self.process = await EngineProcess.start(self.spec)
        await self.connection.send(Hello())
        while not isinstance(message := await self.connection.receive(), Ready | StartupFailed):
            pass
        return message

    async def run(self, message: AddRequest) -> Generated:
        await self.connection.send(message)
        generated = Generated()
        while generated.finish_reason is None:
            received = await self.connection.receive()
            if isinstance(received, StepOutputs | Heartbeat):
                self._count(received.stats)
            for output in received.outputs if isinstance(received, StepOutputs) else ():
                generated.add(output)
        return generated

    async def command(self, name: CommandName, options: CommandOptions) -> None:
        """Run a command, which must be a success."""
        await self.connection.send(Command(1, name, options))
        while not isinstance(message := await self.connection.receive(), CommandDone):
            pass
        assert message.error is None

    def _count(self, stats: EngineStats | None) -> None:
        if stats is not None:
            for counts, total in ((stats.kv_tier_failures, self.failures), (stats.kv_tier_fetched_pages, self.fetched)):
                for name, number in counts.items():
                    total[name] = total.get(name, 0) + number

    async def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        await self.process.wait()


def make_spec(directory: Path, executor: Literal["local", "fake"], model: str = MODEL_NAME, **tiers: Any) -> EngineSpec:
    path = "/nowhere" if executor == "fake" else str(golden_checkpoint(model).path)
    config = Config(
        model=ModelConfig(model=path, max_model_len=128, dtype="float32", quantization="none"),
        cache=CacheConfig(kv_cache_memory=64 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        compile=CompileConfig(compile_cache=str(shared_programs()), cpu_kernels="xla"),
        tiers=TierConfig(kv_fetch="always", **tiers),
    )
    return EngineSpec(config=config, model_path=path, address=new_address(str(directory)), executor=executor, fake=FAKE)


@asynccontextmanager
async def engines(*specs: EngineSpec) -> AsyncIterator[list[Engine]]:
    async with AsyncExitStack() as stack:
        started = []
        for spec in specs:
            engine = Engine(spec)
            stack.push_async_callback(engine.stop)
            assert isinstance(await engine.start(), Ready)
            started.append(engine)
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        MODEL_NAME,
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("glm4_moe_lite_tiny", "glm_moe_dsa_tiny", "lfm2_tiny")
        ),
    ],
)
async def test_decode_engine_continues_with_the_tokens_of_one_engine(tmp_path: Path, model: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    tokens = [5 + 3 * i % 200 for i in range(100)]
    async with engines(
        make_spec(tmp_path, "local", model, kv_listen=address, kv_offload_memory=4 << 20),
        make_spec(tmp_path, "local", model, kv_peers=address, kv_fetch_timeout=60.0),
    ) as (prefill, decode):
        await prefill.run(request("prompt", tokens, max_tokens=1))
        reply = await decode.run(request("reply", tokens))
        assert reply.num_cached_tokens == 96
        assert reply.token_ids == (await prefill.run(request("whole", tokens))).token_ids
        assert (decode.fetched, decode.failures) == ({"peer": 6}, {})


async def test_engines_exchange_pages_only_while_they_have_the_same_weights(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    new = CommandOptions(model="step-200")
    async with engines(
        make_spec(tmp_path, "fake", kv_listen=address, kv_offload_memory=4 << 20),
        make_spec(tmp_path, "fake", kv_peers=address, kv_fetch_timeout=60.0),
    ) as (prefill, decode):
        message = add("prompt", prompt(50), max_tokens=5)
        expected = (await prefill.run(message)).token_ids
        await decode.command("update_weights", new)
        computed = await decode.run(message)
        assert (computed.token_ids, computed.num_cached_tokens, decode.fetched) == (expected, 0, {})
        await prefill.command("update_weights", new)
        await prefill.command("sleep", CommandOptions(sleep_level=1))
        await prefill.command("wake_up", CommandOptions())
        await prefill.run(message)
        await decode.command("sleep", CommandOptions(sleep_level=2))
        await decode.command("wake_up", CommandOptions())
        fetched = await decode.run(message)
        assert fetched.token_ids == expected and fetched.num_cached_tokens == 48
        assert decode.fetched == {"peer": 3} and decode.failures == {}


async def test_frozen_and_dead_peers_cost_a_request_its_fetch_only(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with engines(
        make_spec(tmp_path, "fake", kv_listen=address, kv_offload_memory=4 << 20),
        make_spec(tmp_path, "fake", kv_peers=address, kv_fetch_timeout=0.1),
    ) as (prefill, decode):
        messages = [add(f"r{number}", prompt(50, first=3 + number), max_tokens=5) for number in range(3)]
        expected = [(await prefill.run(message)).token_ids for message in messages]
        freeze(prefill.process.pid)
        assert (await decode.run(messages[0])).token_ids == expected[0]
        prefill.process.kill()
        assert [(await decode.run(message)).token_ids for message in messages[1:]] == expected[1:]
        assert not decode.fetched
        await decode.run(add("another turn", prompt(5), max_tokens=5))
        assert decode.failures.keys() <= {"timeout", "peer_timeout", "peer_error"}
        assert decode.failures


async def test_address_in_use_ends_the_start_with_one_line(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    spec = make_spec(tmp_path, "fake", kv_listen=address, kv_offload_memory=4 << 20)
    async with engines(spec):
        second = Engine(make_spec(tmp_path, "fake", kv_listen=address, kv_offload_memory=4 << 20))
        message = await second.start()
        assert message == StartupFailed(f"--kv-listen {address}: Address already in use")
        assert await second.process.wait() == 2
        second.connection.close()
