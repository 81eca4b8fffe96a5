"""Embeddings over HTTP with a fake engine, through the openai client and without."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve.executor.fake.models import fake_vector
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import TOKENIZER, Server, running

SIZE = 16
TEXTS = ["Hello world", "hello", "a b c d e f g"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = {"max_input_tokens": 3000, "max_inputs": 1500}
    with running(
        {"embedding_size": SIZE},
        model={"model": str(TOKENIZER), "served_model_name": "tiny", "task": "embed", "max_model_len": 32},
        limits=limits,
    ) as server:
        yield server
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(token_ids: list[int], dimensions: int | None = None) -> np.ndarray:
    vector = fake_vector(token_ids, SIZE)[:dimensions]
    return vector / np.linalg.norm(vector)


def encode(text: str) -> list[int]:
    return load_tokenizer(TOKENIZER).encode(text)


def post(server: Server, body: dict[str, Any], path: str = "/v1/embeddings") -> tuple[int, Any]:
    status, _, reply = server.request("POST", path, body)
    return status, json.loads(reply)


def test_the_sdk_decodes_what_it_asks_for_by_default(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="tiny", input=TEXTS, user="somebody")
    assert [item.index for item in reply.data] == [0, 1, 2]
    for item, text in zip(reply.data, TEXTS, strict=True):
        np.testing.assert_allclose(item.embedding, expected(encode(text)), rtol=1e-6)
    assert reply.object == "list"
    assert reply.model == "tiny"
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(len(encode(text)) for text in TEXTS)


@pytest.mark.parametrize("given", ["Hello world", [11, 12, 13], [[11, 12, 13], [7]], ["Hello world"]])
def test_every_kind_of_input_is_taken(client: openai.OpenAI, given: Any) -> None:
    reply = client.embeddings.create(model="tiny", input=given, encoding_format="float")
    lists = [encode("Hello world")] if given in ("Hello world", ["Hello world"]) else given
    lists = [lists] if isinstance(lists[0], int) else lists
    assert len(reply.data) == len(lists)
    for item, token_ids in zip(reply.data, lists, strict=True):
        np.testing.assert_allclose(item.embedding, expected(token_ids), rtol=1e-6)


def test_base64_is_little_endian_float32(server: Server) -> None:
    status, reply = post(server, {"input": [7, 8, 9], "encoding_format": "base64"})
    assert status == 200
    vector = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected([7, 8, 9]), rtol=1e-6)


def test_dimensions_cut_and_make_the_length_one_again(client: openai.OpenAI) -> None:
    ids = list(range(3, 20))
    reply = client.embeddings.create(model="tiny", input=ids, dimensions=5)
    np.testing.assert_allclose(reply.data[0].embedding, expected(ids, 5), rtol=1e-6)
    with pytest.raises(openai.BadRequestError, match="this model's vectors have 16, got 17") as caught:
        client.embeddings.create(model="tiny", input=ids, dimensions=17)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_vectors_come_as_long_as_they_are_on_request(server: Server, name: str) -> None:
    status, reply = post(server, {"input": [1, 2, 2], name: False})
    assert status == 200
    np.testing.assert_array_equal(reply["data"][0]["embedding"], fake_vector([1, 2, 2], SIZE))


def test_texts_are_cut_at_their_end(server: Server) -> None:
    ids = [*range(40, 80)]
    status, reply = post(server, {"input": ids, "truncate_prompt_tokens": 4})
    assert (status, reply["usage"]["prompt_tokens"]) == (200, 4)
    np.testing.assert_allclose(reply["data"][0]["embedding"], expected(ids[:4]), rtol=1e-6)
    status, reply = post(server, {"input": "word " * 100, "truncate_prompt_tokens": -1})
    assert (status, reply["usage"]["prompt_tokens"]) == (200, 32)
    np.testing.assert_allclose(reply["data"][0]["embedding"], expected(encode("word " * 100)[:32]), rtol=1e-6)


def test_a_long_list_goes_through_a_small_engine_in_order(client: openai.OpenAI) -> None:
    texts = [[i % 900, (i * 7) % 900] for i in range(1200)]
    reply = client.embeddings.create(model="tiny", input=texts)
    assert [item.index for item in reply.data] == list(range(1200))
    for item, ids in zip(reply.data, texts, strict=True):
        np.testing.assert_allclose(item.embedding, expected(ids), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "Missing required parameter: 'input'"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input", "must not be empty"),
        ({"input": ["a", [3]]}, "input", "must be a string, a list of strings"),
        ({"input": [5000]}, "input", "token id 5000 is outside the vocabulary"),
        ({"input": [[1.5]]}, "input", "token ids must be integers"),
        ({"input": 5}, "input", "Expected `str | array | null`, got `int`"),
        ({"input": [[1]] * 1501}, "input", "1 to 1500 items (--max-inputs), got 1501"),
        ({"input": [[1] * 30] * 101}, "input", "may have 3000 tokens (--max-input-tokens), got 3030"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be one of 'base64', 'float', got 'hex'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1, got 0"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1, got 0"),
        ({"input": "a", "truncate_prompt_tokens": 33}, "truncate_prompt_tokens", "takes 32 tokens, got 33"),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "says the opposite"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "a", "endianness": "big"}, "endianness", "not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Server, body: dict[str, Any], param: str, said: str) -> None:
    status, reply = post(server, body)
    assert status == 400
    assert reply["error"]["param"] == param
    assert said in reply["error"]["message"]


@pytest.mark.parametrize("given", [[3] * 33, "word " * 60, "x" * 100_000])
def test_a_text_that_is_too_long_has_a_code_of_its_own(client: openai.OpenAI, given: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 32 tokens") as caught:
        client.embeddings.create(model="tiny", input=given)
    assert caught.value.code == "context_length_exceeded"


def test_a_model_of_another_name_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "model": "tiny"}),
    ],
)
def test_an_engine_that_embeds_does_not_generate(server: Server, path: str, body: dict[str, Any]) -> None:
    status, reply = post(server, body, path)
    assert status == 400
    assert "embeds texts" in reply["error"]["message"]


def test_models_and_metrics_know_of_it(server: Server, client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == 32
    before = server.metric("prompt_tokens_total")
    done = server.metric('request_success_total{engine="0",finished_reason="stop"')
    client.embeddings.create(model="tiny", input=[[1, 2, 3], [4]])
    server.await_metric("prompt_tokens_total", before + 4)
    assert server.metric('request_success_total{engine="0",finished_reason="stop"') == done + 2
    server.await_metric("num_requests_running", 0)


@pytest.mark.slow
def test_a_failed_step_fails_its_request_and_no_other() -> None:
    model = {"model": str(TOKENIZER), "served_model_name": "tiny", "task": "embed"}
    with running({"fail_at_steps": [0]}, model=model) as server:
        status, reply = post(server, {"input": [1, 2]})
        assert (status, reply["error"]["type"]) == (500, "server_error")
        assert post(server, {"input": [1, 2]})[0] == 200
        assert server.metric('request_success_total{engine="0",finished_reason="error"') == 1
