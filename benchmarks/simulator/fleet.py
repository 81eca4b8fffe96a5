"""A fleet: cells with a router each, in parallel processes.

Requests are divided among the routers at random, as a load balancer for connections does; a session stays with one
router. So cells share nothing, and any number of processes gives the same result.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from benchmarks.simulator.cell import Cell, CellSettings
from benchmarks.simulator.records import Records, joined
from benchmarks.simulator.workloads import WORKLOADS, sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Cells, all alike, and the load of all of them together."""

    cell: CellSettings
    num_cells: int
    workload: str
    requests_per_s: float
    """Offered load of the whole fleet."""
    num_requests: int
    """Requests of the whole fleet, at most: sessions end where the context does."""
    seed: int = 0

    @property
    def num_replicas(self) -> int:
        return self.num_cells * self.cell.num_replicas


def run_cell(settings: FleetSettings, index: int) -> Records:
    """Simulate one cell of the fleet."""
    trace = sessions(
        WORKLOADS[settings.workload],
        requests_per_s=settings.requests_per_s / settings.num_cells,
        num_requests=settings.num_requests * (index + 1) // settings.num_cells
        - settings.num_requests * index // settings.num_cells,
        max_model_len=settings.cell.table.engine.max_model_len,
        seed=settings.seed,
        cell=index,
    )
    return Cell(settings.cell, trace).run()


def run_fleet(
    settings: FleetSettings, *, num_processes: int = 1, on_cell: Callable[[], None] = lambda: None
) -> Records:
    """Simulate all cells. on_cell: called when one is done."""
    cells: dict[int, Records] = {}
    if num_processes == 1:
        for index in range(settings.num_cells):
            cells[index] = run_cell(settings, index)
            on_cell()
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, context, initializer=_start_worker) as pool:
            futures = {pool.submit(run_cell, settings, index): index for index in range(settings.num_cells)}
            for future in as_completed(futures):
                cells[futures[future]] = future.result()
                on_cell()
    return joined([cells[index] for index in range(settings.num_cells)])


def _start_worker() -> None:
    """Collect garbage rarely: a cell has millions of long-lived objects and makes no cycles worth mention."""
    gc.set_threshold(200_000, 50, 100)
