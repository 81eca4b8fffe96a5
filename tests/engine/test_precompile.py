"""A server starts from programs that were compiled ahead, without weights, and runs each before the first request."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import CacheConfig, CompileConfig, Config, ModelConfig, SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.hosts.agreement import OneHost
from jaxserve.executor.local import LocalExecutor
from jaxserve.executor.precompile import precompile
from jaxserve.runner.program_cache import FILE_NAME, read_manifest
from tests.engine.quick_sampler import quick_programs
from tests.models.goldens import golden_checkpoint


def config_for(path: Path, cache: Path, max_model_len: int = 32) -> Config:
    return Config(
        model=ModelConfig(model=str(path), max_model_len=max_model_len),
        cache=CacheConfig(kv_cache_memory=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16),
        compile=CompileConfig(compile_cache=str(cache)),
    )


def ignore(*progress: object) -> None:
    pass


@pytest.fixture
def quick_sampler() -> Iterator[None]:
    with quick_programs():
        yield


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.usefixtures("quick_sampler")
def test_a_server_starts_from_what_was_compiled_ahead_of_a_config_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = golden_checkpoint("llama2_tiny").path
    described, cache = tmp_path / "described", tmp_path / "cache"
    described.mkdir()
    shutil.copy(model / "config.json", described)
    steps: list[tuple[int, int]] = []
    result = precompile(
        config_for(described, tmp_path / "not used"),
        described,
        cache,
        {"dtype": "auto"},
        lambda *s: steps.append(s[:2]),
    )
    manifest = read_manifest(cache)
    assert manifest == result.manifest
    assert steps == [(0, 2), (1, 2), (2, 2)]
    state_programs = {f"state/{kind}" for kind in ("cache", "slots", "init_slot", "masks")}
    assert {entry.name for entry in manifest.programs} == {"decode/1", "mixed/16"} | state_programs
    assert {entry.file for entry in manifest.programs} | {FILE_NAME} == {file.name for file in cache.iterdir()}
    assert all(entry.num_bytes > 0 and entry.compile_seconds for entry in manifest.programs)
    assert result.kv_cache_bytes <= 1 << 20
    assert not (tmp_path / "not used").exists()

    executor = LocalExecutor.start(config_for(model, cache), model, ignore)
    report, work = executor.model_info.startup, executor.model_info.work
    assert work is not None and work.read_bytes == 4 * (work.layer_flops + work.head_flops) // 2 > 0, "dense, float32"
    assert {program.source for program in report.programs} == {"cache"}
    assert executor.compilations() == {"warmup": 0, "serving": 0}
    assert {span.phase for span in report.phases} == {"open", "load", "compile", "kv_cache", "first_run"}
    assert "had to be compiled" not in caplog.text
    _check_dummy_run_left_no_trace(executor)
    executor.close()

    events = Events()
    shorter = LocalExecutor.start(config_for(model, cache, max_model_len=16), model, events.progress, events)
    others = events.names.index("first run")
    assert "first_run" not in events.names[:others], "the first collective waits for the other hosts for 30 s only"
    assert "compile" not in events.names[others:]
    assert {program.source for program in shorter.model_info.startup.programs} == {"cache"}
    assert shorter.compilations() == {"warmup": 0, "serving": 0}, "no shape depends on --max-model-len"
    assert (executor.model_info.max_model_len, shorter.model_info.max_model_len) == (32, 16)
    shorter.close()

    config = config_for(model, cache)
    other = LocalExecutor.start(replace(config, cache=CacheConfig(kv_cache_memory=1 << 19)), model, ignore)
    assert {program.source for program in other.model_info.startup.programs} == {"compiled"}
    assert "6 programs had to be compiled: KV pages: 64 there, 32 here" in caplog.text
    other.close()


class Events(OneHost):
    """Records the names of what a start reports and exchanges."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def exchange(self, topic: str, values: dict[str, str]) -> Sequence[Mapping[str, str]]:
        self.names.append(topic)
        return super().exchange(topic, values)

    def progress(self, phase: str, done: int, total: int, detail: str) -> None:
        self.names.append(phase)


def _check_dummy_run_left_no_trace(executor: LocalExecutor[Any, Any]) -> None:
    arrays = executor._runner._state.arrays
    assert arrays.cache is not None
    pool_k, pool_v = (np.asarray(half) for half in arrays.cache[0])
    assert not pool_k[:, 1:].any() and not pool_v[:, 1:].any()
    assert pool_k[:, 0].any(), "every program wrote to the null page"
    assert not np.asarray(arrays.slots)[:-1].any()


def test_a_directory_that_others_can_write_is_rejected(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    model = golden_checkpoint("llama2_tiny").path
    config = config_for(model, tmp_path)
    with pytest.raises(ConfigError, match="not a directory that can be trusted"):
        precompile(config, model, tmp_path, {}, ignore)
