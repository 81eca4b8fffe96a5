"""Tokens a second that follow from what a machine reads and multiplies."""

from __future__ import annotations

import pytest

from benchmarks.peers.bounds import MachineBounds, ModelSize, best_of, output_bound, prefill_bound_s, step_bound_s

MACHINE = MachineBounds(read_bytes_per_s=400.0, gemm_flops=8000.0)
MODEL = ModelSize(num_weights=100, num_output_weights=20)


def test_a_step_of_one_stream_takes_as_long_as_reading_the_weights() -> None:
    assert step_bound_s(MODEL, MACHINE, 1) == pytest.approx(1.0)  # 400 bytes at 400 a second


def test_a_step_of_many_streams_takes_as_long_as_the_products() -> None:
    assert step_bound_s(MODEL, MACHINE, 80) == pytest.approx(2.0)  # 2 x 100 x 80 at 8000 a second


def test_a_prompt_needs_the_output_matrix_once() -> None:
    assert prefill_bound_s(MODEL, MACHINE, 10) == pytest.approx(2 * (80 * 10 + 20) / 8000)


def test_output_bound_adds_prompts_and_steps() -> None:
    # 3 steps of 1 s and 2 prompts of 2 x (80 x 49 + 20) / 8000 = 0.985 s make 2 x 4 tokens.
    bound = output_bound(MODEL, MACHINE, num_streams=2, num_prompt_tokens=49, num_output_tokens=4)
    assert bound == pytest.approx(8 / (3 * 1.0 + 2 * 0.985))


def test_the_faster_measurement_of_each_kind_stays() -> None:
    assert best_of(MachineBounds(1.0, 5.0), MachineBounds(2.0, 4.0)) == MachineBounds(2.0, 5.0)
