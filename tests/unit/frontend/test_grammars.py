"""The process that checks grammars, seen by its owner."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from jaxserve.config import StructuredConfig
from jaxserve.errors import UnavailableError
from jaxserve.frontend.grammar_checker import GrammarChecker
from jaxserve.ipc.messages import Grammar
from tests.unit.running_api import TOKENIZERS

FINE = Grammar("regex", "[ab]{3}")


async def test_its_end_is_an_error_only_when_nobody_wanted_it(caplog: pytest.LogCaptureFixture) -> None:
    checker = GrammarChecker(StructuredConfig())
    checker.install(str(TOKENIZERS / "byte_level"))
    await checker.check(FINE, "regex")
    process = await checker._running_process()
    os.kill(process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(checker.check(Grammar("regex", "[ab]{4}"), "regex"))
    await asyncio.sleep(0)  # it asks, and waits for the verdict
    process.kill()
    with pytest.raises(UnavailableError, match="Please retry"):
        await waiting
    assert [record.getMessage() for record in caplog.records] == ["the process that checks grammars ended with -9"]
    caplog.clear()
    await checker.check(Grammar("regex", "[ab]{5}"), "regex")
    await checker.aclose()
    assert caplog.records == []
