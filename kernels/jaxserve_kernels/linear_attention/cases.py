"""Conformance cases of linear attention, against a loop over tokens in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.linear_attention.api import linear_attention
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.segments import cut_segments, decode_segments
from jaxserve_kernels.states import PooledStates

LAYER = 1
"""The layer of a pool, of two, whose states a case takes."""
TOLERANCE = 2e-5
"""Largest error of an output or a state relative to the largest number of the expected one."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of these numbers of tokens, whose texts are `positions` tokens long before."""

    counts: tuple[int, ...]
    positions: tuple[int, ...]
    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 64
    has_rate: bool = True
    padding: int = 0
    is_decode: bool = False
    decay: float = 0.5
    """Scale of a token's log decay."""
    has_channels: bool = False
    """A log decay for each channel of a key."""
    norm_eps: float | None = None
    is_pooled: bool = False
    """The states are in a pool: every other row writes another slot than it reads, and the third one none."""

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "mixed"
        heads = f"{self.num_key_heads}x{self.key_dim}-{self.num_value_heads}x{self.value_dim}"
        rows = ".".join(map(str, self.counts))
        form = ("delta" if self.has_rate else "sum") + ("-channels" if self.has_channels else "")
        form += "" if self.norm_eps is None else "-norm"
        return f"{kind}-{rows}-{heads}-{form}-{self.decay:g}{'-pooled' if self.is_pooled else ''}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    rate: np.ndarray | None
    states: np.ndarray
    """The states of rows, or a pool with them."""
    starts: np.ndarray
    positions: np.ndarray
    reads: np.ndarray | None
    """Slots of rows in a pool; None without one."""
    writes: np.ndarray | None


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands; half of a row's keys are alike, as repeated text makes them. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    total = sum(case.counts) + case.padding
    q, k = random.standard_normal((2, total, case.num_key_heads, case.key_dim)).astype(np.float32)
    k[::2] = k[:1]
    if case.norm_eps is None:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = random.standard_normal((total, case.num_value_heads, case.value_dim)).astype(np.float32)
    gates = random.uniform(0, 1, (2, total, case.num_value_heads)).astype(np.float32)
    log_decay = -case.decay * gates[0]
    if case.has_channels:
        log_decay = log_decay[..., None] * random.uniform(0, 1, (case.key_dim,)).astype(np.float32)
    states = random.standard_normal((len(case.counts), case.num_value_heads, case.key_dim, case.value_dim))
    states, reads, writes = states.astype(np.float32), None, None
    if case.is_pooled:
        states, reads, writes = _pooled(case, states, random)
    return Operands(
        q,
        k,
        v,
        log_decay,
        gates[1] if case.has_rate else None,
        states,
        np.cumsum((0, *case.counts)).astype(np.int32),
        np.asarray(case.positions, np.int32),
        reads,
        writes,
    )


def _pooled(case: Case, states: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a pool with the rows' states, NaN elsewhere, and the slots that rows read and write."""
    num_rows = len(states)
    num_slots = 2 * num_rows + 1
    pool = np.full((LAYER + 1, num_slots, *states.shape[1:]), np.nan, np.float32)
    slots = random.permutation(num_slots).astype(np.int32)
    reads, others = slots[:num_rows], slots[num_rows : 2 * num_rows]
    pool[LAYER, reads] = states
    places, has_tokens = np.arange(num_rows), np.asarray(case.counts) > 0
    writes = np.where(has_tokens & (places % 2 == 1), others, reads)
    return pool, reads, np.where(places == 2, num_slots, writes).astype(np.int32)


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Any:
    """Attend with the rows of a case. See `ops.OpCases`."""
    q, k, v, log_decay, rate, states, starts, positions, reads, writes = as_arrays(given)
    if case.is_pooled:
        states = PooledStates(states, jnp.int32(LAYER), reads, writes)
    num_decode_rows = next((i for i, count in enumerate(case.counts) if count != 1), len(case.counts))
    segments = (
        decode_segments(starts)
        if case.is_decode
        else cut_segments(starts, positions, jnp.int32(num_decode_rows), num_tokens=len(q))
    )
    options: dict[str, Any] = {"norm_eps": case.norm_eps, "backend": backend}
    out, after = linear_attention(q, k, v, log_decay, rate, states, segments, **options)
    return out, after.pool if isinstance(after, PooledStates) else after


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCE. See `ops.OpCases`."""
    found, after = (np.asarray(x, np.float64) for x in out)
    states = given.states if given.reads is None else given.states[LAYER, given.reads]
    wanted, state = np.zeros(found.shape), states.astype(np.float64)
    group = case.num_value_heads // case.num_key_heads
    q, k = (np.repeat(x.astype(np.float64), group, 1) for x in (given.q, given.k))
    if case.norm_eps is not None:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + case.norm_eps) for x in (q, k))
        q /= case.key_dim**0.5
    for row, (start, end) in enumerate(zip(given.starts[:-1], given.starts[1:], strict=True)):
        for t in range(start, end):
            decay = np.exp(given.log_decay[t].astype(np.float64))
            state[row] *= decay[..., None] if case.has_channels else decay[:, None, None]
            added = given.v[t].astype(np.float64)
            if given.rate is not None:
                added = given.rate[t][:, None] * (added - np.einsum("nh,nhv->nv", k[t], state[row]))
            state[row] += k[t][:, :, None] * added[:, None, :]
            wanted[t] = np.einsum("nh,nhv->nv", q[t], state[row])
    end = given.starts[-1]
    if not np.isfinite(found).all():
        return np.inf
    if given.writes is not None:
        after, state = _written(given, after, state)
    errors = (_relative(found[:end], wanted[:end]), _relative(after, state))
    return max(errors) / TOLERANCE


def _written(given: Operands, after: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the states that rows wrote into a pool, and those that they should have; NaN if another slot has changed."""
    assert given.writes is not None, "rows write into a pool"
    is_written = given.writes < after.shape[1]
    slots = given.writes[is_written]
    rest, before = np.copy(after), given.states.astype(np.float64)
    rest[LAYER, slots] = before[LAYER, slots] = 0
    is_kept = np.array_equal(rest, before, equal_nan=True)
    return after[LAYER, slots] if is_kept else np.full_like(state[is_written], np.nan), state[is_written]


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    difference = np.nan_to_num(np.abs(found - wanted), nan=np.inf)
    return float(difference.max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), 1e-30))


CASES = (
    Case((1, 1, 1, 0), (5, 0, 99, 0), padding=1, is_decode=True),
    Case((1, 1), (5, 31), num_key_heads=1, num_value_heads=3, has_rate=False, is_decode=True),
    Case((1, 1, 70, 0, 33, 1, 5), (40, 3, 7, 0, 31, 64, 30), padding=9),
    Case((1, 1, 1, 1, 0), (5, 0, 9, 9, 0), value_dim=128, padding=1, is_decode=True, is_pooled=True),
    Case((1, 40, 64), (7, 50, 32), num_key_heads=3, num_value_heads=3, value_dim=192, has_rate=False, padding=3),
    Case((65, 31), (0, 1), num_key_heads=1, key_dim=48, decay=30.0),
    Case((1, 1, 33, 1, 5), (40, 3, 7, 64, 30), padding=2, is_pooled=True),
    Case((1, 1, 1), (5, 0, 9), 1, 2, 128, has_rate=False, is_decode=True, is_pooled=True),
    Case((1, 1, 1), (5, 0, 9), 2, 2, 256, is_decode=True, is_pooled=True, decay=8.0),
    Case((1, 4), (5, 0), 1, 1, 256, padding=1),
    Case((1, 3, 0), (5, 0, 9), 1, 2, 64, 80, has_rate=False, padding=1, is_pooled=True),
    Case((1, 1), (5, 9), 1, 1, 32, 160, is_decode=True),
    Case((1, 40, 70, 0, 31), (5, 30, 64, 0, 1), 1, 2, 32, padding=370, is_pooled=True),
    Case((34, 2), (31, 9), 2, 2, 64, padding=476, decay=30.0),
    Case((100, 156), (28, 33), 1, 1, 128, padding=256, decay=1e-4),
    Case((33, 64), (0, 32), 1, 2, 96, has_rate=False, padding=415),
    Case((35,), (30,), 1, 1, 256, padding=477),
    Case((1, 1, 70, 0, 33, 5), (40, 3, 7, 0, 31, 30), 3, 3, 24, 40, padding=9, has_channels=True, decay=8.0),
    Case((1, 1, 0), (5, 9, 0), 2, 4, padding=1, has_channels=True, is_decode=True, is_pooled=True),
    Case((65, 31), (0, 1), 2, 2, has_channels=True, has_rate=False, decay=60.0),
    Case((1, 3), (0, 4), 1, 2, 7, 19, padding=1, is_pooled=True),
    Case((1, 5), (0, 4), 1, 2, 57, 40, padding=1, norm_eps=0.5, is_pooled=True),
    Case((1, 1), (0, 4), 2, 4, 7, 19, norm_eps=0.5, has_channels=True, is_decode=True),
)
CHUNKED = CASES[12:17]
"""Programs of as many tokens as GPUs take chunks for (`gpu.FEWEST_TOKENS`)."""
NOT_INTERPRETED = CHUNKED
"""Their kernel has instructions that jax's interpreter of Mosaic GPU does not know: tests/ptx runs it."""
SLOW = CASES[4:]
BACKENDS: tuple[Backend, ...] = ("native", "mosaic_gpu")
