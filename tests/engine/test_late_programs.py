"""With native CPU kernels a server is ready with the largest program of each kind; smaller ones follow beside requests."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxserve_kernels import native

from jaxserve.config import CacheConfig, CompileConfig, Config, CpuKernels, ModelConfig, SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.executor.late_programs import late_programs
from jaxserve.executor.local import LocalExecutor
from jaxserve.executor.preparation import Preparation, prepare
from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.manager import KVManager
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.runner.inputs import Program
from jaxserve.scheduler.scheduler import Scheduler
from tests.engine.model_engine import Generated, request
from tests.engine.quick_sampler import quick_programs
from tests.models.goldens import DATA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.register() is None, reason="native kernels are not built"),
]
MODEL = DATA / "llama2_tiny"
LATE = ["decode/1", "mixed/16"]
"""The programs of these limits but the largest of each kind."""


def config_with(cache: Path, kernels: CpuKernels) -> Config:
    return Config(
        model=ModelConfig(model=str(MODEL), max_model_len=96, dtype="float32"),
        cache=CacheConfig(kv_cache_memory=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        compile=CompileConfig(compile_cache=str(cache), cpu_kernels=kernels),
    )


def start(cache: Path) -> LocalExecutor[Any, Any]:
    return LocalExecutor.start(config_with(cache, "native"), MODEL, lambda *_: None, has_late_programs=True)


def fail(prepared: Preparation, program: Program, cache: Any) -> Any:
    raise MemoryError("no memory is left")


@pytest.fixture(scope="module", autouse=True)
def quick_sampler() -> Iterator[None]:
    """Requests of this file have only temperature, seed and raw log-probabilities as options."""
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def largest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as a first start leaves it when it is ready: with the largest program of each kind, and those of the state."""
    cache = tmp_path_factory.mktemp("largest") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preparation, "make_program", fail)
        executor = start(cache)
        assert {program.source for program in executor.model_info.startup.programs} == {"compiled", "later"}
        wait_until(lambda: num_late(executor) == 0)
        executor.close()
    return cache


@pytest.fixture
def cache(largest: Path, tmp_path: Path) -> Path:
    """Return a copy of `largest`."""
    return Path(shutil.copytree(largest, tmp_path / "cache"))


def late_names(executor: LocalExecutor[Any, Any], source: str = "later") -> list[str]:
    return [program.name for program in executor.model_info.startup.programs if program.source == source]


def num_late(executor: LocalExecutor[Any, Any]) -> int:
    stats = EngineStats()
    executor.add_stats(stats)
    return stats.late_programs


def run(executor: LocalExecutor[Any, Any]) -> dict[str, Generated]:
    """Generate for one request alone, then for three of other lengths, one of which samples."""
    info = executor.model_info
    found: dict[str, Generated] = {}
    for batch in (
        [request("alone", range(3, 9), num_top_logprobs=3)],
        [
            request("a", range(3, 40), num_top_logprobs=3),
            request("b", [5], num_top_logprobs=3),
            request("c", range(50, 60), temperature=1.0, seed=7, num_top_logprobs=3),
        ],
    ):
        kv = KVManager(info.num_kv_blocks, info.block_size, info.max_model_len)
        parts = kv, executor.buckets, info.max_model_len, executor.eos_token_ids, info.vocab_size
        core = EngineCore(Scheduler(SchedulerConfig(), *parts), executor)
        found |= {str(each.request_id): Generated() for each in batch}
        for each in batch:
            core.handle(each)
        while core.has_work:
            step = core.step()
            for output in [] if step is None else step.outputs:
                found[output.request_id].add(output)
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.versions
def test_larger_programs_do_the_steps_of_missing_ones_with_the_same_bits(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, make = threading.Event(), Preparation.make_program

    def make_later(prepared: Preparation, program: Program, cache: Any) -> Any:
        assert may_go_on.wait(60)
        return make(prepared, program, cache)

    monkeypatch.setattr(Preparation, "make_program", make_later)
    executor = start(cache)
    names = late_names(executor)
    assert sorted(names) == LATE
    before = run(executor)
    assert num_late(executor) == len(LATE), "no program came meanwhile"
    may_go_on.set()
    wait_until(lambda: num_late(executor) == 0)
    made = [f"{kind}/{size}" for kind, size in executor._runner._executables]
    assert sorted(made) == sorted([*LATE, "decode/4", "mixed/32"])
    assert run(executor) == before
    assert executor.compilations()["serving"] == 0
    executor.close()


@pytest.mark.versions
def test_programs_in_the_cache_follow_beside_requests_too_and_are_not_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(cache)
    wait_until(lambda: num_late(first) == 0)
    expected = run(first)
    first.close()
    may_go_on, make = threading.Event(), Preparation.make_program
    sources = list[str]()

    def make_later(prepared: Preparation, program: Program, cache: Any) -> Any:
        assert may_go_on.wait(60)
        made = make(prepared, program, cache)
        sources.append(made.source)
        return made

    monkeypatch.setattr(Preparation, "make_program", make_later)
    again = start(cache)
    assert late_names(again) == []
    assert sorted(late_names(again, "cache_later")) == LATE and num_late(again) == len(LATE)
    assert {program.source for program in again.model_info.startup.programs} == {"cache", "cache_later"}
    num_compilations = again.compilations()
    assert run(again) == expected, "larger programs have the same bits"
    may_go_on.set()
    wait_until(lambda: num_late(again) == 0)
    assert sources == ["cache"] * len(LATE)
    assert run(again) == expected
    assert again.compilations() == num_compilations and num_compilations["serving"] == 0
    again.close()


def test_a_program_that_cannot_be_compiled_is_done_without(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Preparation, "make_program", fail)
    caplog.set_level("INFO")
    executor = start(cache)
    wait_until(lambda: "0 more programs were made" in caplog.text)
    assert num_late(executor) == 0
    for name in LATE:
        assert f"program {name} could not be compiled (no memory is left)" in caplog.text
    assert run(executor)["alone"].finish_reason == "length"
    executor.close()


def test_an_executor_that_is_closed_begins_no_program(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_go_on, make = threading.Event(), threading.Event(), Preparation.make_program

    def make_later(prepared: Preparation, program: Program, cache: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(60)
        return make(prepared, program, cache)

    monkeypatch.setattr(Preparation, "make_program", make_later)
    executor = start(cache)
    assert has_begun.wait(60)
    executor.close()
    may_go_on.set()
    wait_until(lambda: not any(thread.name == "late-programs" for thread in threading.enumerate()))
    assert num_late(executor) == len(LATE) - 1


def test_kernels_of_xla_which_compute_padding_have_no_late_programs(tmp_path: Path) -> None:
    decoder = decoder_of(open_model(MODEL))
    native, xla = (late_programs(prepare(config_with(tmp_path, kernels), decoder)) for kernels in ("native", "xla"))
    assert (sorted(program.name for program in native), xla) == (LATE, ())
