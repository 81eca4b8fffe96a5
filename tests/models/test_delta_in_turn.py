"""Gated delta nets by native kernels: a token has the same bits in decode steps, in parts of a prompt, and beside other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.segments import Segments, cut_segments, decode_segments

from jaxserve.layers.policy import plain
from jaxserve.layers.recurrent import RecurrentState
from jaxserve.layers.recurrent_mixers.gated_delta import GatedDeltaNet
from jaxserve.model_config.recurrent import GatedDeltaConfig
from jaxserve.models.registry import decoder_config
from tests.models.test_delta_parallel import QWEN3_5

pytestmark = pytest.mark.skipif(native.register() is None, reason="the native kernels are not built")
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 24}
NUM_TOKENS = 40


class _Net:
    """One layer with random parameters and inputs of one text."""

    def __init__(self) -> None:
        config = decoder_config(QWEN3_5 | HEADS)
        delta = config.recurrent
        assert isinstance(delta, GatedDeltaConfig)
        self.mixer = GatedDeltaNet(config, delta, replace(plain(jnp.dtype("float32")), backend="native"))
        random, heads = np.random.default_rng(0), delta.num_value_heads
        self.parameters = tuple(
            map(_floats, (random,) * 3, [(delta.num_channels, 1, delta.num_taps), (heads,), (heads,)])
        )
        shapes = [(NUM_TOKENS, delta.num_channels), (NUM_TOKENS, heads), (NUM_TOKENS, heads)]
        self.inputs = tuple(map(_floats, (random,) * 3, shapes))
        self.shapes = [each.shape for each in delta.arrays]
        self.recur = jax.jit(self.mixer.recur)

    def empty(self, num_rows: int) -> RecurrentState:
        return RecurrentState(*(jnp.zeros((num_rows, *shape)) for shape in self.shapes))

    def step(self, inputs: Any, state: RecurrentState, segments: Segments) -> tuple[np.ndarray, RecurrentState]:
        made, after = self.recur(self.parameters, tuple(inputs), state, segments)
        return np.asarray(made), after

    def in_steps(self, sizes: tuple[int, ...]) -> tuple[np.ndarray, RecurrentState]:
        """Return what the tokens read and the state after them; steps of one token are decode steps."""
        state, outs, start = self.empty(1), [], 0
        for size in sizes:
            segments = decode_segments(jnp.array([0, 1])) if size == 1 else _mixed([size], [start])
            made, state = self.step([each[start : start + size] for each in self.inputs], state, segments)
            outs.append(made)
            start += size
        return np.concatenate(outs), state


def _floats(random: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape), jnp.float32)


def _mixed(counts: list[int], positions: list[int]) -> Segments:
    starts = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    return cut_segments(starts, jnp.asarray(positions), jnp.int32(0), num_tokens=sum(counts))


def _is_same(state: RecurrentState, row: int, wanted: RecurrentState) -> bool:
    pairs = zip(state, wanted, strict=True)
    return all(np.array_equal(np.asarray(one)[row], np.asarray(other)[0]) for one, other in pairs)


def test_a_token_has_the_same_bits_alone_in_a_chunk_and_in_a_batch() -> None:
    net = _Net()
    wanted, state = net.in_steps((NUM_TOKENS,))
    for sizes in ((1,) * NUM_TOKENS, (2, 1, 37)):
        made, after = net.in_steps(sizes)
        assert np.array_equal(made, wanted), sizes
        assert _is_same(after, 0, state)

    beside = [jnp.concatenate([each[7:12], each, each[:3]]) for each in net.inputs]
    made, after = net.step(beside, net.empty(3), _mixed([5, NUM_TOKENS, 3], [0, 0, 0]))
    assert np.array_equal(made[5:-3], wanted)
    assert _is_same(after, 1, state)

    first = [jnp.stack([each[0], each[5], each[9], each[0]]) for each in net.inputs]
    made, _ = net.step(first, net.empty(4), decode_segments(jnp.arange(5)))
    assert np.array_equal(made[0], wanted[0])
    assert np.array_equal(made[3], wanted[0])
