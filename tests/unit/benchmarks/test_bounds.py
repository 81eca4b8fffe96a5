"""Tokens a second that follow from what a machine reads and multiplies."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from benchmarks.peers.bounds import MachineBounds, best_of, output_bound, step_bound_s
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_config
from jaxserve.models.skeleton import make_skeleton
from jaxserve.tools.planning.sizes import make_sizes
from tests.unit.tools.planning.configs import LLAMA_8B

MACHINE = MachineBounds(read_bytes_per_s=400.0, gemm_flops=8000.0)
SHAPE = make_sizes(make_skeleton(decoder_config({**LLAMA_8B, "num_hidden_layers": 1}), plain(jnp.dtype("float32"))))
MODEL = replace(SHAPE, num_layer_weights=80, num_head_weights=20, read_bytes=400)


def test_a_step_of_one_stream_takes_as_long_as_reading_the_weights() -> None:
    assert step_bound_s(MODEL, MACHINE, 1) == pytest.approx(1.0)  # 400 bytes at 400 a second


def test_a_step_of_many_streams_takes_as_long_as_the_matmuls() -> None:
    assert step_bound_s(MODEL, MACHINE, 80) == pytest.approx(2.0)  # 2 x 100 x 80 at 8000 a second


def test_a_prompt_needs_the_output_matrix_once() -> None:
    bound = output_bound(MODEL, MACHINE, num_streams=1, num_prompt_tokens=10, num_output_tokens=1)
    assert bound == pytest.approx(8000 / (2 * (80 * 10 + 20)))  # the output matrix for the last token alone


def test_output_bound_adds_prompts_and_steps() -> None:
    # 3 steps of 1 s and 2 prompts of 2 x (80 x 49 + 20) / 8000 = 0.985 s make 2 x 4 tokens.
    bound = output_bound(MODEL, MACHINE, num_streams=2, num_prompt_tokens=49, num_output_tokens=4)
    assert bound == pytest.approx(8 / (3 * 1.0 + 2 * 0.985))


def test_the_faster_measurement_of_each_kind_stays() -> None:
    assert best_of(MachineBounds(1.0, 5.0), MachineBounds(2.0, 4.0)) == MachineBounds(2.0, 5.0)
