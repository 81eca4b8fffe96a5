"""/v1/responses, whole: the official client against a server whose engine writes what a script says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response

from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import TOKENIZER, Server, running, until
from tests.e2e.test_http_tools import EOS, REPLY, START, TEMPLATE
from tests.processes import frozen

TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("get_weather", "now")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    tokenizer = load_tokenizer(TOKENIZER)
    script = [*tokenizer.encode(f"assistant\n{REPLY}", add_special_tokens=False), EOS]
    fake = {"vocab_size": 389, "num_blocks": 2048, "script": {"cue": START, "token_ids": script}}
    model = {"model": str(TOKENIZER), "served_model_name": "tiny", "chat_template": str(template)}
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "strict_parameters": True}
    with running(fake, model=model, server=parsers) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def validated(response: Response) -> dict[str, Any]:
    """The response as JSON, which the SDK's own types accept word for word."""
    fields = response.to_dict()
    Response.model_validate(fields, strict=True)
    return fields


def check_output(fields: dict[str, Any]) -> None:
    reasoning, message, weather, now = fields["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "The user wants the weather."}]
    assert [part["text"] for part in message["content"]] == ["One moment."]
    assert json.loads(weather["arguments"]) == {"city": "Paris", "note": 'café "x"'}
    assert (weather["name"], now["name"], now["arguments"]) == ("get_weather", "now", "{}")
    assert {item["status"] for item in fields["output"]} == {"completed"}


def test_a_response_has_reasoning_message_and_calls(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="The weather?", tools=TOOLS)
    check_output(validated(response))
    assert response.output_text == "One moment."
    assert (response.status, response.object, response.tools[0].type) == ("completed", "response", "function")
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_the_streaming_helper_builds_the_same_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="The weather?", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    check_output(validated(final))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == final.output_text
    # How many there are depends on who is faster: tokens that wait for a busy server are sent together.
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(item.arguments for item in final.output if item.type == "function_call")
    assert len(arguments) > 1


async def test_an_asynchronous_stream_ends_without_done(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        events = [event async for event in await client.responses.create(model="tiny", input="Hi", stream=True)]
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    raw = server.request("POST", "/v1/responses", {"input": "Hi", "stream": True})[2].decode()
    assert "[DONE]" not in raw
    frames = [frame.split("\n") for frame in raw.removesuffix("\n\n").split("\n\n")]
    assert all(name == f"event: {json.loads(data.removeprefix('data: '))['type']}" for name, data in frames)


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI) -> None:
    """The second prompt is that of a client that sends everything again, to the last token."""
    first = client.responses.create(model="tiny", input="The weather?", tools=TOOLS, instructions="Be brief.")
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    second = client.responses.create(model="tiny", input=results, tools=TOOLS, previous_response_id=first.id)
    check_output(validated(second))
    assert second.previous_response_id == first.id
    history: Any = [{"role": "user", "content": "The weather?"}, *(item.to_dict() for item in first.output), *results]
    stateless = client.responses.create(model="tiny", input=history, tools=TOOLS, store=False)
    assert second.usage is not None
    assert stateless.usage is not None
    assert second.usage.input_tokens == stateless.usage.input_tokens > len("The weather?ok")


def test_a_stored_response_is_found_listed_and_deleted(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(i)} for i in range(3)]
    response = client.responses.create(model="tiny", input=items, metadata={"topic": "x"})
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    texts = [item.content[0].text for item in client.responses.input_items.list(response.id, limit=2)]  # type: ignore[union-attr]
    assert texts == ["2", "1", "0"]
    client.responses.delete(response.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=response.id) as caught:
            ask(response.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="Hi", previous_response_id=response.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_reply_that_was_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="Hi", max_output_tokens=20)
    validated(response)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"  # type: ignore[union-attr]
    with client.responses.stream(model="tiny", input="Hi", max_output_tokens=20) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"


class Weather(pydantic.BaseModel):
    unit: Literal["C", "F"]
    days: Literal[1, 2]


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="tiny", input="Hi", text_format=Weather)
    assert isinstance(response.output_parsed, Weather)
    with client.responses.stream(model="tiny", input="Hi", text_format=Weather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "now"}
    only: Any = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    for asked in (choice, only):
        response = client.responses.create(
            model="tiny", input="Hi", tools=TOOLS, tool_choice=asked, parallel_tool_calls=False, max_output_tokens=400
        )
        assert [item.name for item in response.output if item.type == "function_call"] == ["now"]
        assert response.to_dict()["tool_choice"] == asked


def test_a_background_response_is_awaited(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="The weather?", tools=TOOLS, background=True)
    until(lambda: client.responses.retrieve(response.id).status != "in_progress", "the response never ended")
    check_output(validated(client.responses.retrieve(response.id)))


def test_a_background_response_is_cancelled(client: openai.OpenAI, server: Server) -> None:
    with frozen(server.engine_pid()):  # it would be quick to end it by itself
        response = client.responses.create(model="tiny", input="Hi", background=True)
        assert client.responses.cancel(response.id).status == "cancelled"


def test_a_background_response_is_stored_at_its_end_though_others_took_its_place() -> None:
    with (
        running({"vocab_size": 389, "num_blocks": 256}, responses={"max_stored_responses": 1}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with frozen(server.engine_pid()):
            long, _ = (
                client.responses.create(model="tiny", input="Hi", background=True, max_output_tokens=count)
                for count in (60, 1)
            )
            assert server.request("GET", f"/v1/responses/{long.id}")[0] == 404
        until(lambda: server.request("GET", f"/v1/responses/{long.id}")[0] == 200, "it was not stored again")
        assert client.responses.retrieve(long.id).status in ("completed", "incomplete")


@pytest.mark.slow
def test_any_api_process_answers_for_the_responses_of_all() -> None:
    with running({"vocab_size": 389, "num_blocks": 256}, server={"api_processes": 3}) as server:

        def new_client() -> openai.OpenAI:
            return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        first: str | None = None
        owners = set()
        for _ in range(12):
            with new_client() as client:  # a new connection may be another process's
                response = client.responses.create(
                    model="tiny", input="Hi", max_output_tokens=2, previous_response_id=first
                )
                first = first or response.id
                owners.add(response.id[len("resp_") :][:3])
                assert client.responses.retrieve(first).id == first
        assert len(owners) > 1, "twelve connections met one process only"
        with new_client() as client:
            client.responses.delete(first or "")
        with new_client() as client, pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first or "")
