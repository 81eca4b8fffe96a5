"""Attention on `mma.sync` by the PTX that the compiler makes for an A100: against dense softmax, without a race."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, Case, Operands, error, long_row, operands
from jaxserve_kernels.paged_attention.layout import ragged_layout
from jaxserve_kernels.paged_attention.tuning import decode_tuning

from tests.aot.devices import A100, RTX4090, Target
from tests.ptx.launch import Launched, emulated
from tests.ptx.machine import Schedule
from tests.ptx.memory import GlobalMemory
from tests.ptx.mutants import Mutants

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SCHEDULES = (Schedule(seed=0, copies=0.0, matmuls=0.0),)
"""One will do: races and missing waits are found in any order."""
SIZES = replace(decode_tuning("mma", 64, 2), programs=3, min_split=64, long_split=128, waves=6)
"""Few programs, so that each does several units, and short parts."""


def _emulated(case: Case) -> AbstractContextManager[list[Launched]]:
    """Within it, kernels run as on an A100, but for heads of up to 256 bytes with the shared memory of an RTX 4090."""
    chip, small = A100.device.cuda, RTX4090.device.cuda
    assert chip is not None
    assert small is not None
    if case.dim * (1 if case.kv_dtype else 2) <= 256:
        chip = replace(chip, shared_bytes_per_block=small.shared_bytes_per_block)
    return emulated(SCHEDULES, Target(replace(A100.device, cuda=chip)))


def _by_kernel(case: Case, given: Operands) -> np.ndarray:
    with _emulated(case):
        return np.asarray(_attend(case, given))


def _attend(case: Case, given: Operands, **sizes: int) -> jax.Array:
    from jaxserve_kernels.paged_attention.gpu import mma_attention

    arrays = [jnp.asarray(each) for each in (given.q, given.k_pages, given.v_pages, np.int32(LAYER), given.tables)]
    sinks = None if given.sinks is None else jnp.asarray(given.sinks)
    lengths, starts = jnp.asarray(given.lengths), jnp.asarray(given.query_starts)
    options = {
        "scoring": case.scoring,
        "sinks": sinks,
        "tuning": replace(SIZES, stages=3 if case.dim == 64 else 2, **sizes),
    }

    def attend(*arrays: jax.Array) -> jax.Array:
        if case.is_decode:
            return mma_attention.decode_attention(*arrays, **options)
        ragged = ragged_layout(starts, jnp.int32(case.num_decode_rows), num_tokens=len(given.q))
        return mma_attention.mixed_attention(*arrays, ragged, **options)

    return jax.block_until_ready(jax.jit(attend)(*arrays, lengths))


DECODE = [
    *(CASES[i] for i in (1, 2)),
    Case((1, 1, 1), (129, 1, 70), num_heads=4, num_kv_heads=4, dim=128, page_size=128),
    Case((1, 1, 1), (33, 300, 0), num_heads=8, num_kv_heads=2, dim=128, dtype="float16", sliding_window=100),
    replace(CASES[8], lengths=(5, 150, 1, 0), num_heads=4, num_kv_heads=1),
    CASES[9],
    Case((1, 1), (129, 70), num_heads=4, num_kv_heads=2, dim=80, kv_dtype="int8"),
    Case((1, 1), (7, 90), dim=96, has_sinks=True, scale=0.25),
    *(CASES[i] for i in (3, 10, 5, 6)),
    Case((1, 1), (33, 300), num_heads=12, num_kv_heads=1, dim=128, page_size=64, kv_dtype="int8", has_sinks=True),
    Case((1, 1), (40, 200), dim=64, dtype="float16", kv_dtype="float8_e4m3fn", page_size=32, sliding_window=100),
    Case((1, 1), (61, 200), num_heads=12, num_kv_heads=1, dim=64, has_sinks=True, softcap=5.0),
]
"""Groups of 1, 2, 3, 4, 8 and 12 heads, all head dimensions, both types, 8-bit pools of both kinds, every option, rows
in several parts."""
MIXED = [
    Case((1, 5, 21), (50, 100, 41), num_heads=4, num_kv_heads=1, dim=128, has_sinks=True, padding=3),
    replace(CASES[18], counts=(1, 21), lengths=(30, 90)),
    Case((1, 21), (50, 41), num_kv_heads=1, dim=96, dtype="float16", page_size=32, kv_dtype="float8_e4m3fn", padding=3),
    CASES[15],
    CASES[20],
    replace(CASES[19], counts=(30,), num_heads=4),
    Case((1, 9), (30, 80), num_heads=8, num_kv_heads=1, dim=256, kv_dtype="float8_e4m3fn", softcap=10.0),
    Case((3, 40), (67, 110), num_heads=3, num_kv_heads=1, page_size=32, sliding_window=50),
    Case((1, 9, 1), (3, 80, 30), num_heads=8, num_kv_heads=1, dim=256, dtype="float16", softcap=10.0),
]


@pytest.mark.parametrize(
    "case",
    [each if i % 4 == 0 else pytest.param(each, marks=pytest.mark.exhaustive) for i, each in enumerate(DECODE)],
    ids=str,
)
def test_decode_equals_dense_softmax(case: Case) -> None:
    given = operands(case)
    assert error(case, given, _by_kernel(case, given)) <= 1


@pytest.mark.parametrize(
    "case",
    [*MIXED[::4], *(pytest.param(each, marks=pytest.mark.exhaustive) for i, each in enumerate(MIXED) if i % 4)],
    ids=str,
)
def test_mixed_steps_equal_dense_softmax(case: Case) -> None:
    given = operands(case)
    assert error(case, given, _by_kernel(case, given)) <= 1


NARROW = [(kv_dtype, dtype) for kv_dtype in ("int8", "float8_e4m3fn") for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [NARROW[0], NARROW[3], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in NARROW[1:3])],
)
def test_every_8_bit_number_is_upcast_exactly(kv_dtype: str, dtype: str) -> None:
    """A row of one token gives the value back; pools hold no NaN."""
    case = Case((1,) * 4, (1,) * 4, num_heads=1, num_kv_heads=1, dtype=dtype, kv_dtype=kv_dtype)
    given = operands(case)
    numbers = np.arange(256, dtype=np.uint8).view(given.v_pages.dtype).reshape(4, case.dim)
    numbers = np.where(np.isnan(numbers.astype(np.float32)), numbers[0, 0], numbers)
    for row, table in enumerate(given.tables):
        given.v_pages[LAYER, table[0], 0, 0] = numbers[row]
    np.testing.assert_array_equal(_by_kernel(case, given)[:, 0].astype(np.float32), numbers.astype(np.float32))


def test_no_page_of_a_long_row_is_missed() -> None:
    """Seven marked pages of 32 share the attention: without any one of them the answer is another one."""
    case, given = long_row(3, 2048)
    assert error(case, given, _by_kernel(case, given)) <= 1


@pytest.mark.parametrize(("dim", "kv_dtype"), [(128, None), (128, "int8"), (96, None)])
def test_keys_and_values_are_read_once(dim: int, kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take whole tiles of 64 keys, and the queries of each part."""
    case = Case((1, 1), (1000, 128), num_heads=4, num_kv_heads=1, dim=dim, kv_dtype=kv_dtype)
    load, copied = GlobalMemory.load, []
    launches: list[Launched] = []

    def counted(memory: GlobalMemory, addresses: np.ndarray, size: int) -> np.ndarray:
        copied.append(size * len(addresses) * (size == 16 and not launches))  # not those of the join
        return load(memory, addresses, size)

    monkeypatch.setattr(GlobalMemory, "load", counted)
    given = operands(case)
    with _emulated(case) as made:
        launches = made
        found = np.asarray(_attend(case, given, min_split=512, long_split=512))
    assert error(case, given, found) <= 1
    ideal = 2 * given.k_pages.dtype.itemsize * case.dim * sum(case.lengths)
    assert ideal <= sum(copied) <= 1.1 * ideal


@pytest.fixture(scope="module", params=[(128, None), pytest.param((96, "int8"), marks=pytest.mark.exhaustive)], ids=str)
def mutants(request: pytest.FixtureRequest) -> Mutants:
    """A launch with rings that go round and units of several tiles, by copies of Mosaic's and of our own."""
    dim, kv_dtype = request.param
    case = Case((1, 1), (640, 200), num_heads=2, num_kv_heads=1, dim=dim, kv_dtype=kv_dtype, page_size=32)
    with _emulated(case) as launches:
        _attend(case, operands(case), min_split=320, long_split=320)
    return Mutants(launches[0], SCHEDULES)


def test_a_missing_wait_for_a_tile_is_caught(mutants: Mutants) -> None:
    """All but the one at a unit's begin, which only has to have a barrier: everything was waited for by then."""
    waits = mutants.of("cp.async.wait_group")
    assert [wait.operands[0] for wait in waits if not mutants.is_caught(wait.__eq__)] == ["0"]


def test_missing_barriers_are_caught(mutants: Mutants) -> None:
    """Each one between uses of the ring, of the weights and of what the warps reduce together; others follow another one."""
    barriers = mutants.of("bar.sync")
    assert sum(mutants.is_caught(barrier.__eq__) for barrier in barriers) >= len(barriers) // 3


def test_missing_copies_of_a_loop_are_caught(mutants: Mutants) -> None:
    for copy in mutants.of("cp.async.cg")[::4]:
        assert mutants.is_caught(copy.__eq__), copy
