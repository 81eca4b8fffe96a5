"""Scores and rankings over HTTP with a fake engine, whose vectors count tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.executor.fake.models import fake_vector
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import TOKENIZER, Server, running

SIZE = 64
QUERY = "the quick brown fox"
DOCUMENTS = ["zzz 999", "the quick brown fox", "quick fox, brown dog"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = {"model": str(TOKENIZER), "served_model_name": "tiny", "task": "embed", "max_model_len": 64}
    with running({"embedding_size": SIZE}, model=model, limits={"max_inputs": 8}) as server:
        yield server
        assert "Traceback" not in server.output, server.output


def post(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    status, _, reply = server.request("POST", path, body)
    return status, json.loads(reply)


def tokens(*texts: str) -> int:
    return sum(len(load_tokenizer(TOKENIZER).encode(text)) for text in texts)


def cosine(one: str, other: str) -> float:
    a, b = (fake_vector(load_tokenizer(TOKENIZER).encode(text), SIZE) for text in (one, other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_one_text_is_compared_with_each(server: Server, path: str) -> None:
    status, reply = post(server, path, model="tiny", text_1=QUERY, text_2=DOCUMENTS)
    assert status == 200
    assert [item["index"] for item in reply["data"]] == [0, 1, 2]
    assert [item["score"] for item in reply["data"]] == pytest.approx([cosine(QUERY, text) for text in DOCUMENTS])
    assert reply["data"][1]["score"] == pytest.approx(1.0)
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == tokens(QUERY, *DOCUMENTS)
    assert (reply["object"], reply["data"][0]["object"], reply["model"]) == ("list", "score", "tiny")


def test_as_many_texts_are_compared_pair_by_pair(server: Server) -> None:
    status, reply = post(server, "/v1/score", text_1=DOCUMENTS[:2], text_2=[QUERY, DOCUMENTS[0]])
    assert status == 200
    expected = [cosine(DOCUMENTS[0], QUERY), cosine(DOCUMENTS[1], DOCUMENTS[0])]
    assert [item["score"] for item in reply["data"]] == pytest.approx(expected)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_with_the_closest_first(server: Server, path: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    status, reply = post(server, path, model="tiny", query=QUERY, documents=documents)
    assert status == 200
    assert [result["index"] for result in reply["results"]] == [1, 2, 0]
    assert [result["document"]["text"] for result in reply["results"]] == [DOCUMENTS[i] for i in (1, 2, 0)]
    scores = [result["relevance_score"] for result in reply["results"]]
    assert scores == pytest.approx([cosine(QUERY, DOCUMENTS[i]) for i in (1, 2, 0)])
    assert reply["usage"]["total_tokens"] == tokens(QUERY, *DOCUMENTS)


def test_only_the_best_are_returned_and_texts_may_be_left_out(server: Server) -> None:
    status, reply = post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert status == 200
    assert [sorted(result) for result in reply["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in reply["results"]] == [1, 2]
    assert len(post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=99)[1]["results"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2", "Missing required parameter"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1", "must not be empty"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "as many texts as 'text_1' (2), got 1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "1 to 8 items"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
        ("/v1/score", {"text_1": "a", "text_2": "word " * 90}, "text_2", "maximum context length is 64 tokens"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "1 to 8 items (--max-inputs), got 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 9}, "documents", "1 to 8 items (--max-inputs), got 9"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query", "must not be empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": ""}]}, "documents", "must not be empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "at least 1, got 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", "not supp"),
        ("/v1/rerank", {"documents": ["b"]}, "query", "Missing required parameter"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    status, reply = post(server, path, **body)
    assert status == 400
    assert reply["error"]["param"] == param
    assert said in reply["error"]["message"]
