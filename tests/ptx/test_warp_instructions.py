"""Instructions that GPUs have from compute capability 8.0 on: what they compute, and what is wrong without a wait or barrier.

Places of numbers in registers are written here as the PTX ISA has them, number by number.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.machine import WARP
from tests.ptx.programs import run

TWO_WARPS = 2 * WARP
DIMENSIONS = "%r2, %r3, %r4, %r5, %r6, %r7, %r8, %r9, %r10, %r11".split(", ")


def _fragment_a(matrix: np.ndarray) -> np.ndarray:
    """(32, 8): number i of each thread of a 16 x 16 operand."""
    out = np.empty((WARP, 8), matrix.dtype)
    for thread in range(WARP):
        group, place = thread >> 2, thread % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            out[thread, i] = matrix[row, place * 2 + (i & 1) + (8 if i >= 4 else 0)]
    return out


def _fragment_b(matrix: np.ndarray) -> np.ndarray:
    """(32, 4): number i of each thread of a 16 x 8 operand."""
    out = np.empty((WARP, 4), matrix.dtype)
    for thread in range(WARP):
        group, place = thread >> 2, thread % 4
        for i in range(4):
            out[thread, i] = matrix[place * 2 + (i & 1) + (8 if i >= 2 else 0), group]
    return out


def _fragment_c(matrix: np.ndarray) -> np.ndarray:
    """(32, 4): number i of each thread of 16 x 8 sums."""
    out = np.empty((WARP, 4), matrix.dtype)
    for thread in range(WARP):
        group, place = thread >> 2, thread % 4
        for i in range(4):
            out[thread, i] = matrix[group if i < 2 else group + 8, place * 2 + (i & 1)]
    return out


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_warps_matmul_is_that_of_its_fragments(dtype: str) -> None:
    random = np.random.default_rng(0)
    numbers = np.dtype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16)
    a, b = (random.standard_normal(shape).astype(numbers) for shape in ((16, 16), (16, 8)))
    c = random.standard_normal((16, 8)).astype(np.float32)
    words = [_fragment_a(a).view(np.uint32), _fragment_b(b).view(np.uint32), _fragment_c(c).view(np.uint32)]
    operand = np.concatenate(words, axis=1).T.reshape(-1)  # (10, 32): a register of all threads each
    loads = "".join(f"ld.global.b32 {name}, [%rd1+{128 * i}];" for i, name in enumerate(DIMENSIONS))
    opcode = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    body = f"""{loads}
        {opcode} {{%r12,%r13,%r14,%r15}}, {{%r2,%r3,%r4,%r5}}, {{%r6,%r7}}, {{%r8,%r9,%r10,%r11}};
        mul.wide.u32 %rd4, %r1, 12; add.s64 %rd2, %rd2, %rd4;
        st.global.v4.b32 [%rd2], {{%r12, %r13, %r14, %r15}};"""
    found = run(body, operand, 4 * 4 * WARP).view(np.float32).reshape(WARP, 4)
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(found, _fragment_c(wanted), rtol=1e-5, atol=1e-5)


COPY = """
    mul.wide.u32 %rd5, %r1, 12; add.s64 %rd6, %rd1, %rd5;
    mov.b32 %r2, __dynamic_shmem__0; shl.b32 %r3, %r1, 4; add.s32 %r2, %r2, %r3;
    cp.async.cg.shared.global [%r2], [%rd6], 16;
    cp.async.commit_group;
"""
"""Each thread copies 16 bytes; %r2 is where to."""


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded_by_rows_or_by_columns(count: int, is_transposed: bool) -> None:
    """Row r of matrix m is where thread 8 m + r says: here in reverse order."""
    operand = np.arange(WARP * 8, dtype=np.uint16).reshape(4, 8, 8)
    names = DIMENSIONS[2 : 2 + count]
    transposed = ".trans" if is_transposed else ""
    stores = "".join(f"st.global.b32 [%rd2+{128 * i}], {name};" for i, name in enumerate(names))
    body = f"""{COPY} cp.async.wait_group 0; bar.sync 0;
        sub.s32 %r3, 31, %r1; shl.b32 %r3, %r3, 4; mov.b32 %r2, __dynamic_shmem__0; add.s32 %r2, %r2, %r3;
        ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{", ".join(names)}}}, [%r2];
        {stores}"""
    found = run(body, operand.reshape(-1), 4 * WARP * count).view(np.uint16).reshape(count, WARP, 2)
    for i in range(count):
        matrix = operand[3 - i, ::-1]
        for thread in range(WARP):
            first, second = divmod(thread, 4)[0], thread % 4 * 2
            pair = [matrix[second + j, first] if is_transposed else matrix[first, second + j] for j in range(2)]
            assert found[i, thread].tolist() == pair


READ_OTHERS = """
    mov.b32 %r4, __dynamic_shmem__0; sub.s32 %r5, 63, %r1; shl.b32 %r5, %r5, 4; add.s32 %r4, %r4, %r5;
    ld.shared.b32 %r6, [%r4];
    st.global.b32 [%rd2], %r6;
"""
"""Reads the first number of what the thread 63 - t copied."""
WAIT, MEET = "cp.async.wait_group 0;", "bar.sync 0;"
SECOND = "add.s32 %r7, %r2, 1024; cp.async.cg.shared.global [%r7], [%rd6], 16; cp.async.commit_group;"


def _two_warps(body: str) -> np.ndarray:
    operand = np.arange(4 * TWO_WARPS, dtype=np.int32)
    return run(body, operand, 4 * TWO_WARPS, num_threads=TWO_WARPS).view(np.int32)


@pytest.mark.parametrize(
    "wait",
    [f"{WAIT} {MEET}", f"{SECOND} cp.async.wait_group 1; {MEET} {READ_OTHERS}{WAIT}"],
    ids=["for all", "for all but the last group"],
)
def test_copies_that_are_waited_for_are_there(wait: str) -> None:
    body = f"{COPY}{wait}" if READ_OTHERS in wait else f"{COPY}{wait}{READ_OTHERS}"
    np.testing.assert_array_equal(_two_warps(body), 4 * np.arange(TWO_WARPS)[::-1])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (f"{COPY}{MEET}{READ_OTHERS}{WAIT}", "read shared memory that a copy is to write"),
        (f"{COPY} cp.async.wait_group 1; {MEET}{READ_OTHERS}{WAIT}", "read shared memory that a copy is to write"),
        (f"{COPY.replace('cp.async.commit_group;', '')}{WAIT}{MEET}{READ_OTHERS}", "read shared memory that a copy"),
        (f"{COPY}{WAIT}{READ_OTHERS}", "written, with no barrier in between|a copy is to write"),
        (f"{COPY}{WAIT} ld.shared.b32 %r6, [%r2];", "reads shared memory that was written, with no barrier"),
        (f"{COPY}{MEET}", "did not wait"),
        (f"{COPY}{WAIT}{MEET}{READ_OTHERS}{COPY}{WAIT}", "with no barrier|a copy is to write"),
        (f"{COPY}{WAIT}{MEET}{READ_OTHERS} st.shared.b32 [%r2], %r1;", "with no barrier"),
        (f"st.shared.b32 [__dynamic_shmem__0], %r1; {WAIT}", "writes shared memory that was written, with no barrier"),
        (f"{COPY} st.shared.b32 [%r2], %r1; {WAIT}", "threads write shared memory that a copy"),
        ("add.s64 %rd1, %rd1, 4; " + COPY, "not aligned"),
    ],
    ids=[
        "no wait",
        "a wait for all but one",
        "no group",
        "no barrier",
        "no barrier in its own warp",
        "no wait at the end",
        "copied over before all have read",
        "written over before all have read",
        "written by two warps",
        "written while a copy is on its way",
        "not aligned",
    ],
)
def test_missing_waits_and_barriers_are_found(body: str, problem: str) -> None:
    with pytest.raises(Hazard, match=problem):
        _two_warps(body.replace("st.global.b32 [%rd2], %r6;", "") if body.count(COPY.strip()) > 1 else body)


@pytest.mark.parametrize(
    "body",
    [
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        "cp.async.ca.shared.global [%r1], [%rd1], 16, 4;",
        "cp.async.wait_all;",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r2}, {%r3}, {%r4}, {%r5};",
        "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%r2, %r3, %r4, %r5}, [%r6];",
    ],
    ids=["8 bytes", "zero fill", "wait for all", "other shape", "other space"],
)
def test_what_is_not_known_of_them_is_refused(body: str) -> None:
    with pytest.raises(NotModelled):
        _two_warps(body)
