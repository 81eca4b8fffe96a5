"""Seconds by operation, out of a trace."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import profile, shapes
from benchmarks.gpu.records import read_records
from benchmarks.gpu.trace import Event, Operation, device_time, read_trace
from tests.engine.quick_sampler import quick_programs
from tests.unit.benchmarks.gpu_context import make_context


def named(pid: int, tid: int | None, name: str) -> Event:
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, "name": kind, "args": {"name": name}} | ({} if tid is None else {"tid": tid})


def span(pid: int, tid: int, name: str, begin_us: float, end_us: float, **args: str) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin_us, "dur": end_us - begin_us, "args": args}


def test_streams_of_a_gpu_count_once() -> None:
    found = device_time(
        [
            named(1, None, "/device:GPU:0"),
            named(1, 14, "Stream #14(Compute)"),
            named(1, 15, "Stream #15(MemcpyD2H)"),
            named(1, 16, "XLA Ops"),
            named(2, None, "/host:CPU"),
            named(2, 14, "python"),
            span(1, 14, "gemm_fusion_dot_7", 100, 130),
            span(1, 14, "gemm_fusion_dot_12.1", 130, 140),
            span(1, 14, "attention", 160, 180),
            span(1, 15, "MemcpyD2H", 170, 200),
            span(1, 16, "gemm_fusion_dot_7", 100, 130, hlo_op="gemm_fusion_dot_7"),
            span(2, 14, "submit", 0, 1000, hlo_op="none"),
        ]
    )
    assert found is not None
    assert [(each.name, each.num_calls, round(each.seconds * 1e6)) for each in found.operations] == [
        ("gemm_fusion_dot", 2, 40),
        ("MemcpyD2H", 1, 30),
        ("attention", 1, 20),
    ]
    assert found.busy_s == pytest.approx(80e-6)
    assert found.span_s == pytest.approx(100e-6)


def test_a_trace_without_operations_has_no_times() -> None:
    assert device_time([named(1, None, "/host:CPU"), span(1, 3, "submit", 0, 5)]) is None


def test_the_trace_of_a_real_program_is_read(tmp_path: Path) -> None:
    program = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    array = jnp.ones((64, 64))
    jax.block_until_ready(program(array))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            jax.block_until_ready(program(array))
    found = read_trace(tmp_path)
    assert found is not None
    assert all(isinstance(each, Operation) and each.seconds >= 0 for each in found.operations)
    assert any(each.num_calls == 3 for each in found.operations)
    assert 0 < found.busy_s <= found.span_s


@pytest.mark.slow
def test_the_part_shows_each_kind_of_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.TINY, "num_hidden_layers", 1)
    with quick_programs():
        profile.run(make_context(tmp_path))
    records = read_records(tmp_path / "records")
    assert [record for record in records if record.kind == "problem"] == []
    figures = [record.values for record in records if record.name == "profiled steps"]
    assert [each["step"] for each in figures] == ["decode-1", "decode-4", "prefill-64"]
    assert all(0 < each["busy_ms"] <= each["ms"] for each in figures)
