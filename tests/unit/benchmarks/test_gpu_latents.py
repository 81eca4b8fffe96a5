"""The part of the GPU check that measures attention over latent vectors, on a CPU at tiny sizes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import latents
from benchmarks.gpu.records import read_records
from jaxserve.runner.backend import Chip
from tests.unit.benchmarks.gpu_context import make_context

POOL = (1, 64, 1, 16, latents.WIDTH)


@pytest.mark.slow
def test_every_cell_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "_MOST_REPEATS", 2)
    latents.run(make_context(tmp_path))
    figures = [record.values for record in read_records(tmp_path / "records") if record.kind == "figure"]
    assert [(row["tokens"], row["backend"]) for row in figures] == [(1, "bucketed"), (2, "bucketed")]


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this jax has no Mosaic GPU kernels")
def test_a_hopper_is_measured_with_the_kernel_and_others_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def backends(capability: tuple[int, int]) -> list[str]:
        monkeypatch.setattr(latents, "chip_of", lambda device: Chip("gpu", capability))
        return list(latents.backends_of(jax.devices()[0], POOL, jnp.dtype("bfloat16")))

    assert backends((9, 0)) == ["mosaic_gpu", "bucketed"]
    assert backends((8, 0)) == ["bucketed"]
