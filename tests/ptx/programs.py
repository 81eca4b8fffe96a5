"""Small programs for tests of the emulator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.ptx.decode import decode
from tests.ptx.machine import WARP, Launch, Schedule, run_grid
from tests.ptx.memory import Bytes, GlobalMemory
from tests.ptx.parser import parse
from tests.ptx.tensor_map import TensorMap

SHARED_BYTES = 16384
HEADER = """
.version 9.0
.target sm_90a
.visible .entry kernel(
	.param .u64 .ptr .align 256 operand,
	.param .u64 .ptr .align 256 result,
	.param .align 64 .b8 maps[256]
)
{
	.reg .pred 	%p<8>;
	.reg .b16 	%rs<8>;
	.reg .b32 	%r<32>;
	.reg .b64 	%rd<8>;
	.shared .align 16 .b8 __dynamic_shmem__0;
	ld.param::entry.b64 	%rd1, [operand];
	ld.param::entry.b64 	%rd2, [result];
	mov.b64 	%rd3, maps;
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd4, %r1, 4;
	add.s64 	%rd1, %rd1, %rd4;
	add.s64 	%rd2, %rd2, %rd4;
	setp.eq.b32 	%p1, %r1, 0;
"""
"""Each thread has the address of its own number of the operand and of the result; %p1 is set in the first one."""


def run(
    body: str,
    operand: np.ndarray,
    result_size: int,
    num_threads: int = WARP,
    maps: Mapping[int, TensorMap] | None = None,
    memory: GlobalMemory | None = None,
) -> Bytes:
    """The bytes of the result of one block that is given an operand; copies and matmuls are done late."""
    memory = memory or GlobalMemory([operand.view(np.uint8).copy()], [result_size])
    parameters = {"operand": memory.arrays[0].base, "result": memory.arrays[-1].base}
    launch = Launch(1, num_threads, SHARED_BYTES, parameters, maps or {})
    source = parse(f"{HEADER}{body}\n\tret;\n}}\n")
    run_grid(decode(source), launch, memory, Schedule(seed=0, copies=0.0, matmuls=0.0))
    return memory.arrays[-1].data
