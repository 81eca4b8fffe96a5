"""Checks on a device that a kernel may break: each is done, and what breaks a process is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.block_kinds import BlockKind
from jaxserve_kernels.nvfp4 import TwoLevelScales

from benchmarks.gpu import attention_checks, crew, op_checks
from benchmarks.gpu.context import Context
from benchmarks.gpu.kernels import END_TO_END
from benchmarks.gpu.records import Record, read_records
from tests.unit.benchmarks import gpu_crew_stub
from tests.unit.benchmarks.gpu_context import make_context


def context(folder: Path, left_s: float = 60.0) -> Context:
    return make_context(folder, left_s, seed=100, attention_backend="reference")


def bench(folder: Path) -> crew.Bench:
    return crew.Bench(context(folder).recorder, np.random.default_rng(1), 1, lambda stage: None)


def found(folder: Path) -> list[Record]:
    return read_records(folder / "records")


@pytest.mark.slow
def test_every_check_is_done_though_processes_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "LIMITS_S", {**crew.LIMITS_S, "runs": 0.5})
    given = context(tmp_path)
    names = list(gpu_crew_stub.checks(given))
    crew.run_all(given, gpu_crew_stub.__name__, names, 1)
    records = found(tmp_path)
    problems = {record.name: record.text for record in records if record.kind == "problem"}
    assert problems == {
        "raises": "ValueError: it was refused",
        "loses the device": "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS",
        "dies": "its process ended in it, exit code -6",
        "hangs": "killed: silent for 0 s (runs)",
    }
    done = [record.name.split(" in ") for record in records if record.kind == "check"]
    assert [seed for seed, _ in done] == ["100", "102", "104", "107"], "each has a seed of its own"
    processes = [process for _, process in done]
    assert processes[0] == processes[1] and len(set(processes)) == 3


def test_checks_after_the_end_of_the_time_are_named(tmp_path: Path) -> None:
    crew.run_all(context(tmp_path, -1.0), gpu_crew_stub.__name__, ["first", "last"], 2)
    assert [(record.kind, record.name) for record in found(tmp_path)] == [("problem", "first"), ("problem", "last")]


@pytest.mark.parametrize("broken", ["values", "pages"])
def test_wrong_attention_and_wrong_pages_are_distinguished(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention_checks.write_and_attend

    def wrong(*arguments: jax.Array, **options: object) -> tuple[jax.Array, ...]:
        out, k, v = right(*arguments, **options)  # type: ignore[arg-type]
        if broken == "values":
            return out.at[1, 2].add(0.1), k, v
        return out, k, v.at[0, -1].set(jnp.int8(3))

    monkeypatch.setattr(attention_checks, "write_and_attend", wrong)
    attention_checks.check_write_and_attend(END_TO_END[3], "reference", bench(tmp_path))
    checks = {record.name.endswith(": pages"): record.passed for record in found(tmp_path)}
    assert checks == {False: broken != "values", True: broken != "pages"}


def test_write_without_its_scales_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op_checks.check_write("float16", "int8", 7, bench(tmp_path))
    right = op_checks.kv_write
    monkeypatch.setattr(op_checks, "kv_write", lambda *arrays, scales: right(*arrays))
    op_checks.check_write("float16", "int8", 7, bench(tmp_path))
    assert [record.passed for record in found(tmp_path) if record.name.endswith("exact")] == [True, False]


def test_a_matmul_in_nvfp4_that_forgets_the_matrix_scale_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op_checks.check_nvfp4("reference", "float32", 7, bench(tmp_path))
    right = op_checks.nvfp4_matmul

    def wrong(x: jax.Array, values: jax.Array, scales: TwoLevelScales, *, backend: Backend) -> jax.Array:
        return right(x, values, TwoLevelScales(scales.blocks, jnp.ones_like(scales.matrix)), backend=backend)

    monkeypatch.setattr(op_checks, "nvfp4_matmul", wrong)
    op_checks.check_nvfp4("reference", "float32", 7, bench(tmp_path))
    assert [record.passed for record in found(tmp_path)] == [True, False]


def test_blocks_of_another_type_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op_checks.check_blocks("reference", "Q4_0", 7, bench(tmp_path))
    right = op_checks.block_matmul

    def wrong(x: jax.Array, tiles: jax.Array, *, kind: BlockKind, backend: Backend) -> jax.Array:
        return right(x, tiles, kind=replace(kind, zero=7), backend=backend)

    monkeypatch.setattr(op_checks, "block_matmul", wrong)
    op_checks.check_blocks("reference", "Q4_0", 7, bench(tmp_path))
    assert [record.passed for record in found(tmp_path)] == [True, False]
