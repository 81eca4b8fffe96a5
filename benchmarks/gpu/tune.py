"""Block sizes of our attention kernels, tried out on this device: writes `tuning/h200.json` into the results.

Tiles and stages for each head dimension and width of the pool, then how rows are split, for one head dimension. Not
part of a run unless it is asked for: its file is looked at before it replaces the one in
`jaxserve_kernels/paged_attention/tuning`. What was not measured in time stays as it is there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.paged_attention import tuning
from jaxserve_kernels.paged_attention.tuning import DecodeTuning, PrefillTuning

from benchmarks.gpu.ahead import DISTURBED, Programs, Wanted
from benchmarks.gpu.attention_programs import Heads, decode_program, prefill_program, queries, scattered_tables
from benchmarks.gpu.backends import why_no_kernels
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.random_weights import random_pool
from benchmarks.gpu.records import one_line
from benchmarks.gpu.shapes import LLAMA_8B, decoder
from benchmarks.gpu.timing import time_calls
from jaxserve.runner.backend import chip_of, pallas_backend
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape

DEVICE = "h200"
Tuning = DecodeTuning | PrefillTuning

BFLOAT16 = jnp.dtype(jnp.bfloat16)
HEADS = tuple(
    Heads(32, 8, dim, BFLOAT16, jnp.dtype(kv_dtype)) for dim in (128, 64) for kv_dtype in (BFLOAT16, jnp.float8_e4m3fn)
)
TILES = (64, 128)
STAGES = (1, 2, 3, 4, 6)
RING_BYTES = 200 << 10
"""Most shared memory for tiles of keys and values. What does not fit with the rest, the compiler refuses."""
MIN_SPLITS = (128, 256, 512, 1024)
WAVES = (1, 2, 3)
PROGRAMS = (132, 264)
DECODE_CELL = (64, 4096)
SPLIT_CELLS = ((1, 32768), (8, 8192), (64, 2048))
"""Rows, and tokens of each: few long ones have to be split, many need not."""
LONGEST = 32768
PROMPT = 8192
NUM_TOKENS = 64 * 4096
CELL_BUDGET_S = 0.2
SHARES = {"decode": 0.35, "prefill": 0.5, "splits": 0.7}
"""Fraction of the remaining time for compiling a sweep."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tuning, and what it is measured on."""

    heads: Heads
    tuning: Tuning
    cell: tuple[int, int]

    @property
    def wanted(self) -> Wanted:
        """The kernel itself, as the functions of `api` call it."""
        from jaxserve_kernels.paged_attention.gpu import decode, prefill  # imports Pallas

        num_pages, (batch, length) = self.heads.pool(NUM_TOKENS)[1], self.cell
        options: dict[str, Any] = {"scoring": self.heads.scoring, "sinks": None, "tuning": self.tuning}
        if isinstance(self.tuning, PrefillTuning):
            attend = partial(prefill.prefill, **options)
            return prefill_program(self.heads, attend, length, num_pages, "mosaic_gpu")

        def narrow(q: jax.Array, *pool: jax.Array) -> jax.Array:
            return decode.decode(q, *pool, **options).astype(q.dtype)

        repeats = self.heads.num_repeats(batch)
        return decode_program(self.heads, narrow, batch, num_pages, LONGEST, num_repeats=repeats)


def run(context: Context) -> None:
    first_device(context)
    reason = why_no_kernels(decoder(LLAMA_8B))
    if reason is not None:
        context.recorder.note(f"there is nothing to tune: {reason}")
        return
    if pallas_backend(chip_of(jax.devices()[0])) == "mosaic_gpu_mma":
        context.recorder.note("there is nothing to tune: only the kernels for Hopper are")
        return
    known = copy.deepcopy(tuning.load(DEVICE))
    sweep = _Sweep(context)
    for kernel in ("decode", "prefill"):
        for heads, (best, _) in sweep.tiles(kernel).items():
            known[kernel]["tiles"][_key(heads)] = {"tile": best.tile, "stages": best.stages}
            _write(context, known)
    context.recorder.attempt("splits", lambda: known["decode"].update(sweep.splits(known)))
    _write(context, known)


def tile_candidates(kernel: str, heads: Heads) -> list[Candidate]:
    """Return the candidates that fit the shared memory, with the other sizes fixed."""
    current: Tuning
    if kernel == "decode":
        current, rings, cell = tuning.decode_tuning(DEVICE, heads.dim, heads.kv_dtype.itemsize), 2, DECODE_CELL
    else:
        current, rings, cell = tuning.prefill_tuning(DEVICE, heads.dim, heads.kv_dtype.itemsize), 1, (1, PROMPT)
    sizes = [(tile, stages) for tile in TILES for stages in STAGES]
    tile_bytes = rings * 2 * heads.dim * heads.kv_dtype.itemsize
    fitting = [(tile, stages) for tile, stages in sizes if tile * stages * tile_bytes <= RING_BYTES]
    return [Candidate(heads, replace(current, tile=tile, stages=stages), cell) for tile, stages in fitting]


def split_candidates(current: DecodeTuning) -> list[DecodeTuning]:
    """The sizes as they are, and each one changed alone."""
    changed = [replace(current, min_split=size) for size in MIN_SPLITS]
    changed += [replace(current, waves=size) for size in WAVES]
    changed += [replace(current, programs=size) for size in PROGRAMS]
    return list(dict.fromkeys([current, *changed]))


def best_changes(current: DecodeTuning, seconds: Mapping[DecodeTuning, Sequence[float]]) -> dict[str, int]:
    """Return the value of each size with the lowest geometric mean over the cells; it must be measured on all cells."""
    found = {field: getattr(current, field) for field in ("min_split", "waves", "programs")}
    least = {field: geometric_mean(seconds[current]) for field in found} if current in seconds else {}
    for candidate, times in seconds.items():
        for field in least:
            if (
                replace(candidate, **{field: getattr(current, field)}) == current
                and geometric_mean(times) < least[field]
            ):
                found[field], least[field] = getattr(candidate, field), geometric_mean(times)
    return found


def _key(heads: Heads) -> str:
    return f"{heads.dim}/{heads.kv_dtype.itemsize}"


def _write(context: Context, known: Mapping[str, Any]) -> None:
    """After every sweep, so that a run broken off leaves what it had found."""
    folder = context.results / "tuning"
    folder.mkdir(exist_ok=True)
    (folder / f"{DEVICE}.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


class _Sweep:
    """Candidates measured one after the other over pools that are made once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._random = np.random.default_rng(context.seed)
        self._pools = {heads: self._pool(heads) for heads in HEADS}

    def tiles(self, kernel: str) -> dict[Heads, tuple[Tuning, float]]:
        """The fastest of each head dimension and width, and its seconds."""
        candidates = [each for heads in HEADS for each in tile_candidates(kernel, heads)]
        best: dict[Heads, tuple[Tuning, float]] = {}
        for candidate, seconds in self._measure(f"{kernel} tiles", candidates, SHARES[kernel]).items():
            if candidate.heads not in best or seconds < best[candidate.heads][1]:
                best[candidate.heads] = candidate.tuning, seconds
        return best

    def splits(self, known: Mapping[str, Any]) -> dict[str, int]:
        """Tune the split of rows, with the tiles just found for the first head dimension."""
        heads, sizes = HEADS[0], dict(known["decode"])
        tiles = sizes.pop("tiles")[_key(heads)]
        current = DecodeTuning(**sizes, **tiles)
        tunings = split_candidates(current)
        candidates = [Candidate(heads, each, cell) for each in tunings for cell in SPLIT_CELLS]
        found = self._measure("decode splits", candidates, SHARES["splits"])
        seconds = {
            each: [found[Candidate(heads, each, cell)] for cell in SPLIT_CELLS]
            for each in tunings
            if all(Candidate(heads, each, cell) in found for cell in SPLIT_CELLS)
        }
        return best_changes(current, seconds)

    def _measure(self, table: str, candidates: Sequence[Candidate], share: float) -> dict[Candidate, float]:
        """Seconds of those that compiled and ran."""
        left_s = self._context.recorder.left_s
        programs = Programs({each: each.wanted for each in candidates}, share * left_s)
        if programs.is_disturbed:
            self._context.recorder.note(DISTURBED)
        found: dict[Candidate, float] = {}

        def measure(candidate: Candidate, program: jax.stages.Compiled) -> None:
            found[candidate] = self._time(candidate, program)
            self._record(table, candidate, found[candidate])

        for candidate in candidates:
            name = f"{table}, {_key(candidate.heads)}, {candidate.tuning}"
            try:
                program = programs[candidate]
            except Exception as error:  # most often too little shared memory
                self._context.recorder.note(f"{name}: left out: {one_line(error)}")
                continue
            self._context.recorder.attempt(name, partial(measure, candidate, program))
        return found

    def _time(self, candidate: Candidate, program: jax.stages.Compiled) -> float:
        heads, (batch, length) = candidate.heads, candidate.cell
        k, v = self._pools[heads]
        arguments: tuple[jax.Array, ...]
        if isinstance(candidate.tuning, PrefillTuning):
            table = scattered_tables(self._random, k.shape[1], 1, length, length, 1)[0]
            arguments, repeats = (queries(self._random, heads, length), k, v, table), 1
        else:
            repeats = heads.num_repeats(batch)
            tables = scattered_tables(self._random, k.shape[1], batch, length, LONGEST)
            lengths = jnp.full(batch, length, jnp.int32)
            arguments = (queries(self._random, heads, batch), k, v, tables, lengths)
        timing = time_calls(lambda: program(*arguments), jax.block_until_ready, budget_s=CELL_BUDGET_S)
        return timing.median_s / repeats

    def _record(self, table: str, candidate: Candidate, seconds: float) -> None:
        heads, (batch, length) = candidate.heads, candidate.cell
        is_decode = isinstance(candidate.tuning, DecodeTuning)
        self._context.recorder.figure(
            table,
            head_dim=heads.dim,
            kv=heads.kv_dtype.name,
            rows=batch,
            tokens=length,
            **asdict(candidate.tuning),
            us=seconds * 1e6,
            of_copy=self._context.share_of_copy(heads.decode_bytes(batch, length), seconds) if is_decode else None,
            of_matmul=None if is_decode else self._context.share_of_matmul(heads.prefill_flops(length), seconds),
        )

    def _pool(self, heads: Heads) -> tuple[jax.Array, jax.Array]:
        config = decoder(LLAMA_8B)
        pool = random_pool(heads.pool(NUM_TOKENS), heads.dtype, make_sharding(config, MeshShape()), self._context.seed)
        return pool.k.astype(heads.kv_dtype), pool.v.astype(heads.kv_dtype)
