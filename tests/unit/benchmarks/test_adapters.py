"""The benchmark of adapters: what it loads, and the row that it prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.adapters import CASES, row, write_adapter
from jaxserve.checkpoint.peft import open_adapter
from jaxserve.executor.adapters import target_model
from jaxserve.models.registry import decoder_of, open_model
from tests.models.goldens import golden_checkpoint


def test_a_random_adapter_is_one_of_all_projections(tmp_path: Path) -> None:
    checkpoint = open_model(golden_checkpoint("llama3_tiny").path)
    write_adapter(tmp_path / "a", checkpoint, 4, seed=1)
    decoder = decoder_of(checkpoint)
    adapter = open_adapter("a", tmp_path / "a", target_model(decoder, checkpoint.config))
    assert adapter.rank == 4
    assert len(adapter.additions) == 7 * decoder.num_layers


def test_a_row_has_medians_and_the_ratios_of_rounds() -> None:
    found = dict(zip(CASES, ([10.0, 20.0, 40.0], [10.0, 19.0, 44.0], [8.0, 18.0, 20.0]), strict=True))
    assert row(4, found) == "| 4 | 20.0 | 19.0 = 1.00 (0.95-1.10) | 18.0 = 0.80 (0.50-0.90) |"
