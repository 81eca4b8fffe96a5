"""Requests that are rejected on arrival, and leave no trace."""

from __future__ import annotations

import pytest

from jaxserve.errors import REQUEST_ERRORS
from jaxserve.ipc.messages import AddRequest
from tests.engine.rig import Rig, add, expected, prompt


@pytest.mark.parametrize(
    ("message", "error_class", "text"),
    [
        (add("r", []), "InvalidRequestError", "prompt is empty"),
        (add("r", [1, 101]), "InvalidRequestError", "token id 101, this model's ids are 0 to 100"),
        (add("r", [1, -1]), "InvalidRequestError", "token id -1"),
        (add("r", [1, 2**63]), "InvalidRequestError", f"token id {2**63}"),
        (add("r", [1], max_tokens=0), "InvalidRequestError", "max_tokens 0 must be at least 1"),
        (add("r", [1], logit_bias={101: 1.0}), "InvalidRequestError", "logit_bias holds token ids outside"),
        (add("r", [1], allowed_token_ids=(3, -1)), "InvalidRequestError", "allowed_token_ids holds"),
        (add("r", [1], bad_words=((3,), (4, 101))), "InvalidRequestError", "bad_words holds"),
        (add("r", [1], returns_experts=True), "UnsupportedParameterError", "This engine returns no experts"),
        (add("r", [1], stop_token_ids=(2**40,)), "InvalidRequestError", "stop_token_ids holds"),
        (
            add("r", prompt(128)),
            "ContextLengthError",
            "This model's maximum context length is 128 tokens. However, your prompt contains 128 input tokens",
        ),
        (
            add("r", prompt(30), max_tokens=12),
            "ContextLengthError",
            "prompt (30 tokens) and max_tokens (12) need KV cache for 41 tokens, this server holds 40",
        ),
    ],
)
def test_request_that_can_never_run_is_rejected_by_name(message: AddRequest, error_class: str, text: str) -> None:
    rig = Rig(num_blocks=11)
    error = rig.scheduler.add(message)
    assert error is not None
    assert error.error_class == error_class
    assert error.error_class in REQUEST_ERRORS
    assert text in error.message
    assert not rig.scheduler.has_work
    assert rig.kv.usage == 0.0


def test_a_prompt_that_fills_the_context_is_computed_for_its_scores() -> None:
    message = add("r", prompt(128), max_tokens=1)
    assert Rig(num_blocks=40).run(message) == {"r": expected(message)}


def test_largest_request_that_fits_the_pool_runs() -> None:
    message = add("r", prompt(30), max_tokens=11)
    assert Rig(num_blocks=11).run(message) == {"r": expected(message)}


def test_duplicate_id_is_rejected_and_the_first_request_continues() -> None:
    rig = Rig()
    first = add("r", prompt(3), max_tokens=3)
    rig.send(first)
    error = rig.scheduler.add(add("r", prompt(3, 9)))
    assert error is not None
    assert (error.error_class, error.param) == ("InvalidRequestError", "request_id")
    rig.finish()
    assert rig.tokens == {"r": expected(first)}


@pytest.mark.parametrize("max_queued_requests", [0, 2])
def test_full_queue_rejects_until_a_request_ends(max_queued_requests: int) -> None:
    rig = Rig(max_num_seqs=2, max_queued_requests=max_queued_requests)
    for i in range(2 + max_queued_requests):
        assert rig.scheduler.add(add(f"r{i}", prompt(3, i + 3), max_tokens=2)) is None
    error = rig.scheduler.add(add("late", prompt(3)))
    assert error is not None
    assert error.error_class == "RateLimitError"
    assert "queue is full" in error.message
    rig.finish()
    assert rig.scheduler.add(add("late", prompt(3))) is None
    rig.finish()
