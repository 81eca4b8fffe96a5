"""`prompt_embeds` of /v1/completions: what reaches the engine, and what is refused, by name and before it is decoded."""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError, RateLimitError
from jaxserve.frontend.prompt_embeds.prompt import load_embeds, read_array
from jaxserve.ipc.prompt_embeds import PromptEmbedsInfo
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import play
from tests.unit.frontend.prompt_embeds.tensor_files import npy, safetensors
from tests.unit.running_api import Api, running_api

PATH = "/v1/completions"
INFO = PromptEmbedsInfo(width=4, piece_tokens=2, cache_rows=64)
VALUES = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def encoded(values: np.ndarray = VALUES) -> str:
    return base64.b64encode(npy(values)).decode()


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(tokenizer, prompt_embeds=INFO) as api:
        yield api


async def sent(api: Api, steps: list[list[int]], **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The reply, and the requests that the engine got."""
    replies = [play(api, [step]) for step in steps]
    (status, reply), *requests = await asyncio.gather(api.post(PATH, {"max_tokens": 1, **body}), *replies)
    assert status == 200, reply
    return reply, requests


async def test_embeddings_reach_the_engine_in_parts_of_a_page(api: Api) -> None:
    body = {"prompt": "", "prompt_embeds": encoded(), "return_token_ids": True, "logprobs": 0}
    reply, (request,) = await sent(api, [[7]], **body)
    assert [(part.start, part.num_tokens) for part in request.prompt_embeds] == [(0, 2), (2, 1)]
    assert b"".join(part.values for part in request.prompt_embeds) == VALUES.tobytes()
    assert request.prompt_token_ids == [0, 0, 0] and reply["usage"]["prompt_tokens"] == 3
    (choice,) = reply["choices"]
    assert choice["prompt_token_ids"] == [] and choice["logprobs"]["text_offset"] == [0]
    changed = VALUES.copy()
    changed[2, 0] += 1
    safe = base64.b64encode(safetensors(data=changed.tobytes())).decode()
    _, (other,) = await sent(api, [[7]], prompt_embeds=[safe])
    first, last = (
        [a.digest == b.digest for a, b in zip(request.prompt_embeds, other.prompt_embeds, strict=True)][i]
        for i in (0, 1)
    )
    assert first and not last


async def test_embeddings_come_before_texts_and_all_choices_have_them(api: Api) -> None:
    body = {"prompt": [5, 6], "prompt_embeds": [encoded(), encoded(VALUES[:1])], "n": 2}
    _, requests = await sent(api, [[7]] * 6, **body)
    assert [sum(part.num_tokens for part in each.prompt_embeds) for each in requests] == [3, 3, 1, 1, 0, 0]
    assert requests[4].prompt_token_ids == [5, 6]


async def test_an_adapter_that_is_named_as_the_model_reaches_the_engine_with_them(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, prompt_embeds=INFO, adapters={"sql": "/adapters/sql"}) as api:
        _, (request,) = await sent(api, [[7]], model="sql", prompt_embeds=encoded())
    assert request.adapter == 1 and sum(part.num_tokens for part in request.prompt_embeds) == 3


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "send safetensors, .npy, or what torch.save writes"),
        ({"prompt_embeds": "?"}, "prompt_embeds", "not base64"),
        ({"prompt_embeds": [encoded(), encoded(VALUES[:, :3])]}, "prompt_embeds[1]", "must be [tokens, 4], got [3, 3]"),
        ({"prompt_embeds": encoded(VALUES[:0])}, "prompt_embeds", "no tokens"),
        ({"prompt_embeds": encoded(VALUES * np.float32(np.inf))}, "prompt_embeds", "must be finite"),
        ({"prompt_embeds": encoded(VALUES * 1e5)}, "prompt_embeds", "at most 65504"),
        ({"prompt_embeds": encoded(np.zeros((64, 4), np.float32))}, "prompt_embeds", "maximum context length is 64"),
        ({"prompt_embeds": "A" * 100_000}, "prompt_embeds", "take at most"),
        ({"prompt_embeds": encoded(), "echo": True}, "echo", "prompt_embeds"),
        ({"prompt_embeds": encoded(), "prompt_logprobs": 1}, "prompt_logprobs", "prompt_embeds"),
        ({"prompt_embeds": encoded(), "prompt": [[]]}, "prompt", "must not be empty"),
        ({"prompt_embeds": []}, "prompt", "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_named(tokenizer: Tokenizer, fields: dict[str, Any], param: str, reason: str) -> None:
    async with running_api(tokenizer, prompt_embeds=INFO, max_body_size=1 << 20) as api:
        status, reply = await api.post(PATH, fields)
        assert (status, reply["error"]["param"]) == (400, param), reply
        assert reason in reply["error"]["message"]


async def test_a_server_without_the_flag_refuses_and_names_it(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer) as api:
        status, reply = await api.post(PATH, {"prompt_embeds": encoded()})
        assert (status, reply["error"]["param"]) == (400, "prompt_embeds")
        assert "--enable-prompt-embeds" in reply["error"]["message"]
        status, reply = await api.post("/v1/chat/completions", {"messages": [], "prompt_embeds": encoded()})
        assert (status, reply["error"]["param"]) == (400, "prompt_embeds")


async def test_memory_of_embeddings_counts_until_the_reply(api: Api) -> None:
    images = api.images
    await sent(api, [[7]], prompt_embeds=encoded())
    gc.collect()
    assert images.num_bytes == 0
    images.hold(held := asyncio.Event(), images.config.max_image_memory + 1)
    status, reply = await api.post(PATH, {"prompt_embeds": encoded()})
    assert status == RateLimitError.status and "--max-image-memory" in reply["error"]["message"]
    del held
    await sent(api, [[7]], prompt_embeds=encoded())


def test_arrays_of_programs_are_read_and_others_are_named() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        loaded = load_embeds(read_array(VALUES.astype(dtype), "p"), INFO, 64)
        assert loaded.num_tokens == 3 and loaded.num_bytes == VALUES.nbytes
    assert load_embeds(read_array(VALUES[None], "p"), INFO, 64).num_tokens == 3
    for wrong in (VALUES.astype(np.int32), "text", [["a"]], object()):
        with pytest.raises(InvalidRequestError, match="must be an array") as caught:
            read_array(wrong, "prompts[0].prompt_embeds")
        assert caught.value.param == "prompts[0].prompt_embeds"
