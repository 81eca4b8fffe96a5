"""Attention of segments on a B200 by its PTX, in a process of its own: `python -m tests.ptx.blackwell [mutants]`.

Prints a line of JSON: the error of each case relative to its tolerance, or the instructions that can be left out without
being noticed. It is a process because Mosaic GPU (jax 0.11.2 and 0.12.0) assembles all kernels of a process for the
architecture of the first one, and Hopper's assembler does not know these instructions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.paged_attention import layout
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, TOLERANCES, Case, expected, operands
from jaxserve_kernels.paged_attention.tuning import prefill_tuning

from tests.aot.devices import B200
from tests.ptx.launch import SCHEDULES, Launched, emulated
from tests.ptx.machine import Schedule
from tests.ptx.mutants import Mutants
from tests.ptx.parser import Instruction

NUM_PROGRAMS = 2
"""Few, so that each does several units."""
BLACKWELL = [
    CASES[13],
    Case((3, 150), (667, 200), 3, 1, dim=128, page_size=32, sliding_window=200, softcap=10.0, has_sinks=True),
    Case((1, 40, 1), (30, 40, 20), num_heads=2, num_kv_heads=2, has_sinks=True, padding=9),
    Case((150,), (500,), num_heads=2, num_kv_heads=1, page_size=128, scale=1.0),
    Case((128, 5), (300, 140), num_heads=4, num_kv_heads=1, dim=128, dtype="float16", page_size=256, scale=1.0),
    CASES[20],
]
"""Single heads, pairs, and both; windows that leave whole tiles out; rows without keys; maxima that grow by far, and not."""
MUTANT = BLACKWELL[3]
MUTANT_SCHEDULES = (*SCHEDULES, Schedule(seed=2, copies=0.003, matmuls=0.0))


def attend(case: Case, schedules: Sequence[Schedule], num_programs: int) -> tuple[float, Launched]:
    """Return the error, and the launch."""
    given = operands(case)
    q, k, v, tables, lengths, starts = (jnp.asarray(each) for each in given[:6])
    sizes = replace(prefill_tuning(B200.name, case.dim, k.dtype.itemsize), programs=num_programs, stages=2)
    sinks = None if given.sinks is None else jnp.asarray(given.sinks)
    with emulated(schedules, B200, is_first=True) as launches:
        from jaxserve_kernels.paged_attention.gpu import tcgen05, tcgen05_attention

        def run(*pool: jax.Array) -> jax.Array:
            first = jnp.int32(case.num_decode_rows)
            ragged = layout.ragged_layout(starts, first, num_tokens=len(q), tiling=tcgen05_attention.TILING)
            return tcgen05.prefill(q, *pool, ragged, scoring=case.scoring, sinks=sinks, tuning=sizes)

        found = np.asarray(jax.jit(run)(k, v, jnp.int32(LAYER), tables, lengths), np.float64)
    own = slice(int(starts[case.num_decode_rows]), int(starts[-1]))
    difference = np.abs(found[own] - expected(case, given)[own])
    return float(difference.max()) / TOLERANCES[case.dtype], launches[-1]


def _needed(mutants: Mutants) -> Iterator[Instruction]:
    """Instructions of which none may be missing: not those that only wait for the end, or for what others wait for as well."""
    commits = mutants.of("tcgen05.commit")
    yield from commits
    for opcode in ("tcgen05.wait", "tcgen05.fence::before", "fence.proxy.async", "cp.async.bulk.wait_group"):
        yield from mutants.of(opcode)
    yield from mutants.of("tcgen05.fence::after", in_fetcher=False)
    (*_, of_queries, _, _) = commits
    yield from (each for each in mutants.of("mbarrier.try_wait") if each.line < of_queries.line)


def main(*words: str) -> int:
    """Print what was found."""
    if "mutants" in words:
        mutants = Mutants(attend(MUTANT, MUTANT_SCHEDULES, 1)[1], MUTANT_SCHEDULES)
        assert not mutants.is_caught(lambda instruction: False)
        needed = list(_needed(mutants))
        missed = [str(each) for each in needed if not mutants.is_caught(each.__eq__)]
        print(json.dumps({"tried": len(needed), "missed": missed}))
    else:
        print(json.dumps({str(case): attend(case, SCHEDULES, NUM_PROGRAMS)[0] for case in BLACKWELL}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
