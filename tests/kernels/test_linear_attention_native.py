"""Linear attention by the native kernel: the same bits however a text is cut, and states that stay where they are."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.linear_attention import PooledStates, linear_attention, takes_tokens_in_turn
from jaxserve_kernels.linear_attention.cases import Case, Operands, operands
from jaxserve_kernels.segments import cut_segments, decode_segments

pytestmark = pytest.mark.skipif(native.register() is None, reason="the native kernels are not built")
DELTA = Case((40,), (0,), value_dim=72, key_dim=24)
SUM = Case((40,), (0,), value_dim=40, key_dim=17, has_rate=False)
CHANNELS = Case((40,), (0,), value_dim=128, key_dim=32, has_channels=True)
NORM = Case((40,), (0,), value_dim=72, key_dim=57, norm_eps=1e-6)
IN_TURN = pytest.mark.parametrize("case", [DELTA, SUM, CHANNELS, NORM], ids=str)


def _tokens(given: Operands) -> tuple[Any, ...]:
    return given.q, given.k, given.v, given.log_decay, given.rate


def _as_array(given: np.ndarray | None) -> jax.Array | None:
    return None if given is None else jnp.asarray(given)


def _attend(tokens: Any, states: Any, segments: Any, norm_eps: float | None = None) -> Any:
    q, k, v, log_decay, rate = map(_as_array, tokens)
    return linear_attention(q, k, v, log_decay, rate, states, segments, norm_eps=norm_eps, backend="native")


@partial(jax.jit, static_argnames="norm_eps")
def _step(tokens: Any, states: Any, start: Any, norm_eps: float | None) -> Any:
    """Attend to the tokens of one row as one program: one for each operation takes three times as long to compile."""
    starts = jnp.array([0, size := len(tokens[0])])
    segments = decode_segments(starts)
    if size > 1:
        segments = cut_segments(starts, start[None], jnp.int32(0), num_tokens=size)
    return _attend(tokens, states, segments, norm_eps)


def _in_steps(given: Operands, sizes: tuple[int, ...], norm_eps: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return what all tokens read and the state after them; steps of one token are decode steps."""
    states, outs, start = jnp.asarray(given.states), [], 0
    for size in sizes:
        tokens = [x if x is None else x[start : start + size] for x in _tokens(given)]
        out, states = _step(tokens, states, np.int32(start), norm_eps)
        outs.append(np.asarray(out))
        start += size
    return np.concatenate(outs), np.asarray(states)


@IN_TURN
def test_a_text_has_the_same_bits_however_it_is_cut(case: Case) -> None:
    given = operands(case)
    whole = _in_steps(given, (40,), case.norm_eps)
    for sizes in ((1,) * 40, (7, 1, 1, 31)):
        assert all(map(np.array_equal, whole, _in_steps(given, sizes, case.norm_eps)))


@IN_TURN
def test_a_row_has_the_same_bits_beside_others(case: Case) -> None:
    alone = operands(case)
    beside = operands(dataclasses.replace(case, counts=(3, 40, 9), positions=(0, 0, 0), padding=4), seed=1)
    tokens = [each if each is None else each.copy() for each in _tokens(beside)]
    for own, together in zip(_tokens(alone), tokens, strict=True):
        if together is not None:
            together[3:43] = own
            together[52:] = np.nan
    states = np.concatenate([beside.states[:1], alone.states, beside.states[2:]])
    starts = jnp.array([0, 3, 43, 52])
    segments = cut_segments(starts, jnp.zeros(3, jnp.int32), jnp.int32(0), num_tokens=56)
    out, after = _attend(tokens, jnp.asarray(states), segments, case.norm_eps)
    wanted, state = _in_steps(alone, (40,), case.norm_eps)
    assert np.array_equal(np.asarray(out)[3:43], wanted)
    assert np.array_equal(np.asarray(after)[1], state[0])
    assert not np.asarray(out)[52:].any(), "padding becomes zeros"


@pytest.mark.parametrize("value_dim", [64, 19])
def test_states_that_are_not_written_are_only_read(value_dim: int) -> None:
    given = operands(Case((1, 6, 0), (5, 9, 0), value_dim=value_dim, is_pooled=True))
    assert given.reads is not None
    pool = jnp.asarray(given.states)
    starts = jnp.asarray(given.starts)
    segments = cut_segments(starts, jnp.asarray(given.positions), jnp.int32(1), num_tokens=len(given.q))
    reads = jnp.asarray(given.reads)
    out, after = _attend(_tokens(given), PooledStates(pool, jnp.int32(1), reads, None), segments)
    written, _ = _attend(_tokens(given), PooledStates(pool, jnp.int32(1), reads, reads), segments)
    assert after.pool is pool
    assert np.array_equal(np.asarray(pool), given.states, equal_nan=True)
    assert np.array_equal(np.asarray(out), np.asarray(written))


def test_a_loop_over_steps_of_layers_copies_no_pool() -> None:
    case = Case((1,), (0,), is_decode=True)
    given = operands(case)
    pool = jnp.zeros((3, 5, *given.states.shape[1:]))
    segments = decode_segments(jnp.array([0, 1]))
    slots = jnp.array([2])

    def steps(pool: jax.Array) -> jax.Array:
        def step(_: int, pool: jax.Array) -> jax.Array:
            for layer in range(3):
                _, after = _attend(_tokens(given), PooledStates(pool, layer, slots, slots), segments)
                pool = after.pool
            return pool

        found: jax.Array = jax.lax.fori_loop(0, 4, step, pool)
        return found

    text = jax.jit(steps, donate_argnums=0).lower(pool).compile().as_text()
    shape = ",".join(map(str, pool.shape))
    assert f"f32[{shape}]" in text
    assert not [line for line in text.splitlines() if f"f32[{shape}]" in line and " copy(" in line]


def test_kernels_on_cpus_take_all_tokens_in_turn() -> None:
    assert takes_tokens_in_turn("native", 17, 19)
    assert not takes_tokens_in_turn("reference", 128, 128)
