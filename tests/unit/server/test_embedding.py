"""Vectors on the HTTP side: lengths, refusals, and clients that leave."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from jaxserve.ipc.messages import EmbeddingFacts, Ready
from jaxserve.server.embedding import finished
from tests.unit.server.conftest import FACTS, Api

EMBEDDING = msgspec.structs.replace(FACTS, embedding=EmbeddingFacts(2, "mean", normalizes=True))


def test_vectors_are_cut_before_their_length_is_made_one() -> None:
    vectors = [np.array([3, 4, 12], np.float32), np.array([0, 0, 5], np.float32)]
    np.testing.assert_allclose(finished(vectors, normalizes=True), [[3 / 13, 4 / 13, 12 / 13], [0, 0, 1]])
    np.testing.assert_allclose(finished(vectors, normalizes=True, dimensions=2), [[0.6, 0.8], [0, 0]])
    np.testing.assert_array_equal(finished(vectors, normalizes=False, dimensions=2), [[3, 4], [0, 0]])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_an_engine_that_generates_does_not_embed(api: Api, path: str, body: dict[str, str]) -> None:
    status, reply = await api.post(path, body)
    assert (status, reply["error"]["code"]) == (400, "unsupported_task")
    assert "`--task embed`" in reply["error"]["message"]


async def test_a_client_that_leaves_ends_its_texts(api: Api) -> None:
    api.engine.say(Ready(EMBEDDING))
    await api.engine.is_heard()
    task = asyncio.create_task(api.post("/v1/embeddings", {"input": [[1], [2], [3]]}))
    added = {(await api.engine.added()).request_id for _ in range(3)}
    task.cancel()
    assert {await api.engine.was_aborted() for _ in range(3)} == added


async def test_the_first_refusal_ends_the_request_and_the_other_texts(api: Api) -> None:
    api.engine.say(Ready(EMBEDDING))
    await api.engine.is_heard()
    task = asyncio.create_task(api.post("/v1/embeddings", {"input": [[1], [2]]}))
    first, second = await api.engine.added(), await api.engine.added()
    api.engine.refuse(first, "RateLimitError", "the queue is full")
    status, reply = await task
    assert (status, reply["error"]["message"]) == (429, "the queue is full")
    assert await api.engine.was_aborted() == second.request_id
