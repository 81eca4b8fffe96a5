"""`jaxserve bench offline` on an engine whose steps can be counted by hand."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jaxserve.cli.main import main
from jaxserve.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from jaxserve.engine.process import build_core, build_executor
from jaxserve.ipc.engine_spec import EngineSpec, FakeOptions
from jaxserve.ipc.messages import Grammar
from jaxserve.runtime.spawn import engine_environment
from jaxserve.tools.bench.client import BenchmarkError, RequestRecord
from jaxserve.tools.bench.offline import OfflineLoad, measure_offline
from jaxserve.tools.bench.tokens import Messages
from jaxserve.tools.bench.workload import make_workload
from tests.e2e.http_server import TOKENIZER
from tests.models.goldens import golden_checkpoint
from tests.programs import shared_programs
from tests.unit.tools.bench.fake_server import Words


class FakeTokens:
    name = "fake"

    def __init__(self) -> None:
        self._words = Words()

    async def chat_ids(self, messages: Messages) -> list[int]:
        return self._words.ids(self._words.render([dict(message) for message in messages]))

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._words.ids(text)


def measure(
    *, fail_at_steps: Sequence[int] = (), max_num_seqs: int = 4, **changes: Any
) -> tuple[dict[str, Any], list[RequestRecord]]:
    config = Config(
        model=ModelConfig(model="fake"),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
    )
    fake = FakeOptions(vocab_size=100_000, fail_at_steps=tuple(fail_at_steps))
    spec = EngineSpec(config=config, model_path=str(TOKENIZER), address="", executor="fake", fake=fake)
    core = build_core(spec, build_executor(spec, lambda *progress: None))
    settings: dict[str, Any] = {"form": "chat", "num_prompts": 4, "max_concurrency": 1}
    workload = make_workload("custom", num_prompt_tokens=24, num_output_tokens=5)
    load = OfflineLoad(workload=workload, **(settings | changes))
    records: list[RequestRecord] = []
    run = measure_offline(core, FakeTokens(), load, on_start=lambda: None, on_done=records.append)
    return asyncio.run(run), records


def test_replies_are_held_to_a_grammar_which_may_end_them() -> None:
    figures, records = measure(grammar=Grammar("regex", "[ab]{3}"))
    assert [record.error for record in records] == [None] * 4
    assert all(1 <= record.num_output_tokens <= 4 for record in records), "three letters and an end, or fewer tokens"
    assert figures["short_outputs"] == 4


@pytest.mark.parametrize("form", ['{"xml": 1}', '{"json": {"type": "string", "minLength": 1000000}}'])
def test_a_grammar_that_a_server_would_refuse_is_refused(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(golden_checkpoint("llama3_tiny").path)
    assert main(["bench", "offline", model, "--structured-outputs", form]) == 2
    assert "--structured-outputs" in capsys.readouterr().err


def test_several_engines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "no-such-model", "--replicas", "2"]) == 2
    assert "--replicas 2: `jaxserve bench offline` measures one engine" in capsys.readouterr().err


def test_tokens_steps_and_padding_are_those_computed_by_hand() -> None:
    figures, records = measure()
    assert len(records) == 4
    assert (figures["completed"], figures["failed"], figures["short_outputs"]) == (4, 0, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (4 * 24, 4 * 5)
    assert figures["mismatched_inputs"] == 0
    # One at a time: a prefill of 24 tokens that samples the first token, then four decode steps.
    steps = figures["steps_by_program"]
    assert sum(count for program, count in steps.items() if program.startswith("mixed/")) == 4
    assert steps["decode/1"] == 16
    assert (figures["num_steps"], figures["computed_tokens"]) == (20, 4 * 24 + 16)
    (bucket,) = (int(program.split("/")[1]) for program in steps if program.startswith("mixed/"))
    assert sum(figures["padding_tokens"].values()) == 4 * (bucket - 24)
    assert figures["device_seconds"] == pytest.approx(sum(figures["device_seconds_by_program"].values()))
    assert 0 <= figures["padding_share"] < 1


def test_requests_run_together_and_their_latencies_are_reported() -> None:
    alone, _ = measure()
    together, _ = measure(max_concurrency=None)
    assert together["num_steps"] < alone["num_steps"]
    assert together["max_concurrent_requests"] == 4
    for latency in ("ttft", "tpot", "itl", "e2el"):
        assert together[f"mean_{latency}_ms"] > 0


def test_warmups_are_left_out_of_every_figure() -> None:
    figures, records = measure(num_warmups=2)
    assert len(records) == figures["completed"] == 4
    assert figures["num_steps"] == 20


def test_text_prompts_are_as_long_as_chats() -> None:
    figures, _ = measure(form="text")
    assert figures["total_input_tokens"] == 4 * 24


def test_a_failed_step_fails_its_requests_and_a_broken_engine_ends_the_run() -> None:
    figures, _ = measure(fail_at_steps=[0])
    assert (figures["completed"], figures["error_kinds"]) == (3, {"engine": 1})
    with pytest.raises(BenchmarkError, match="the engine is broken"):
        measure(fail_at_steps=range(8))


def test_the_command_runs_in_the_environment_of_a_servers_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[tuple[list[str], dict[str, str]]] = []

    def execve(program: str, words: list[str], environment: dict[str, str]) -> NoReturn:
        starts.append((words, environment))
        raise SystemExit(program)

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "jaxserve.cli.main", "bench", "offline"])
    for name in engine_environment({"JAX_PLATFORMS": "cpu"}):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(SystemExit, match=sys.executable):
        main(["bench", "offline", "no-such-model"])
    [(words, environment)] = starts
    assert words == [sys.executable, "-m", "jaxserve.cli.main", "bench", "offline"]
    assert environment["GLIBC_TUNABLES"] == engine_environment({"JAX_PLATFORMS": "cpu"})["GLIBC_TUNABLES"]
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5", "who says otherwise is heard"
    monkeypatch.setenv("GLIBC_TUNABLES", environment["GLIBC_TUNABLES"])
    assert main(["bench", "offline", "no-such-model"]) == 2
    assert len(starts) == 1


@pytest.mark.slow
def test_command_measures_a_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine_environment({"JAX_PLATFORMS": "cpu"}).items():
        monkeypatch.setenv(name, value)
    model, file = golden_checkpoint("llama3_tiny").path, tmp_path / "figures.json"
    words = f"bench offline {model} --workload custom --input-len 48 --output-len 4 --num-prompts 3 --json {file}"
    words += f" --kv-cache-memory 1MiB --max-num-seqs 2 --max-num-batched-tokens 16 --compile-cache {shared_programs()}"
    assert main(words.split()) == 0
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (3, 144, 12)
    assert figures["compilations"].get("serving", 0) == 0
    assert figures["device_seconds"] > 0
    assert "host gap (ms)" in capsys.readouterr().out
