"""Pictures through the official client and a real server of a tiny random model: the tokens of the engine's own test."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve import LLM, SamplingParams
from tests.e2e.http_server import Server
from tests.e2e.real_server import serving
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.unit.frontend.images.test_decode import file_of

pytestmark = [pytest.mark.slow]

MODEL = DATA / "vision" / "smolvlm_tiny"
FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def server(programs: Path) -> Iterator[Server]:
    with serving(str(MODEL), *FLAGS, programs=programs) as running:
        yield running
        assert "Traceback" not in running.output, running.output


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def data_url(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(file_of(picture(30, 45, seed))).decode()


def chat(*urls: str) -> Any:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


OPTIONS: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def test_all_apis_and_streams_read_the_same_picture(server: Server, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=chat(data_url(0)), **OPTIONS)
    text = whole.choices[0].message.content
    stream = client.chat.completions.create(messages=chat(data_url(0)), stream=True, **OPTIONS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text
    items: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": data_url(0), "detail": "auto"},
                {"type": "input_text", "text": "What is it?"},
            ],
        }
    ]
    response = client.responses.create(
        model="tiny", input=items, temperature=0, max_output_tokens=12, extra_body={"ignore_eos": True}
    )
    assert response.output_text == text
    block = {"type": "base64", "media_type": "image/png", "data": data_url(0).partition(",")[2]}
    content = [{"type": "image", "source": block}, {"type": "text", "text": "What is it?"}]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "messages": [{"role": "user", "content": content}]}
    status, _, raw = server.request("POST", "/v1/messages", body)
    assert status == 200, raw
    assert json.loads(raw)["content"][0]["text"] == text
    status, _, raw = server.request("POST", "/v1/messages/count_tokens", {"messages": body["messages"]})
    assert json.loads(raw)["input_tokens"] == whole.usage.prompt_tokens  # type: ignore[union-attr]


def test_llm_reads_a_picture_of_pillow_as_the_server_reads_its_file(client: openai.OpenAI, programs: Path) -> None:
    whole = client.chat.completions.create(messages=chat(data_url(0)), **OPTIONS)
    parts: list[Any] = [
        {"type": "image_pil", "image_pil": picture(30, 45, 0)},
        {"type": "text", "text": "What is it?"},
    ]
    options: Any = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "compile_cache": str(programs)}
    with LLM(str(MODEL), cpu_kernels="xla", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        [said] = llm.chat([{"role": "user", "content": parts}], params, progress_bar=False)
    assert said.outputs[0].text == whole.choices[0].message.content


def test_all_apis_read_pictures_in_results_of_calls(server: Server, client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": data_url(0)}}]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
    ]
    whole = client.chat.completions.create(messages=turns, **OPTIONS)
    text = whole.choices[0].message.content
    turns[2] = turns[2] | {"content": [parts[0], {"type": "image_url", "image_url": {"url": data_url(1)}}]}
    assert client.chat.completions.create(messages=turns, **OPTIONS).choices[0].message.content != text
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": data_url(0)}]
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    response = client.responses.create(
        model="tiny", input=items, temperature=0, max_output_tokens=12, extra_body={"ignore_eos": True}
    )
    assert response.output_text == text
    block = {"type": "base64", "media_type": "image/png", "data": data_url(0).partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [parts[0], {"type": "image", "source": block}]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "messages": messages}
    status, _, raw = server.request("POST", "/v1/messages", body)
    assert status == 200, raw
    assert json.loads(raw)["content"][0]["text"] == text


def test_pictures_differ_and_hostile_ones_get_400(server: Server, client: openai.OpenAI) -> None:
    one, other = (client.chat.completions.create(messages=chat(data_url(seed)), **OPTIONS) for seed in (1, 2))
    assert one.choices[0].message.content != other.choices[0].message.content
    for url in ("data:image/png;base64,aGVsbG8=", "http://169.254.169.254/latest", "file:///etc/passwd"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=chat(data_url(1), url), **OPTIONS)
        assert caught.value.param == "messages[0].content[1].image_url.url"
    _, _, raw = server.request("GET", "/metrics")
    (line,) = [row for row in raw.decode().splitlines() if "compilations_total{" in row and 'phase="serving"' in row]
    assert line.endswith(" 0.0")
