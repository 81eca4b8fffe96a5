"""A reader who follows one chat request through the API process opens a bounded number of modules."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import jaxserve
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import Api, running_api

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
PACKAGE = str(Path(jaxserve.__file__).parent)
MAX_MODULES = 35
"""Number of modules, with those of the tokenizer's thread. Code of features that the request does not use is not run."""


async def test_a_streamed_chat_runs_code_of_few_modules(tokenizer: Tokenizer) -> None:
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    threading.setprofile(note)  # for threads that begin later: the tokenizer's
    sys.setprofile(note)
    try:
        async with running_api(tokenizer, keep_alive_s=3600.0) as api:
            await streamed_chat(api)
            files.clear()  # what runs once
            await streamed_chat(api)
            seen = {path.removeprefix(PACKAGE) for path in files if path.startswith(PACKAGE)}
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert "/apis/openai/chat.py" in seen and "/tokenizer/template.py" in seen
    assert len(seen) <= MAX_MODULES, "\n".join(sorted(seen))


async def streamed_chat(api: Api) -> None:
    """Send one request, whose engine replies with two outputs, and read the whole stream."""

    async def reply() -> None:
        request = await api.engine.added()
        api.engine.output(request, [35])
        api.engine.output(request, [36], finish_reason="length")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reply())
        async with api.http.post("/v1/chat/completions", json=CHAT) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
