"""The LiteLLM proxy before the server, configured as docs/clients.md says: OpenAI's and Anthropic's APIs by three providers."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.tools.bench.startup import free_port
from tests.clients.lane import API_KEY, library
from tests.clients.page import URL, blocks_of
from tests.clients.questions import ANSWER, PARIS, QUESTION, Capital
from tests.e2e.http_server import Server, launched, until

anthropic = library("anthropic")
openai = library("openai")

START_TIMEOUT_S = 200.0
PROVIDERS = ("openai", "hosted_vllm", "anthropic")
GREEDY: Any = {"temperature": 0, "max_tokens": 64}


def is_live(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health/liveliness", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def proxy(smollm2: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a proxy with the page's configuration."""
    [text] = blocks_of("LiteLLM proxy", "yaml")
    file = tmp_path_factory.mktemp("proxy") / "config.yaml"
    file.write_text(text.replace(URL, smollm2.url).replace("secret", API_KEY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(file), "--host", "127.0.0.1"]
        port = free_port()
        with launched([*command, "--port", str(port)], file.parent) as server:
            server.port = port
            until(lambda: is_live(server) or server.process.poll() is not None, "no proxy", START_TIMEOUT_S)
            assert server.process.poll() is None, server.output
            yield server.url


@pytest.mark.parametrize("name", PROVIDERS)
def test_openais_api_through_each_provider(proxy: str, name: str) -> None:
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="sk-proxy", max_retries=0) as client:
        options: Any = {"model": name, "messages": QUESTION} | GREEDY
        plain = client.chat.completions.create(**options)
        assert plain.choices[0].message.content == ANSWER
        assert plain.usage.completion_tokens == 8
        chunks = list(client.chat.completions.create(**options, stream=True))
        deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(deltas) == ANSWER
        parsed = client.chat.completions.parse(**options, response_format=Capital)
        assert parsed.choices[0].message.parsed == PARIS


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_forced_call_through_each_provider(proxy: str, name: str) -> None:
    tool = {"type": "function", "function": {"name": "name_capital", "parameters": Capital.model_json_schema()}}
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="sk-proxy", max_retries=0) as client:
        reply = client.chat.completions.create(
            model=name, messages=QUESTION, tools=[tool], tool_choice="required", **GREEDY
        )
    call = reply.choices[0].message.tool_calls[0]
    assert call.function.name == "name_capital"
    assert Capital.model_validate_json(call.function.arguments) == PARIS


@pytest.mark.parametrize("name", PROVIDERS)
def test_anthropics_api_through_each_provider(proxy: str, name: str) -> None:
    options: Any = {"model": name, "messages": QUESTION, "max_tokens": 64, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=proxy, api_key="sk-proxy", max_retries=0) as client:
        message = client.messages.create(**options)
        assert [block.text for block in message.content] == [ANSWER]
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == ANSWER


def test_errors_keep_their_status(proxy: str) -> None:
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="sk-proxy", max_retries=0) as client:
        for name in PROVIDERS:
            with pytest.raises(openai.BadRequestError, match="1024"):
                client.chat.completions.create(model=name, messages=[{"role": "user", "content": "word " * 2000}])
