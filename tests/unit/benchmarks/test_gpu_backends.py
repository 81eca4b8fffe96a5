"""The checks of a device leave out what its kernels refuse."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import jax
import pytest
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.ops import ops
from jaxserve_kernels.paged_attention.cases import Case

from benchmarks.gpu import backends, kernels
from benchmarks.gpu.shapes import LLAMA_8B, decoder
from jaxserve.runner.backend import Chip
from tests.unit.benchmarks.gpu_context import make_context

MANY, WIDE, USUAL = Case((1,), (9,), num_heads=64, num_kv_heads=1), Case((1,), (9,), dim=256), Case((1,), (9,), dim=128)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize(("capability", "has_wide"), [((8, 0), True), ((8, 9), False)], ids=["a100", "rtx4090"])
def test_cases_without_a_kernel_are_left_out(
    capability: tuple[int, int], has_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "chip_of", lambda device: Chip("gpu", capability))
    found = [backends.has_kernel("mosaic_gpu_mma", case) for case in (MANY, WIDE, USUAL)]
    assert found == [False, has_wide, True]


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), ["bucketed"]),
        ((8, 0), ["bucketed", "mosaic_gpu_mma"]),
        ((9, 0), ["bucketed", "mosaic_gpu_mma", "mosaic_gpu"]),
        ((10, 0), ["bucketed", "mosaic_gpu_mma", "mosaic_gpu_tcgen05"]),
    ],
    ids=["t4", "a100", "h200", "b200"],
)
def test_a_gpu_checks_every_backend_that_runs_on_it_and_the_served_one_first(
    capability: tuple[int, int], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "chip_of", lambda device: Chip("gpu", capability))
    assert backends.op_backends(make_context(tmp_path), decoder(LLAMA_8B)) == ("reference", *expected)
    names = kernels.checks(make_context(tmp_path, is_quick=False))
    of_backends = [name.partition(": ")[0] for name in names if ": " in name and not name.startswith("kv_write")]
    assert list(dict.fromkeys(of_backends)) == [*reversed(expected), "reference"]
    assert len(names) < 450


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this jax has no Mosaic GPU kernels")
def test_a_b200s_kernel_for_prompts_takes_few_head_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "chip_of", lambda device: Chip("gpu", (10, 0)))
    assert [backends.has_kernel("mosaic_gpu_tcgen05", case) for case in (MANY, WIDE, USUAL)] == [False, False, True]


def test_what_a_backend_takes_from_the_reference_is_not_checked_twice() -> None:
    found = {backend: {op for op in ops() if backends.computes(backend, op)} for backend in get_args(Backend)}
    assert found["reference"] == set(ops())
    assert found["mosaic_gpu_mma"] == {"linear_attention", "paged_attention"}
    assert found["mosaic_gpu_tcgen05"] == {"paged_attention"}
    assert {"block_matmul", "grouped_matmul", "latent_attention", "matmul"} < found["mosaic_gpu"]
    assert not found["mosaic_gpu"] & {"rope", "sparse_attention"} and "sparse_attention" in found["bucketed"]


def test_other_backends_and_ops_are_checked_in_full() -> None:
    assert backends.has_kernel("mosaic_gpu", MANY)
    assert backends.has_kernel("mosaic_gpu_mma", object())
