"""Pictures through the official openai and anthropic SDKs, on a tiny random model that reads them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.lane import API_KEY, library
from tests.e2e.http_server import Server

anthropic, openai = library("anthropic"), library("openai")

RED, BLUE = (
    f"iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4n{content}AAAABJRU5ErkJggg=="
    for content in ("GP8z8DAwMDAxMDAwMDAAAANHQEDasKb6Q", "GNkYPjPwMDAxMDAwMDAAAALHwEDmIWXfg")
)
"""PNG files of 2 x 2 pixels."""
QUESTION = "What is it?"
MORE: Any = {"extra_body": {"ignore_eos": True, "temperature": 0}}


def ask_openai(url: str, *pictures: str) -> list[str]:
    """Return the text of a chat, of its stream and of a response."""
    urls = [f"data:image/png;base64,{picture}" for picture in pictures]
    parts: Any = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    chat: Any = {
        "model": "tiny",
        "max_tokens": 12,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}],
        **MORE,
    }
    items: Any = [{"type": "input_image", "image_url": each, "detail": "auto"} for each in urls]
    content = [*items, {"type": "input_text", "text": QUESTION}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0) as client:
        plain = client.chat.completions.create(**chat).choices[0].message.content
        chunks = client.chat.completions.create(**chat, stream=True)
        streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        response = client.responses.create(
            model="tiny", max_output_tokens=12, input=[{"role": "user", "content": content}], **MORE
        )
    return [plain, streamed, response.output_text]


def ask_anthropic(url: str, *pictures: str) -> list[str]:
    """Return the text of a message and of its stream."""
    blocks: Any = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": each}} for each in pictures
    ]
    body: Any = {
        "model": "tiny",
        "max_tokens": 12,
        "messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": QUESTION}]}],
        **MORE,
    }
    with anthropic.Anthropic(base_url=url, api_key=API_KEY, max_retries=0) as client:
        message = client.messages.create(**body)
        counted = client.messages.count_tokens(model="tiny", messages=body["messages"])
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 40 * len(pictures)
        with client.messages.stream(**body) as stream:
            streamed = "".join(stream.text_stream)
    return [message.content[0].text, streamed]


def test_both_sdks_show_the_model_the_same_pictures(reader: Server) -> None:
    found = [
        {*ask_openai(reader.url, *pictures), *ask_anthropic(reader.url, *pictures)}
        for pictures in ((RED,), (BLUE,), (RED, BLUE))
    ]
    assert [len(texts) for texts in found] == [1, 1, 1] and len(set.union(*found)) == 3


def test_a_picture_that_is_none_is_the_sdks_own_exception(reader: Server) -> None:
    part: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
    message: Any = {"role": "user", "content": [part]}
    reason = r"messages\[0\]\.content\[0\]\.source.*supported format"
    with (
        anthropic.Anthropic(base_url=reader.url, api_key=API_KEY, max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match=reason),
    ):
        client.messages.create(model="tiny", max_tokens=1, messages=[message])
