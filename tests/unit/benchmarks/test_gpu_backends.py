"""The checks of a device leave out what its kernels refuse."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from jaxserve_kernels.paged_attention.cases import Case

from benchmarks.gpu import backends
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
def test_a_b200_checks_the_kernel_for_prompts_and_the_one_that_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "chip_of", lambda device: Chip("gpu", (10, 0)))
    assert backends.op_backends(make_context(tmp_path), decoder(LLAMA_8B)) == (
        "reference",
        "mosaic_gpu_mma",
        "mosaic_gpu_tcgen05",
    )
    assert [backends.has_kernel("mosaic_gpu_tcgen05", case) for case in (MANY, WIDE, USUAL)] == [False, False, True]


def test_other_backends_and_ops_are_checked_in_full() -> None:
    assert backends.has_kernel("mosaic_gpu", MANY)
    assert backends.has_kernel("mosaic_gpu_mma", object())
