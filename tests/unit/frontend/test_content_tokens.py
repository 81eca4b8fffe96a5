"""Tokens of content are found exactly, for every way of cutting a reply into tokens."""

from __future__ import annotations

import random

import pytest

from jaxserve.frontend.choices.content_tokens import ContentTokens, ScoredToken
from jaxserve.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat

REPLY = (
    "<think>\nWhy?\n</think>\n\nOne moment.\n<tool_call>\n"
    '{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>\nIt is noon.'
)
HERMES = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])


@pytest.mark.parametrize("seed", range(30))
def test_tokens_of_content_are_those_with_a_character_of_it(seed: int) -> None:
    """A token's number is where it begins, so that the text of each is known."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(REPLY)), draw.choice([5, 30, 100, len(REPLY) - 1])))
    parser = HERMES.parser({"now": {}}, "", None)
    assert parser is not None
    follower = ContentTokens()
    events = []
    tokens = []
    for begin, end in zip([0, *cuts], [*cuts, len(REPLY)], strict=True):
        follower.push([ScoredToken(begin, None)], 0)
        follower.push([ScoredToken(begin, None)], end - begin)
        more = parser.feed(REPLY[begin:end])
        for event in more:
            follower.read(event)
        events += more
        tokens += follower.take()
    last = parser.finish()
    for event in last:
        follower.read(event)
    events += last
    tokens += follower.take()
    kinds = [event.kind for event in events for _ in event.source]
    content = [place for place, kind in enumerate(kinds) if kind == "content"]
    assert "".join(REPLY[place] for place in content) == "One moment.It is noon."
    stretches = list(zip([0, *cuts], [*cuts, len(REPLY)], strict=True))
    expected = [
        (begin, sum(place < end for place in content))
        for begin, end in stretches
        if any(begin <= place < end for place in content)
        for _ in range(2)
    ]
    assert [(token.token.token_id, token.end) for token in tokens] == expected
