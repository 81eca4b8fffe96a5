"""The checker of grammars passes on to the engine what their check found."""

from __future__ import annotations

import pytest

from jaxserve.config import StructuredConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.grammar_checker import GrammarChecker
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.protocol import CheckReply

GBNF = Grammar("gbnf", 'root ::= "a"')


@pytest.mark.parametrize(
    ("reply", "engines"),
    [
        (CheckReply(None, 'start: "a"', 5 << 20), Grammar("lark", 'start: "a"', None, 5 << 20)),
        (CheckReply(None, None, 3 << 20), Grammar("gbnf", GBNF.text, None, 3 << 20)),
    ],
)
async def test_a_checked_grammar_has_its_form_and_the_memory_of_its_matcher(
    reply: CheckReply, engines: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, asked = GrammarChecker(StructuredConfig()), []

    async def ask(grammar: Grammar, *_: object) -> CheckReply:
        asked.append(grammar)
        return reply

    monkeypatch.setattr(checker._checks, "ask", ask)
    assert [await checker.check(GBNF, "grammar") for _ in range(2)] == [engines, engines]
    assert asked == [GBNF], "it is remembered"


async def test_a_grammar_that_was_refused_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, replies = GrammarChecker(StructuredConfig()), [CheckReply("it is broken."), CheckReply(None)]

    async def ask(*_: object) -> CheckReply:
        return replies.pop(0)

    monkeypatch.setattr(checker._checks, "ask", ask)
    with pytest.raises(InvalidRequestError, match=r"'guided': it is broken\.$"):
        await checker.check(GBNF, "guided")
    assert await checker.check(GBNF, "guided") == GBNF
