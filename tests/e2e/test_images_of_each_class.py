"""A picture through a real server of a tiny model of each class that reads images: streams equal whole replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.http_server import Server
from tests.e2e.real_server import serving
from tests.e2e.test_images_real import OPTIONS, chat, data_url
from tests.models.goldens import DATA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEP_TOKENS = {"gemma3_vision_tiny": 12, "gemma4_vision_tiny": 73}
"""Tokens of a step that holds an image which is seen whole, and a token of three other requests."""
NAMES = (
    "idefics3_tiny",
    "qwen3_vl_tiny",
    "qwen3_vl_moe_odd_tiny",
    "qwen3_5_vision_tiny",
    "gemma3_vision_tiny",
    "gemma4_vision_tiny",
    "gemma4_vision_odd_tiny",
)
"""SmolVLM is in test_images_real."""


@pytest.fixture(scope="module", params=NAMES)
def server(request: Any, programs: Path) -> Iterator[Server]:
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", str(STEP_TOKENS.get(request.param, 16)))
    path = str(DATA / "vision" / request.param)
    with serving(path, *flags, "--served-model-name", "tiny", programs=programs) as running:
        yield running
        assert "Traceback" not in running.output, running.output


def test_a_stream_equals_the_whole_reply_and_another_picture_gives_another(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        replies = []
        for urls in ((data_url(0),), (data_url(1), data_url(0)), (data_url(2),)):
            whole = client.chat.completions.create(messages=chat(*urls), **OPTIONS)
            stream = client.chat.completions.create(
                messages=chat(*urls), stream=True, stream_options={"include_usage": True}, **OPTIONS
            )
            chunks = list(stream)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == whole.choices[0].message.content
            assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
            assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
            replies.append(text)
    assert len(set(replies)) == 3
