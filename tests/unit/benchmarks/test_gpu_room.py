"""A GPU check measures what a device has room for, and says what it left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import attention, attention_mma, steps
from benchmarks.gpu.attention import QUICK, Sizes, with_room
from benchmarks.gpu.attention_programs import Heads, scattered_tables
from benchmarks.gpu.records import read_records
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, decoder
from tests.unit.benchmarks.gpu_context import make_context

BFLOAT16 = jnp.dtype(jnp.bfloat16)
HEADS = Heads(32, 8, 128, BFLOAT16, BFLOAT16)


@dataclass
class Device:
    """A device that tells how much memory it has."""

    gb: float | None

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.gb is None else {"bytes_limit": int(self.gb * 1e9)}


@pytest.mark.parametrize(("gb", "pool_gb"), [(130, 34.4), (22, 15.4), (None, 34.4)], ids=["h200", "rtx4090", "unknown"])
def test_pool_of_attention_takes_a_part_of_the_devices_memory(gb: float | None, pool_gb: float) -> None:
    sizes = with_room(Sizes(), HEADS, Device(gb))  # type: ignore[arg-type]
    assert sizes.num_tokens * HEADS.decode_bytes(1, 1) / 1e9 == pytest.approx(pool_gb, rel=0.01)
    assert with_room(QUICK, HEADS, Device(gb)).num_tokens == QUICK.num_tokens  # type: ignore[arg-type]


def test_rows_of_a_batch_that_is_larger_than_the_pool_share_pages() -> None:
    tables = np.asarray(scattered_tables(np.random.default_rng(0), 6, batch=4, length=48, longest=64, num_tables=2))
    assert tables.shape == (2, 4, 4) and not tables[..., 3].any()
    used = tables[..., :3]
    assert set(used.flat) == {1, 2, 3, 4, 5}
    assert all(len(set(row)) == 3 for row in used.reshape(-1, 3))


@pytest.mark.parametrize(("gb", "shape", "name"), [(130, LLAMA_8B, ""), (22, LLAMA_1B, "1B, "), (None, LLAMA_8B, "")])
def test_steps_of_a_smaller_model_are_measured_where_the_large_one_does_not_fit(
    gb: float | None, shape: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Device(gb)])
    assert steps.measured_model(make_context(tmp_path, is_quick=False)) == (decoder(shape), name)
    notes = [record.text for record in read_records(tmp_path / "records")]
    assert notes == (["22 GB are too few for Llama-3.1-8B in bfloat16: the model is Llama-3.2-1B"] if name else [])


def test_pool_without_room_for_any_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Device(22)])
    with pytest.raises(MemoryError, match=r"16\.0 GB of weights"):
        steps.pool_blocks(decoder(LLAMA_8B), BFLOAT16, 16_000_000_000, [(1, 1024)])


@pytest.mark.parametrize(("capability", "backend"), [("9.0", "mosaic_gpu_mma"), ("7.5", None)], ids=["h200", "t4"])
def test_kernel_of_other_gpus_is_measured_on_every_device_that_has_its_instructions(
    capability: str, backend: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(attention_mma, "first_device", lambda _: device)
    monkeypatch.setattr(attention, "run", lambda _, wanted: asked.append(wanted))
    attention_mma.run(make_context(tmp_path))
    assert asked == ([] if backend is None else [backend])
    assert len(read_records(tmp_path / "records")) == (backend is None)
