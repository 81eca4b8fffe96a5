"""The emulator's tensor memory, by small programs: what a matmul computes there, and what is found wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.memory import SHARED_BASE, GlobalMemory
from tests.ptx.operands import PARAMETER_BASE
from tests.ptx.programs import run
from tests.ptx.tensor_map import TensorMap
from tests.ptx.test_machine import WAIT

ROWS, COLUMNS, DEPTH = 128, 8, 16
DONE = WAIT.replace("__dynamic_shmem__0]", "__dynamic_shmem__0+8]")
SHAPE = 1 << 4 | 1 << 7 | 1 << 10 | COLUMNS >> 3 << 17 | ROWS >> 4 << 24
"""Sums in float32 of bfloat16 numbers."""
LOAD = """
	tcgen05.fence::after_thread_sync;
	tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r8,%r9,%r10,%r11,%r12,%r13,%r14,%r15}, [%r7];
	tcgen05.wait::ld.sync.aligned;"""
AGAIN = """
	tcgen05.mma.cta_group::1.kind::f16 [%r7], %rd6, %rd7, SHAPE, %p4;"""
COMMIT = """
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [__dynamic_shmem__0+8];"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, %r6;"
MATMUL = f"""
	mov.b32 %r6, 32;
	setp.ge.u32 %p2, %r1, 32;
	not.pred %p5, %p1;
	@%p1 mbarrier.init.shared.b64 [__dynamic_shmem__0], 1;
	@%p1 mbarrier.init.shared.b64 [__dynamic_shmem__0+8], 1;
	@%p2 bra ALLOCATED;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [__dynamic_shmem__0+16], %r6;
	ALLOCATED:
	bar.sync 0;
	ld.shared.b32 %r7, [__dynamic_shmem__0+16];
	@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd5, [__dynamic_shmem__0], 4352;
	mov.b32 %r2, __dynamic_shmem__0;
	add.s32 %r3, %r2, 1024;
	add.s32 %r4, %r2, 8192;
	add.s64 %rd6, %rd3, 128;
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd3, {{0, 0}}], [%r2];
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd6, {{0, 0}}], [%r2];
	{WAIT}
	mov.b64 %rd6, DESCRIPTOR_A;
	mov.b64 %rd7, DESCRIPTOR_B;
	mov.pred %p3, 0;
	mov.pred %p4, -1;
	@%p5 bra ISSUED;
	tcgen05.mma.cta_group::1.kind::f16 [%r7], %rd6, %rd7, SHAPE, %p3;
	{AGAIN}
	{COMMIT}
	ISSUED:
	{DONE}
	{LOAD}
	mul.wide.u32 %rd4, %r1, 28;
	add.s64 %rd2, %rd2, %rd4;
	st.global.v4.b32 [%rd2], {{%r8, %r9, %r10, %r11}};
	st.global.v4.b32 [%rd2+16], {{%r12, %r13, %r14, %r15}};
	bar.sync 0;
	@%p2 bra FREED;
	{FREE}
	FREED:
"""


def _descriptor(start: int) -> int:
    """Rows of 32 swizzled bytes, eight of them in 256."""
    return start >> 4 | 256 >> 4 << 32 | 3 << 62


def _multiply(body: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of a program on two tiles, and the matmul of these."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((rows, DEPTH)).astype(ml_dtypes.bfloat16) for rows in (ROWS, COLUMNS))
    memory = GlobalMemory([a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)], [ROWS * COLUMNS * 4])
    maps = {
        PARAMETER_BASE + 128 * i: TensorMap(memory.arrays[i], 0, 2, (rows, DEPTH), (DEPTH, 1), (rows, DEPTH), 32)
        for i, rows in enumerate((ROWS, COLUMNS))
    }
    for name, start in (("A", SHARED_BASE + 1024), ("B", SHARED_BASE + 8192)):
        body = body.replace(f"DESCRIPTOR_{name}", str(_descriptor(start)))
    made = run(body.replace("SHAPE", str(SHAPE)), a, 0, num_threads=ROWS, maps=maps, memory=memory)
    return made.view(np.float32).reshape(ROWS, COLUMNS), a.astype(np.float32) @ b.astype(np.float32).T


def test_matmuls_into_tensor_memory_begin_with_zero_and_add() -> None:
    found, wanted = _multiply(MATMUL)
    np.testing.assert_allclose(found, 2 * wanted, rtol=1e-5)


def test_threads_read_what_they_wrote() -> None:
    """Each thread has a row; twice what it holds is written over it."""
    doubled = "\n".join(f"add.f32 %r{i}, %r{i}, %r{i};" for i in range(8, 16))
    store = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7], {%r8,%r9,%r10,%r11,%r12,%r13,%r14,%r15};"
    body = MATMUL.replace(LOAD, f"{LOAD}{doubled}{store}tcgen05.wait::st.sync.aligned;{LOAD}")
    found, wanted = _multiply(body)
    np.testing.assert_allclose(found, 4 * wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (DONE, "", "read by threads while a matmul uses it|whose load was not fenced"),
        (COMMIT, "", "deadlock"),
        (FREE, "", "did not free its tensor memory"),
        (FREE, FREE.replace("%r6", "64"), "not those allocated"),
        ("tcgen05.fence::after_thread_sync;", "", "did not fence after the matmul"),
        ("tcgen05.wait::ld.sync.aligned;", "", "freed while it is used"),
        ("[%r7];", "[%r7+32];", "32 are allocated"),
        (AGAIN, AGAIN.replace("[%r7]", "[%r7+4]"), "another one that is not done"),
        ("@%p5 bra", "@%p2 bra", "32 threads issue a matmul"),
        (WAIT, "", "a matmul reads shared memory that a copy is to write"),
        ("mov.b32 %r6, 32;", "mov.b32 %r6, 24;", "an allocation of 24 columns"),
        (
            LOAD,
            f"{LOAD} tcgen05.st.sync.aligned.32x32b.x1.b32 [%r7], {{%r8}}; tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r8}}, [%r7];",
            "before they waited for its last load or store",
        ),
        (
            "@%p5 bra",
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r7], {%r1}; tcgen05.wait::st.sync.aligned; bar.sync 0; @%p5 bra",
            "whose store was not fenced",
        ),
        (
            "@%p5 bra",
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r7], {%r1}; tcgen05.wait::st.sync.aligned;"
            "tcgen05.fence::before_thread_sync; bar.sync 0; @%p5 bra",
            "whose store it has not seen",
        ),
    ],
)
def test_hazards_of_tensor_memory_are_found(old: str, new: str, problem: str) -> None:
    body = MATMUL.replace(old, new, 1)
    assert body != MATMUL
    with pytest.raises(Hazard, match=problem):
        _multiply(body)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SHAPE", str(SHAPE | 1 << 13)),
        ("SHAPE", str(SHAPE ^ 3 << 26)),
        ("[%r7];", "[%r7+65536];"),
        ("cta_group::1.kind::f16", "cta_group::2.kind::f16"),
        ("32x32b.x8", "16x256b.x8"),
        (AGAIN, "ld.global.b32 %r8, [%rd1];"),
    ],
)
def test_what_is_not_known_of_tensor_memory_is_refused(old: str, new: str) -> None:
    body = MATMUL.replace(old, new, 1)
    assert body != MATMUL
    with pytest.raises(NotModelled):
        _multiply(body)
