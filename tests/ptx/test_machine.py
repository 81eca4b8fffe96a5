"""The emulator itself, by small programs: what it computes, what it finds wrong, and what it refuses to know."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.machine import WARP
from tests.ptx.memory import SHARED_BASE, Array, Bytes, GlobalMemory, SharedMemory
from tests.ptx.operands import PARAMETER_BASE
from tests.ptx.programs import SHARED_BYTES, run
from tests.ptx.tensor_map import TensorMap

BARRIER = "@%p1 mbarrier.init.shared::cta.b64 [__dynamic_shmem__0], {};"
ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64 _, [__dynamic_shmem__0], 1;"
WAIT = """
	{
	.reg .pred P1;
	AGAIN: mbarrier.try_wait.parity.shared.b64 P1, [__dynamic_shmem__0], 0, 1000;
	@P1 bra.uni DONE;
	bra.uni AGAIN;
	DONE:
	}"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd5], [__dynamic_shmem__0+1024], 128;"


def _run_any(body: str) -> Bytes:
    return run(body, np.arange(WARP, dtype=np.int32), 4 * WARP)


def test_numbers_are_read_computed_with_and_written() -> None:
    body = "ld.global.b32 %r2, [%rd1]; mad.lo.s32 %r3, %r2, -3, %r1; st.global.b32 [%rd2], %r3;"
    made = run(body, np.arange(100, 100 + WARP, dtype=np.int32), 4 * WARP)
    np.testing.assert_array_equal(made.view(np.int32), [-3 * (100 + i) + i for i in range(WARP)])


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("ld.global.s8 %r2, [%rd1];", -128),
        ("ld.global.u8 %r2, [%rd1];", 128),
        ("ld.global.b32 %r2, [%rd1]; bfe.s32 %r2, %r2, 4, 4;", -8),
        ("ld.global.b32 %r2, [%rd1]; prmt.b32 %r2, %r2, 0, 0x9854;", 0xFF0000),
        ("mov.b32 %r3, 0x00F0; mov.b32 %r4, 0x3C; lop3.b32 %r2, %r3, %r4, 5, (0xf0 & 0xcc) ^ 0xaa;", 0x30 ^ 5),
        ("mov.b32 %r3, 0x00F0; mov.b32 %r4, 0x3C; lop3.b32 %r2, %r3, %r4, 5, 0x6a;", 0x30 ^ 5),
        (
            "mov.b32 %r3, 0x00830003; mov.b32 %r4, 0x7F007F00; mov.b32 %r5, 0xC000C000;"  # 131 and 3 times 2 ** -133
            "fma.rn.bf16x2 %r2, %r3, %r4, %r5;",  # times 2 ** 127, less 2
            0x3D40BFFA,
        ),
        (
            "mov.b32 %r3, 0x64830001; mov.b32 %r4, 0x3C005C00; mov.b32 %r5, 0xE4800000;"  # 1155, and 2 ** -24
            "fma.rn.f16x2 %r2, %r3, %r4, %r5;",  # less 1152, and times 256
            0x42000100,
        ),
        ("mov.b32 %r3, -7; shr.s32 %r2, %r3, 99;", -1),
        (
            "mov.b32 %r2, 7; setp.ne.b32 %p2, %r1, 0; @%p2 bra SKIP; mov.b32 %r2, 5; SKIP: xor.b32 %r2, %r2, 2;",
            [7] + [5] * 31,
        ),
        (  # 1.5 and 2 times 3 and 0.5, plus 1 each: 5.5 and 2
            "mov.b64 %rd5, {0x3FC00000, 0x40000000}; mov.b64 %rd6, {0x40400000, 0x3F000000};"
            "mov.b64 %rd7, {0x3F800000, 0x3F800000}; fma.rn.f32x2 %rd5, %rd5, %rd6, %rd7;"
            "mov.b64 {%r2, %r3}, %rd5; xor.b32 %r2, %r2, %r3;",
            0x40B00000 ^ 0x40000000,
        ),
        ("cvt.rn.f32.s32 %r3, %r1; redux.sync.max.NaN.f32 %r2, %r3, -1;", 0x41F80000),
        ("mov.b32 %r3, 0f40000000; rcp.approx.f32 %r2, %r3;", 0x3F000000),
        ("mov.b32 %r3, 0x7FC00000; setp.leu.f32 %p2, %r3, 0f00000000; selp.b32 %r2, 1, 2, %p2;", 1),
        ("mov.b32 %r3, -7; shr.u32 %r2, %r3, 32;", 0),
        ("mov.b32 %r3, -7; mov.b32 %r2, 5; shf.l.wrap.b32 %r2, %r3, %r2, 33;", 11),
        ("mov.b32 %r3, -7; mul.hi.s32 %r2, %r3, 1431655766;", -3),
        ("mov.b32 %r3, 0f3FC00000; cvt.rn.bf16x2.f32 %r2, %r3, 0f00000000;", 0x3FC00000),
        ("cvt.rn.f16.f32 %rs1, 0f3FC00000; mov.b32 %r2, {%rs1, %rs1};", 0x3E003E00),
        ("cvt.s8.s32 %rs1, 200; mov.b32 %r2, {%rs1, %rs1};", -56 * 65537 + 65536),
        ("shfl.sync.bfly.b32 %r3, %r1, 3, 31, -1; shfl.sync.idx.b32 %r2, %r3, 4, 31, -1;", 7),
    ],
)
def test_instructions_give_what_the_language_says(body: str, wanted: int | list[int]) -> None:
    operand = np.full(WARP, 0x80, np.int32)
    made = run(f"{body} st.global.b32 [%rd2], %r2;", operand, 4 * WARP)
    np.testing.assert_array_equal(made.view(np.int32), wanted)


@pytest.mark.parametrize(
    "body",
    [
        "add.f64 %rd1, %rd1, %rd1;",
        "add.sat.s32 %r2, %r1, %r1;",
        "ld.volatile.global.b32 %r2, [%rd1];",
        "mbarrier.arrive.noComplete.b64 _, [%rd1], 1;",
        "cp.async.bulk.wait_group.read 0;",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1}, %rd1, %rd2, %p1, 1, 1;",
        "lop3.b32 %r2, %r1, %r1, %r1, 0xe8;",
        "shfl.sync.idx.b32 %r2, %r1, 0, 15, -1;",
        "@%p1 add.s32 %r2, %r1, %r1;",
        "@%p1 bra ELSEWHERE; st.global.b32 [%rd2], %r1; ELSEWHERE: ret;",
        "mbarrier.arrive.noComplete.b64 _, [__dynamic_shmem__0], 1;",
        "mov.b32 %r2, %laneid;",
        "mov.b32 %r99, %r1;",
        ".pragmatic;",
    ],
)
def test_what_is_not_known_is_refused(body: str) -> None:
    with pytest.raises(NotModelled):
        _run_any(body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("add.s32 %r2, %r3, %r1;", "before anything was written"),
        ("ld.global.b32 %r2, [%rd1+4];", "device memory is accessed out of bounds"),
        ("ld.global.b32 %r2, [%rd1+-4];", "device memory is accessed out of bounds"),
        ("ld.shared.b32 %r2, [__dynamic_shmem__0+16384];", "shared memory is accessed out of bounds"),
        ("ld.shared.v2.b32 {%r2, %r3}, [__dynamic_shmem__0+4];", "not aligned"),
        ("st.global.b32 [%rd1], %r1;", "an operand is written"),
        ("st.global.b32 [%rd2], %r1; st.global.b32 [%rd2], %r1;", "written twice"),
        (f"{ARRIVE}", "no barrier was made"),
        (f"{BARRIER.format(33)} {ARRIVE} {WAIT}", "deadlock"),
        (f"{BARRIER.format(33)} {ARRIVE}", "ended in a phase"),
        (f"{BARRIER.format(16)} {ARRIVE}", "more arrivals than it counts"),
        (f"{BARRIER.format(32)} ld.shared.b32 %r2, [__dynamic_shmem__0+4];", "the memory of a barrier"),
        (f"{BARRIER.format(32)} {BARRIER.format(32)}", "the memory of a barrier"),
        (
            f"{BARRIER.format(32)} mbarrier.arrive.noComplete.shared.b64 %rd5, [__dynamic_shmem__0], 1;",
            "must not complete",
        ),
        ("bar.sync 1, 64;", "deadlock"),
        ("@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {0, 0}], [%rd2];", "no tensor map"),
        (f"add.s64 %rd5, %rd2, 0; @%p1 {STORE}", "did not wait for its copies"),
        (f"add.s64 %rd5, %rd2, 4; @%p1 {STORE}", "is not aligned"),
    ],
)
def test_hazards_are_found(body: str, problem: str) -> None:
    with pytest.raises(Hazard, match=problem):
        _run_any(body)


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_copy_of_what_threads_wrote_asks_for_a_fence(is_fenced: bool) -> None:
    fence = "fence.proxy.async.shared::cta;" if is_fenced else ""
    body = f"""
        shl.b32 %r2, %r1, 2; add.s32 %r2, %r2, __dynamic_shmem__0; st.shared.b32 [%r2+1024], %r1; {fence}
        add.s64 %rd5, %rd2, 0; @%p1 {STORE}
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    if is_fenced:
        np.testing.assert_array_equal(_run_any(body).view(np.int32), np.arange(WARP))
        return
    with pytest.raises(Hazard, match="did not fence"):
        _run_any(body)


def _array(data: np.ndarray) -> Array:
    return GlobalMemory([data.reshape(-1).view(np.uint8)], []).arrays[0]


@pytest.mark.parametrize("swizzle", [32, 64, 128, 16])
def test_boxes_are_swizzled_and_zero_outside_the_array(swizzle: int) -> None:
    """Piece c, of 16 bytes, of row r lies at c xor r, in rows of 128 bytes."""
    rows, columns = 20, min(swizzle, 128) // 2
    data = np.arange(rows * 64, dtype=np.int16).reshape(rows, 64)
    shared = SharedMemory(SHARED_BYTES)
    box = TensorMap(_array(data), 0, 2, (rows, 64), (64, 1), (8, columns), swizzle)
    shared.reserve(box.shared_addresses(SHARED_BASE), "a copy")(box.read((16, 0)))
    wanted = np.zeros((8, columns), np.int16)
    wanted[:4] = data[16:, :columns]
    found = shared.load(0, SHARED_BASE + 2 * np.arange(8 * columns), 2).view(np.int16).reshape(-1, 8)
    pieces = np.arange(len(found))
    mask = {128: 7, 64: 3, 32: 1, 16: 0}[swizzle]
    np.testing.assert_array_equal(found[pieces ^ (pieces // 8 & mask)], wanted.reshape(-1, 8))


@pytest.mark.parametrize(
    ("strides", "box", "swizzle"), [((60, 1), (8, 64), 128), ((64, 1), (8, 64), 64), ((64, 1), (8, 4), 128)]
)
def test_maps_that_the_driver_would_refuse_are_hazards(
    strides: tuple[int, int], box: tuple[int, int], swizzle: int
) -> None:
    with pytest.raises(Hazard, match="the driver would refuse"):
        TensorMap(_array(np.zeros((20, 64), np.int16)), 0, 2, (20, 64), strides, box, swizzle)


FENCE, FINISH = "wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
MATMUL = """
	@%p1 mbarrier.init.shared::cta.b64 [__dynamic_shmem__0], 1;
	bar.sync 0;
	@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd5, [__dynamic_shmem__0], 9216;
	mov.b32 %r2, __dynamic_shmem__0;
	add.s32 %r3, %r2, 1024;
	add.s32 %r4, %r2, 9216;
	add.s64 %rd6, %rd3, 128;
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd3, {0, 0}], [%r2];
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd6, {0, 0}], [%r2];
	WAIT
	mov.b32 %r8, 0; mov.b32 %r9, 0; mov.b32 %r10, 0; mov.b32 %r11, 0;
	mov.b64 %rd6, DESCRIPTOR_A;
	mov.b64 %rd7, DESCRIPTOR_B;
	mov.pred %p2, -1;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r8,%r9,%r10,%r11}, %rd6, %rd7, %p2, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	mul.wide.u32 %rd4, %r1, 12;
	add.s64 %rd2, %rd2, %rd4;
	st.global.v4.b32 [%rd2], {%r8, %r9, %r10, %r11};
"""


def _descriptor(start: int) -> int:
    """Rows of 128 swizzled bytes, eight of them in 1024."""
    return start >> 4 | 1 << 16 | 1024 >> 4 << 32 | 1 << 62


def _multiply(body: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of a program on two tiles, and the matmul of their first inputs."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16) for rows in (64, 8))
    memory = GlobalMemory([a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)], [64 * 8 * 4])
    maps = {
        PARAMETER_BASE + 128 * i: TensorMap(memory.arrays[i], 0, 2, (rows, 64), (64, 1), (rows, 64), 128)
        for i, rows in enumerate((64, 8))
    }
    body = body.replace("WAIT", WAIT)
    for name, start in (("A", SHARED_BASE + 1024), ("B", SHARED_BASE + 9216)):
        body = body.replace(f"DESCRIPTOR_{name}", str(_descriptor(start)))
    made = run(body, a, 0, num_threads=128, maps=maps, memory=memory).view(np.float32).reshape(4, 8, 4, 2, 2)
    # Of a warp: row of eight, pair of columns, upper or lower eight rows, column of the pair.
    found = made.transpose(0, 3, 1, 2, 4).reshape(64, 8)
    return found, a[:, :16].astype(np.float32) @ b[:, :16].astype(np.float32).T


def test_a_matmul_of_copied_tiles_is_the_one_of_its_operands() -> None:
    found, wanted = _multiply(MATMUL)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("WAIT", "", "a matmul reads shared memory that a copy is to write"),
        ("WAIT", "ld.shared.b32 %r8, [%r3]; WAIT", "threads read shared memory that a copy is to write"),
        (
            "WAIT",
            "bar.sync 0; st.shared.b32 [%r3], %r2; WAIT",
            "threads write shared memory that a copy or a matmul still uses",
        ),
        (FENCE, "", "written after the last wgmma.fence"),
        (FENCE, f"{FENCE} mov.b32 %r9, 0;", "written after the last wgmma.fence"),
        (FINISH, "", "while a matmul adds to it"),
        (FINISH, f"mov.b32 %r9, 0; {FINISH}", "is written while a matmul adds to it"),
        (FINISH, f"bar.sync 0; st.shared.b32 [%r3], %r2; {FINISH}", "threads write shared memory that"),
        ("9216;\n", "9217;\n", "deadlock"),
        ("9216;\n", "1024;\n", "a matmul reads shared memory that a copy is to write"),
    ],
)
def test_hazards_of_copies_and_matmuls_are_found(old: str, new: str, problem: str) -> None:
    body = MATMUL.replace(old, new, 1)
    assert body != MATMUL
    with pytest.raises(Hazard, match=problem):
        _multiply(body)
