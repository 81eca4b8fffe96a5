"""Embeddings and reranking with a real encoder, through every client that has them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.clients.lane import API_KEY, library
from tests.e2e.http_server import Server

langchain_openai = library("langchain_openai")
openai = library("openai")

TEXTS = ["A cat sleeps on the sofa.", "The kitten is napping.", "Shares fell on Monday."]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True)) / (math.hypot(*first) * math.hypot(*second))


def check(vectors: Sequence[Sequence[float]]) -> None:
    assert [len(vector) for vector in vectors] == [384] * 3
    cats, stranger = cosine(vectors[0], vectors[1]), cosine(vectors[0], vectors[2])
    assert cats > 0.5 > 0.2 > stranger


@pytest.fixture(scope="module")
def vectors(minilm: Server) -> list[list[float]]:
    """Leave out the encoding: the SDK then asks for base64."""
    with openai.OpenAI(base_url=f"{minilm.url}/v1", api_key=API_KEY, max_retries=0) as client:
        return [item.embedding for item in client.embeddings.create(model="minilm", input=TEXTS).data]


async def test_openai(minilm: Server, vectors: list[list[float]]) -> None:
    check(vectors)
    async with openai.AsyncOpenAI(base_url=f"{minilm.url}/v1", api_key=API_KEY, max_retries=0) as client:
        create = client.embeddings.create
        floats, short = await asyncio.gather(
            create(model="minilm", input=TEXTS[0], encoding_format="float"),
            create(model="minilm", input=TEXTS[0], dimensions=64),
        )
        assert floats.data[0].embedding == pytest.approx(vectors[0], abs=1e-5)
        assert cosine(short.data[0].embedding, vectors[0][:64]) == pytest.approx(1, abs=1e-5)
        assert floats.usage.prompt_tokens == floats.usage.total_tokens > 5
        with pytest.raises(openai.BadRequestError) as too_long:
            await create(model="minilm", input="word " * 1000)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "Hi"}])


def test_langchain(minilm: Server, vectors: list[list[float]]) -> None:
    """Leave out LangChain's length check, which fetches the tokenizer of an OpenAI model."""
    embeddings = langchain_openai.OpenAIEmbeddings(
        model="minilm", base_url=f"{minilm.url}/v1", api_key=API_KEY, check_embedding_ctx_length=False
    )
    found = embeddings.embed_documents(TEXTS)
    check(found)
    assert embeddings.embed_query(TEXTS[0]) == pytest.approx(vectors[0], abs=1e-5)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(litellm: Any, minilm: Server, vectors: list[list[float]], provider: str) -> None:
    options: Any = {"api_base": f"{minilm.url}/v1", "api_key": API_KEY}
    reply = litellm.embedding(model=f"{provider}/minilm", input=TEXTS, **options)
    assert reply.data[2]["embedding"] == pytest.approx(vectors[2], abs=1e-5)


def test_litellm_reranks(litellm: Any, minilm: Server) -> None:
    reply = litellm.rerank(
        model="hosted_vllm/minilm",
        query="the stock market",
        documents=TEXTS,
        top_n=2,
        api_base=f"{minilm.url}/v1",
        api_key=API_KEY,
    )
    best, second = reply.results
    assert best["index"] == 2
    assert best["relevance_score"] > second["relevance_score"]
