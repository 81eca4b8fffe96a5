"""The summary of a reply that `--verbose` shows."""

from __future__ import annotations

from jaxserve.tools.client import OutputDelta
from jaxserve.tools.terminal.reply import Reply

USAGE = {"prompt_tokens": 37, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 32}}


def test_tokens_and_speed_are_those_the_server_counted() -> None:
    reply = Reply(asked_s=10.0)
    for piece in (OutputDelta(10.5, text="Par"), OutputDelta(12.0, text="is"), OutputDelta(12.0, finish_reason="stop")):
        reply.add(piece)
    assert reply.summary() == "reply 2 pieces in 2.00 s (1.0 a second, the first after 0.50 s), ended by stop"
    reply.add(OutputDelta(13.0, usage=USAGE))
    assert reply.summary() == (
        "prompt 37 tokens (32 cached), reply 8 tokens in 2.00 s (4.0 a second, the first after 0.50 s), ended by stop"
    )


def test_a_reply_that_was_stopped_before_it_began() -> None:
    assert Reply(is_stopped=True).summary() == "reply 0 pieces, stopped"
