"""Matmuls on the GPU: what is set side by side, and where our kernel is taken afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.matmul import tuning
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from benchmarks.gpu import matmul_programs, tune_groups, tune_matmuls
from benchmarks.gpu.context import Context
from benchmarks.gpu.matmul_programs import RING_BYTES, Chain, Weights, candidates, grouped_candidates, served_sizes
from benchmarks.gpu.matmuls import MatmulBench, measured
from benchmarks.gpu.records import read_records
from benchmarks.gpu.shapes import TINY, decoder
from benchmarks.gpu.tune_matmuls import choice, compared, remember
from tests.unit.benchmarks.gpu_context import make_context

SMALL, LARGE = (SkinnyTuning(rows=rows, tile=128, stages=4, programs=132) for rows in (64, 128))
LLAMA = ((14336, 4096), (4096, 14336))


def test_sizes_that_are_tried_divide_the_weights_and_fit_the_shared_memory() -> None:
    for count in tuning.TOKENS:
        found = candidates(count, LLAMA)
        assert found and len(found) == len(set(found))
        assert all(each.stages * each.tile * (each.block + 2 * count) <= RING_BYTES for each in found)
        assert any(each.workers == 4 for each in found) == (count <= 64)
    assert {each.rows for each in candidates(8, ((384, 256),))} == {64}
    assert candidates(8, ((384, 320),)) == []


def test_sizes_that_are_tried_for_e4m3_by_e4m3_are_those_that_the_server_may_choose() -> None:
    rounded = [chain.tuning for chain in compared(LLAMA, "float8_e4m3fn", 128, is_dynamic=True) if chain.tuning]
    assert {(each.tile, each.rows) for each in rounded} == {(128, 64)}
    whole = compared(LLAMA, "float8_e4m3fn", 128, is_dynamic=False)
    assert {256} < {chain.tuning.tile for chain in whole if chain.tuning}


def test_the_kernel_is_chosen_only_where_it_is_well_ahead_of_xla() -> None:
    assert choice({None: 1.0, SMALL: 0.8, LARGE: 0.7}) == LARGE
    assert choice({None: 1.0, SMALL: 0.99}) is None
    assert choice({None: 1.0, SMALL: 1.2}) is None


def test_a_choice_is_read_back_for_its_class_and_goes_when_xla_is_faster() -> None:
    known: dict[str, object] = {}
    chain = Chain(LLAMA, "int8", 32)
    remember(known, chain, LARGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "load", lambda device: json.loads(json.dumps(known)))
        assert tuning.skinny_tuning("h200", "int8", 20, 14336 * 4096) == LARGE
        assert tuning.skinny_tuning("h200", "int8", 20, 4096 * 4096) is None
        remember(known, chain, None)
        assert tuning.skinny_tuning("h200", "int8", 20, 14336 * 4096) is None


@pytest.mark.parametrize(
    ("weights", "is_grouped"), [("int8", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True), ("int4", False)]
)
def test_matmuls_in_a_chain_keep_the_size_of_numbers(weights: str, is_grouped: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_programs, "CACHED_BYTES", 1 << 17)
        chain = Chain(((384, 128), (128, 384)), weights, 3, is_grouped=is_grouped)
        dtype = jnp.dtype(jnp.float32)
        made = Weights(0, dtype)
        x = made.activations(chain)
        out = chain.wanted(dtype).compile()(x, *made.of(chain))
    assert out.shape == x.shape
    assert 0.5 < float(np.asarray(out).std()) < 2


def test_4_bits_are_measured_by_the_sizes_that_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve_kernels.matmul.gpu.FIRST_JAX", (0, 0, 0))
    xla, kernel = measured(LLAMA, 32, jnp.dtype(jnp.bfloat16), has_kernel=True)[-2:]
    assert (xla.types, xla.tuning) == ("int4", None)
    assert kernel.tuning is not None
    assert kernel.tuning.tile == 128
    assert kernel.num_bytes == 14336 * 4096, "two matrices, half a byte a number"


@pytest.mark.parametrize(("weights", "is_grouped"), [("int4", False), ("float8_e4m3fn", True)])
def test_groups_are_timed_by_the_sizes_of_the_server_and_by_others(
    monkeypatch: pytest.MonkeyPatch, weights: str, is_grouped: bool
) -> None:
    monkeypatch.setattr("jaxserve_kernels.matmul.gpu.FIRST_JAX", (0, 0, 0))
    chain = Chain(LLAMA, weights, 32, is_grouped=is_grouped)
    served, *others = grouped_candidates(chain, jnp.dtype(jnp.bfloat16))
    assert served == served_sizes(chain, jnp.dtype(jnp.bfloat16))
    assert len({served, *others}) == 1 + len(others)
    assert {(each.workers, each.rows) for each in others} == {(2, 64), (2, 128), (4, 64)}
    assert {each.tile for each in others} == {128}, "a group"
    assert grouped_candidates(replace(chain, num_tokens=256), jnp.dtype(jnp.bfloat16)) == []


def test_a_note_names_the_sizes_that_were_faster_than_those_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With measured times in the place of a device."""
    monkeypatch.setattr("jaxserve_kernels.matmul.gpu.FIRST_JAX", (0, 0, 0))
    monkeypatch.setattr(tune_groups, "why_no_kernels", lambda shape: None)
    monkeypatch.setattr(tune_groups, "TOKENS", (2,))
    times = {(4, 8): 1.0, (2, 8): 2.0, (4, 4): 0.5}

    class Bench(MatmulBench):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.dtype = jnp.dtype(jnp.bfloat16)

        def compile(self, chains: list[Chain], share: float) -> None:
            """Compile nothing."""

        def compare(self, name: str, chains: list[Chain]) -> dict[Chain, float]:
            sizes = {chain: chain.tuning for chain in chains}
            return {
                chain: 9.0 if each is None else times.get((each.workers, each.stages), 3.0)
                for chain, each in sizes.items()
            }

    monkeypatch.setattr(tune_groups, "MatmulBench", Bench)
    tune_groups.run(make_context(tmp_path))
    notes = [record.text for record in read_records(tmp_path / "records") if record.kind == "note"]
    of_four_bits = [note for note in notes if "int4" in note]
    assert len(of_four_bits) == 3, "q, k and v, the output, up and down"
    assert all("takes 0.50 of" in note and "stages=4" in note for note in of_four_bits)


@pytest.mark.slow
def test_a_file_is_written_for_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a matmul of XLA in the place of the kernel, and one that is wrong."""

    def stand_in(
        sizes: SkinnyTuning, x: jax.Array, weight: jax.Array, scales: jax.Array, *, is_dynamic: bool
    ) -> jax.Array:
        wide = weight.astype(x.dtype)
        return (x @ wide.T) * scales * (1 if sizes.workers == 2 else 2)

    monkeypatch.setattr(matmul_programs, "skinny_matmul", stand_in)
    monkeypatch.setattr(matmul_programs, "MOST_REPEATS", 2)
    monkeypatch.setattr(tune_matmuls, "why_no_kernels", lambda shape: None)
    monkeypatch.setattr(tune_matmuls, "decoder", lambda shape: decoder(TINY))
    monkeypatch.setattr(tune_matmuls, "TOKENS", (8,))
    monkeypatch.setattr(tune_matmuls, "WEIGHTS", ("int8",))
    monkeypatch.setattr(tune_matmuls, "WORTH", 1e9)
    tune_matmuls.run(make_context(tmp_path))
    written = json.loads((tmp_path / "tuning" / "matmul-h200.json").read_text())
    assert {sizes["workers"] for types in ("int8", "int8 x int8") for sizes in written[types]["8"].values()} == {2}
    records = read_records(tmp_path / "records")
    assert [record for record in records if record.kind == "problem"] == []
    checks = {record.name: record.passed for record in records if record.kind == "check"}
    assert set(checks.values()) == {True, False}
    assert all(passed == ("kernel 2 x" in name) for name, passed in checks.items())
