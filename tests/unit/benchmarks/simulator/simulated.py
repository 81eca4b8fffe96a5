"""Small fleets to simulate."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulator.cell import Cell, CellSettings
from benchmarks.simulator.records import Records
from benchmarks.simulator.step_times import EngineShape, ProgramTimes, StepTable
from benchmarks.simulator.workloads import WORKLOADS, Workload, sessions

MAX_MODEL_LEN = 2048
QUICK = replace(WORKLOADS["sharegpt"], mean_wait_s=1.0)


def table(*, max_decode_steps: int, num_kv_blocks: int) -> StepTable:
    """Return times that grow with rows, tokens, keys and pairs, so that no two steps take equally long."""
    engine = EngineShape(
        decode_buckets=(1, 2, 4, 8, 16, 32),
        mixed_buckets=(16, 64, 256),
        max_num_seqs=32,
        max_decode_steps=max_decode_steps,
        num_kv_blocks=num_kv_blocks,
        block_size=16,
        max_model_len=MAX_MODEL_LEN,
    )
    programs = {f"decode/{size}": ProgramTimes(0.012 + size * 1e-5, 1e-5, 3e-7) for size in engine.decode_buckets}
    programs |= {f"mixed/{size}": ProgramTimes(0.012 + size * 2e-5, 0, 3e-7, 2e-9) for size in engine.mixed_buckets}
    return StepTable(title="test", source="estimated", method="made up", engine=engine, programs=programs)


def simulate(
    settings: CellSettings,
    *,
    workload: Workload = QUICK,
    requests_per_s: float = 5.0,
    num_requests: int = 40,
    seed: int = 0,
) -> Records:
    """Run one cell."""
    trace = sessions(
        workload,
        requests_per_s=requests_per_s,
        num_requests=num_requests,
        max_model_len=settings.table.engine.max_model_len,
        seed=seed,
    )
    return Cell(settings, trace).run()
