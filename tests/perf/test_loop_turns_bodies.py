"""Bodies of many short texts and objects keep no turn of the event loop busy, whatever they ask for.

A turn is counted in calls, like in `test_loop_turns`; what one call of C code does is bounded by the sizes that the loop decodes.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
from typing import Any

import msgspec
import pytest

from jaxserve.http import handler, inputs
from jaxserve.ipc.messages import EmbeddingInfo, Ready
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.perf.test_loop_turns import MAX_CALLS, TOKEN_OF_A, TurnCounts
from tests.unit.running_api import MODEL_INFO, Api, running_api

MAX_BYTES = 4 << 20
MAX_BYTES_ON_LOOP = 32 << 10
HI = [{"role": "user", "content": "x"}]
PART = {"type": "text", "text": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["a"] * 40} for i in range(12)}}
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": DEEP}} for i in range(100)]
INPUT = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
MESSAGES = "/v1/messages"
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI * 10_000}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 20_000}]}),
    ("/v1/chat/completions", {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL] * 9000}, *HI]}),
    ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": HI, "unknown": [{"a": "x"}] * 20_000}),
    ("/v1/chat/completions", {"messages": HI, **{f"k{i}": i for i in range(60_000)}}),
    ("/v1/completions", {"prompt": ["x"] * 5, "prediction": [{"a": "x"}] * 20_000}),
    ("/v1/responses", {"input": [INPUT] * 8000}),
    (MESSAGES, {"messages": [{"role": "user", "content": [PART] * 20_000}], "max_tokens": 3}),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": "x"}] * 4999 + HI, "max_tokens": 3}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI * 10_001}),
    ("/v1/chat/completions", {"messages": HI * 60_000}),
    ("/v1/chat/completions", {"messages": HI, "stop": ["x"] * 60_000}),
    ("/v1/chat/completions", {"messages": HI, "bad_words": ["x"] * 60_000}),
    ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"json": {"enum": ["x"] * 60_000}}}),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"choice": ["x"] * 60_000}}),
    ("/v1/chat/completions", {"messages": HI, "documents": [{"a": "x"}] * 20_000}),
    ("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"a": ["x"] * 60_000}}),
    ("/v1/completions", {"prompt": ["x"] * 60_000}),
    ("/v1/completions", {"prompt": ["x"] * 100_000}),
    ("/v1/completions", {"prompt": [[1]] * 30_000}),
    ("/v1/responses", {"input": [INPUT] * 11_000}),
    ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"] * 60_000 + ["x"]}),
    (MESSAGES, {"messages": HI, "max_tokens": 1, "stop_sequences": ["x"] * 60_000}),
    ("/tokenize", {"messages": HI * 10_000, "tools": TOOLS, "documents": [{"a": "x"}]}),
]
EMBEDDINGS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["x"] * 60_000}),
    ("/v1/embeddings", {"input": ["x"] * 100_000}),
    ("/classify", {"input": ["x"] * 60_000}),
    ("/v1/rerank", {"query": "x", "documents": ["x"] * 60_000}),
    ("/v1/rerank", {"query": "x", "documents": [{"text": "x"}] * 20_000}),
    ("/v1/score", {"text_1": "x", "text_2": ["x"] * 60_000}),
]


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the bodies that the event loop's own thread decodes."""
    sizes: list[int] = []
    decode = inputs.decode_request

    def watched(struct: Any, body: bytes, *args: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            sizes.append(len(body))
        return decode(struct, body, *args)

    monkeypatch.setattr(inputs, "decode_request", watched)
    return sizes


def shape_of(case: tuple[str, dict[str, Any]]) -> str:
    path, body = case
    return f"{path.rpartition('/')[2]}-{'-'.join([*body][:3])}"


async def answered(api: Api, path: str, body: dict[str, Any], status: int) -> tuple[TurnCounts, Any]:
    """Return the counts of the turns in which the request was answered, and the reply."""
    data = json.dumps(body).encode()
    assert MAX_BYTES_ON_LOOP < len(data) <= MAX_BYTES
    with TurnCounts() as turns:
        async with api.http.post(path, data=io.BytesIO(data), headers={"Content-Type": "application/json"}) as response:
            reply = await response.json()
    assert response.status == status, reply
    return turns, reply


@pytest.mark.parametrize("case", REFUSED, ids=map(shape_of, REFUSED))
@pytest.mark.slow
async def test_body_of_many_values_is_refused_beside_the_event_loop(
    tokenizer: Tokenizer, case: tuple[str, dict[str, Any]], on_loop: list[int]
) -> None:
    async with running_api(tokenizer, max_body_size=MAX_BYTES, max_model_len=1 << 20) as api:
        turns, reply = await answered(api, *case, status=400)
    assert reply["error"]["type"] == "invalid_request_error"
    assert turns.most < MAX_CALLS and not on_loop, f"{turns.most} calls in one of {turns.num_turns} turns"


@pytest.mark.parametrize("case", EMBEDDINGS, ids=map(shape_of, EMBEDDINGS))
async def test_many_texts_to_embed_are_refused_beside_the_event_loop(
    tokenizer: Tokenizer, case: tuple[str, dict[str, Any]], on_loop: list[int]
) -> None:
    async with running_api(tokenizer, max_body_size=MAX_BYTES, is_ready=False) as api:
        api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, embedding=EmbeddingInfo(2, "mean", normalizes=True))))
        await api.engine.is_heard()
        turns, _ = await answered(api, *case, status=400)
    assert turns.most < MAX_CALLS and not on_loop, f"{turns.most} calls in one of {turns.num_turns} turns"


TOKENS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "x y " * 60_000, "return_token_strs": True}),
    ("/detokenize", {"tokens": [TOKEN_OF_A] * 200_000}),
    ("/v1/messages/count_tokens", {"messages": HI * 9000}),
]


@pytest.mark.parametrize("case", TOKENS, ids=map(shape_of, TOKENS))
@pytest.mark.slow
async def test_many_tokens_are_spelled_and_counted_beside_the_event_loop(
    tokenizer: Tokenizer, case: tuple[str, dict[str, Any]], on_loop: list[int]
) -> None:
    async with running_api(tokenizer, max_body_size=MAX_BYTES, max_model_len=1 << 20) as api:
        turns, reply = await answered(api, *case, status=200)
    assert len(reply.get("token_strs") or reply.get("prompt") or [0] * reply["input_tokens"]) >= 9000
    assert turns.most < MAX_CALLS and not on_loop, f"{turns.most} calls in one of {turns.num_turns} turns"


@pytest.mark.parametrize("case", SERVED, ids=map(shape_of, SERVED))
@pytest.mark.slow
async def test_body_of_many_values_is_served_beside_the_event_loop(
    tokenizer: Tokenizer, case: tuple[str, dict[str, Any]], on_loop: list[int]
) -> None:
    body = case[1]
    async with running_api(tokenizer, max_body_size=MAX_BYTES, max_model_len=1 << 20) as api:

        async def serve() -> None:
            for _ in body.get("prompt", ["x"]):
                api.engine.output(await api.engine.added(), [TOKEN_OF_A], finish_reason="length")

        serving = asyncio.create_task(serve())
        turns, _ = await answered(api, *case, status=200)
        await serving
    assert turns.most < MAX_CALLS and not on_loop, f"{turns.most} calls in one of {turns.num_turns} turns"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_ids_of_long_prompts_are_streamed_beside_the_event_loop(
    tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[int] = []
    encode = handler.frame

    def watched(chunk: Any, *args: Any) -> bytes:
        data = encode(chunk, *args)
        if threading.current_thread() is threading.main_thread():
            on_loop.append(len(data))
        return data

    monkeypatch.setattr(handler, "frame", watched)
    content = {"messages": [{"role": "user", "content": "x y " * 10_000}]}
    prompt = content if "chat" in path else {"prompt": [[TOKEN_OF_A] * 20_000, [TOKEN_OF_A] * 30_000]}
    body = prompt | {"n": 2, "return_token_ids": True, "max_tokens": 3, "stream": True}
    async with running_api(tokenizer, max_body_size=MAX_BYTES, max_model_len=1 << 20) as api:

        async def serve() -> None:
            requests = [await api.engine.added() for _ in range(2 if "chat" in path else 4)]
            for token_ids, finish_reason in (([TOKEN_OF_A], None), ([TOKEN_OF_A] * 2, "length")):
                for request in requests:
                    api.engine.output(request, token_ids, finish_reason=finish_reason)
                await api.engine.is_heard()

        serving = asyncio.create_task(serve())
        async with api.http.post(path, json=body) as response:
            text = await response.text()
        await serving
    chunks = [json.loads(line) for line in text.replace("data: ", "").split("\n\n")[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    prompts = [len(each["prompt_token_ids"]) for each in (*chunks, *choices) if "prompt_token_ids" in each]
    assert prompts == [20_000] * 2 + [30_000] * 2 if "prompt" in prompt else prompts[0] > 10_000
    assert [sum(len(c.get("token_ids", ())) for c in choices if c["index"] == i) for i in range(2)] == [3, 3]
    assert all(size < 1000 for size in on_loop), on_loop


async def test_pages_of_long_prompts_are_hashed_beside_the_event_loop(tokenizer: Tokenizer) -> None:
    prompts = [[TOKEN_OF_A + i] * 160_000 for i in range(2)]
    async with running_api(tokenizer, max_body_size=MAX_BYTES, max_model_len=1 << 20, num_replicas=2) as api:

        async def serve() -> None:
            for _ in prompts:
                api.engine.output(await api.engine.added(), [TOKEN_OF_A], finish_reason="length")

        serving = asyncio.create_task(serve())
        turns, _ = await answered(api, "/v1/completions", {"prompt": prompts, "max_tokens": 1}, status=200)
        await serving
    assert turns.most < MAX_CALLS, f"{turns.most} calls in one of {turns.num_turns} turns"
