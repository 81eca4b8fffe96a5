"""Linear attention by the PTX that the compiler makes: against float64, states moved once, and equal bits."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.linear_attention import PooledStates, linear_attention
from jaxserve_kernels.linear_attention.cases import CASES, CHUNKED, LAYER, Case, error, operands, run
from jaxserve_kernels.linear_attention.gpu import FEWEST_TOKENS
from jaxserve_kernels.segments import decode_segments

from tests.aot.devices import A100, H200, Target
from tests.ptx.launch import emulated
from tests.ptx.machine import Schedule
from tests.ptx.memory import GlobalMemory

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SCHEDULES = (Schedule(seed=0, copies=0.3, matmuls=0.3), Schedule(seed=1, copies=0.3, matmuls=0.3))
DELTA, SUM = CASES[3], CASES[7]


@pytest.fixture(autouse=True)
def no_traces() -> None:
    """Forget the kernels of other tests, which were traced for another device, or outside of the emulator."""
    jax.clear_caches()


@pytest.mark.parametrize(
    "target", [H200, pytest.param(A100, marks=pytest.mark.exhaustive)], ids=lambda target: target.name
)
@pytest.mark.parametrize("case", [DELTA, SUM, CASES[0], CASES[6], *CASES[8:12]], ids=str)
def test_states_after_a_token_equal_those_in_float64(case: Case, target: Target) -> None:
    given = operands(case)
    with emulated(SCHEDULES, target) as launches:
        assert error(case, given, run(case, given, "mosaic_gpu")) <= 1
    assert len(launches) == 1


def test_states_are_read_once_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other reads are those of keys, queries, values and rates, by each program."""
    case = replace(DELTA, key_dim=24)
    given = operands(case)
    load, store = GlobalMemory.load, GlobalMemory.store
    moved = {"read": 0, "written": 0}

    def counted_load(memory: GlobalMemory, addresses: np.ndarray, size: int) -> np.ndarray:
        moved["read"] += size * len(addresses) * _is_in_pool(memory, addresses)
        return load(memory, addresses, size)

    def counted_store(memory: GlobalMemory, addresses: np.ndarray, data: np.ndarray) -> None:
        moved["written"] += data.size * _is_in_pool(memory, addresses)
        store(memory, addresses, data)

    monkeypatch.setattr(GlobalMemory, "load", counted_load)
    monkeypatch.setattr(GlobalMemory, "store", counted_store)
    with emulated(SCHEDULES[:1]):
        assert error(case, given, run(case, given, "mosaic_gpu")) <= 1
    state_bytes = given.states[LAYER, 0].nbytes
    assert moved == {"read": 4 * state_bytes, "written": 3 * state_bytes}, "one row of four has no slot to write"


def _is_in_pool(memory: GlobalMemory, addresses: np.ndarray) -> bool:
    pool = memory.arrays[-1]
    return bool(pool.base <= addresses.min() < pool.base + len(pool.data))


@pytest.mark.parametrize("case", [DELTA, SUM], ids=str)
def test_a_row_gives_the_same_bits_alone(case: Case) -> None:
    case = replace(case, key_dim=40)
    given = operands(case)
    first = case.counts[:1]
    alone = given._replace(
        starts=given.starts[:2], positions=given.positions[:1], reads=given.reads[:1], writes=given.writes[:1]
    )
    tokens = ("q", "k", "v", "log_decay", *(["rate"] if case.has_rate else []))
    alone = alone._replace(**{name: getattr(given, name)[:1] for name in tokens})
    with emulated(SCHEDULES[:1]):
        (out, pool), (own, own_pool) = (
            run(each, arrays, "mosaic_gpu") for each, arrays in ((case, given), (replace(case, counts=first), alone))
        )
    np.testing.assert_array_equal(out[:1], own)
    np.testing.assert_array_equal(pool[LAYER, given.writes[0]], own_pool[LAYER, given.writes[0]])


def test_tokens_in_several_steps_give_the_bits_of_one_step() -> None:
    """A prompt of three tokens, beside two of them and then a decode step."""
    case = Case((3,), (0,), key_dim=48, value_dim=64)
    given = operands(case)

    def computed(first: int, end: int, states: np.ndarray, *, is_decode: bool) -> tuple[np.ndarray, np.ndarray]:
        tokens = {name: getattr(given, name)[first:end] for name in ("q", "k", "v", "log_decay", "rate")}
        count = end - first
        part = given._replace(states=states, starts=np.array([0, count], np.int32), **tokens)
        out, after = run(replace(case, counts=(count,), is_decode=is_decode), part, "mosaic_gpu")
        return np.asarray(out), np.asarray(after)

    with emulated(SCHEDULES[:1]):
        whole, after = computed(0, 3, given.states, is_decode=False)
        first, between = computed(0, 2, given.states, is_decode=False)
        last, end = computed(2, 3, between, is_decode=True)
    np.testing.assert_array_equal(np.concatenate([first, last]), whole)
    np.testing.assert_array_equal(end, after)


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *((case, H200) for case in CHUNKED[:1]),
        *(pytest.param(case, H200, marks=pytest.mark.exhaustive) for case in CHUNKED[1:]),
        pytest.param(CHUNKED[0], A100, marks=pytest.mark.exhaustive),
        pytest.param(CHUNKED[3], A100, marks=pytest.mark.exhaustive),
    ],
    ids=lambda each: each.name if isinstance(each, Target) else str(each),
)
def test_chunks_by_matmuls_equal_tokens_in_float64(case: Case, target: Target) -> None:
    """Decays near 0 and near 1, alike keys, rows that begin and end within a chunk, and one whose state is not written."""
    given = operands(case)
    with emulated(SCHEDULES[:1], target) as launches:
        assert error(case, given, run(case, given, "mosaic_gpu")) <= 1
    matmuls = [sum("mma.sync" in each.opcode for each in launch.compiled.source.instructions) for launch in launches]
    assert matmuls[0] == 0 < matmuls[1]


def test_chunks_give_the_same_bits_in_several_steps_and_beside_other_rows() -> None:
    """A text of 70 tokens in one step, and in two that meet at the border of chunks, the second one after a row of NaN."""
    case = Case((70,), (0,), 1, 1, 32, 64)
    given = operands(replace(case, padding=FEWEST_TOKENS - 70))

    def computed(first: int, end: int, states: np.ndarray, before: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = {}
        for name in ("q", "k", "v", "log_decay", "rate"):
            own = getattr(given, name)[first:end]
            tokens[name] = np.full((FEWEST_TOKENS, *own.shape[1:]), np.nan, np.float32)
            tokens[name][before : before + len(own)] = own
        counts, others = (before, end - first), np.full_like(states, np.nan)
        part = given._replace(
            states=np.concatenate([others, states]),
            starts=np.cumsum([0, *counts]).astype(np.int32),
            positions=np.array([0, first], np.int32),
            **tokens,
        )
        out, after = run(replace(case, counts=counts), part, "mosaic_gpu")
        return np.asarray(out[before : before + end - first]), np.asarray(after[1:])

    with emulated(SCHEDULES[:1]):
        whole, after = computed(0, 70, given.states, 0)
        first, between = computed(0, 32, given.states, 0)
        last, end = computed(32, 70, between, 41)
    np.testing.assert_array_equal(np.concatenate([first, last]), whole)
    np.testing.assert_array_equal(end, after)


def test_states_may_stay_unwritten() -> None:
    """The emulator lets no operand be written, and this pool is no result."""
    case = replace(DELTA, key_dim=56)
    given = operands(case)
    tokens = [jnp.asarray(each) for each in given[:5]]
    states = PooledStates(jnp.asarray(given.states), LAYER, jnp.asarray(given.reads), None)
    with emulated(SCHEDULES[:1]):
        wanted, _ = run(case, given, "mosaic_gpu")
        out, after = linear_attention(*tokens, states, decode_segments(jnp.asarray(given.starts)), backend="mosaic_gpu")
    np.testing.assert_array_equal(out, wanted)
    assert isinstance(after, PooledStates)
    np.testing.assert_array_equal(after.pool, given.states)
