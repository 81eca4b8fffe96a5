"""Vectors on the HTTP side: lengths, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Iterator

import msgspec
import numpy as np
import pytest
from tokenizers import Encoding

from jaxserve.frontend.embedding import finished
from jaxserve.ipc.messages import EmbeddingInfo, Ready
from jaxserve.tenants import KeyRecord
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.models.goldens import DATA
from tests.unit.cli.test_documented_commands import read
from tests.unit.running_api import MAX_MODEL_LEN, MODEL_INFO, Api, running_api

EMBEDDING = msgspec.structs.replace(MODEL_INFO, embedding=EmbeddingInfo(2, "mean", normalizes=True))


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
        ("/classify", {"input": "a"}),
    ],
)
async def test_an_engine_that_generates_does_not_embed(api: Api, path: str, body: dict[str, str]) -> None:
    status, reply = await api.post(path, body)
    assert (status, reply["error"]["code"]) == (400, "unsupported_task")
    commands = re.findall(r"`(jaxserve [^`]+)`", reply["error"]["message"])
    for command in commands:
        read(shlex.split(command)[1:])
    assert [command.split()[-1] for command in commands] == ["vectors=sentence-transformers/all-MiniLM-L6-v2", "embed"]


async def sent(api: Api, body: dict[str, object]) -> list[int]:
    """Return the token ids of a text, as the engine gets them."""
    task = asyncio.create_task(api.post("/v1/embeddings", body))
    request = await api.engine.added()
    api.engine.output(request, [], finish_reason="stop", vector=np.ones(2, np.float32).tobytes())
    assert (await task)[0] == 200
    return request.prompt_token_ids


async def test_a_request_chooses_a_prompt_of_the_checkpoint(api: Api) -> None:
    prompts = {"query": "find: ", "document": "", "default": "text "}
    info = EmbeddingInfo(2, "mean", normalizes=True, prompts=prompts, default_prompt="default", lowers_texts=True)
    api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, embedding=info)))
    await api.engine.is_heard()
    expected = {"query": "find: a b", "document": "a b", None: "text a b"}
    for name, text in expected.items():
        assert await sent(api, {"input": "A b", "prompt_name": name}) == api.tokenizer.encode(text)
    assert await sent(api, {"input": [5, 6]}) == [5, 6]
    status, reply = await api.post("/v1/embeddings", {"input": "a", "prompt_name": "other"})
    assert (status, reply["error"]["param"]) == (400, "prompt_name")
    assert "must be one of query, document, default, got 'other'" in reply["error"]["message"]
    status, reply = await api.post("/v1/embeddings", {"input": [[5], [6]], "prompt_name": "query"})
    assert (status, reply["error"]["param"]) == (400, "prompt_name")


async def test_an_instruction_is_for_rerankers_with_a_template(api: Api) -> None:
    api.engine.say(Ready(EMBEDDING))
    await api.engine.is_heard()
    body = {"query": "a", "documents": ["b"], "instruction": "judge"}
    status, reply = await api.post("/v1/rerank", body)
    assert (status, reply["error"]["param"]) == (400, "instruction")
    await ready(api, scores_pairs=True)
    status, reply = await api.post("/v1/rerank", body)
    assert (status, reply["error"]["param"]) == (400, "instruction")


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


async def test_texts_that_find_no_place_count_for_no_key(tokenizer: Tokenizer) -> None:
    record = KeyRecord(key="a", name="team", tokens_per_minute=7)
    async with running_api(tokenizer, records=[record]) as api:
        api.engine.say(Ready(EMBEDDING))
        await api.engine.is_heard()
        body, headers = {"input": [[5]] * 6}, {"Authorization": "Bearer a"}
        first = asyncio.create_task(api.post("/v1/embeddings", body, headers=headers))
        request = await api.engine.added()
        assert (await api.post("/v1/embeddings", body, headers=headers))[0] == 429
        for left in reversed(range(6)):
            api.engine.output(request, [], finish_reason="stop", vector=np.ones(2, np.float32).tobytes())
            request = await api.engine.added() if left else request
        assert (await first)[0] == 200
        assert api.metrics.value("key_prompt_tokens", key="team") == 6
        assert (await api.post("/tokenize", {"prompt": "x"}, headers=headers))[0] == 200, "the key has a token left"


async def ready(api: Api, *, scores_pairs: bool) -> None:
    model_info = EmbeddingInfo(1, "cls", normalizes=True, labels=("LABEL_0",) if scores_pairs else ())
    api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, embedding=model_info)))
    await api.engine.is_heard()


@pytest.fixture
async def pairs_api() -> AsyncIterator[Api]:
    """With a tokenizer that tells the texts of a pair apart."""
    async with running_api(load_tokenizer(DATA / "encoders" / "bert_tiny")) as api:
        await ready(api, scores_pairs=True)
        yield api


async def test_a_cross_encoder_reads_each_pair_at_once(pairs_api: Api) -> None:
    api, documents = pairs_api, ["first", "second one", "third"]
    pairs = list(api.tokenizer.encode_pairs([("what?", document) for document in documents], None))
    task = asyncio.create_task(api.post("/v1/rerank", {"query": "what?", "documents": documents, "top_n": 2}))
    for pair, score in zip(pairs, (0.25, -3.5, 7.0), strict=True):
        request = await api.engine.added()
        assert (request.prompt_token_ids, request.text_pair_start) == pair
        assert request.text_pair_start is not None
        api.engine.output(request, [], finish_reason="stop", vector=np.float32(score).tobytes())
    status, reply = await task
    assert status == 200
    assert [(result["index"], result["relevance_score"]) for result in reply["results"]] == [(2, 7.0), (0, 0.25)]
    assert reply["usage"]["prompt_tokens"] == sum(len(ids) for ids, _ in pairs)


async def test_the_default_prompt_of_a_cross_encoder_comes_before_the_first_text_of_a_pair(pairs_api: Api) -> None:
    api = pairs_api
    info = EmbeddingInfo(1, "cls", True, {"judge": "Is it so? "}, "judge", lowers_texts=True, labels=("LABEL_0",))
    api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, embedding=info)))
    await api.engine.is_heard()
    task = asyncio.create_task(api.post("/v1/score", {"text_1": "What", "text_2": "That"}))
    request = await api.engine.added()
    [(ids, _)] = api.tokenizer.encode_pairs([("is it so? what", "that")], None)
    assert request.prompt_token_ids == ids
    api.engine.output(request, [], finish_reason="stop", vector=np.float32(0.5).tobytes())
    assert (await task)[0] == 200


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
async def test_a_text_may_fill_the_context(api: Api, num_tokens: int) -> None:
    await ready(api, scores_pairs=False)
    task = asyncio.create_task(api.post("/v1/embeddings", {"input": [[5] * num_tokens]}))
    if num_tokens == MAX_MODEL_LEN:
        request = await api.engine.added()
        api.engine.output(request, [], finish_reason="stop", vector=np.ones(1, np.float32).tobytes())
    assert (await task)[0] == (200 if num_tokens == MAX_MODEL_LEN else 400)


async def test_a_pair_that_is_too_long_is_refused_or_cut(api: Api) -> None:
    await ready(api, scores_pairs=True)
    body = {"text_1": "a b c", "text_2": ["d", "word " * 80]}
    status, reply = await api.post("/v1/score", body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert "number 1 of 'text_2'" in reply["error"]["message"]
    task = asyncio.create_task(api.post("/v1/score", {**body, "truncate_prompt_tokens": 10}))
    [(short, _)] = api.tokenizer.encode_pairs([("a b c", "d")], None)
    for length in (len(short), 10):
        request = await api.engine.added()
        assert len(request.prompt_token_ids) == length
        api.engine.output(request, [], finish_reason="stop", vector=np.float32(0.5).tobytes())
    status, reply = await task
    assert [score["score"] for score in reply["data"]] == [0.5, 0.5]


async def test_pairs_after_one_that_is_too_long_are_not_encoded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await ready(api, scores_pairs=True)
    encoded: list[str] = []
    encodings = Tokenizer._encodings

    def counted(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> Iterator[Encoding]:
        encoded.extend(texts)
        return encodings(tokenizer, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encodings", counted)
    body = {"query": "word " * 80, "documents": [str(number) for number in range(50)]}
    status, reply = await api.post("/v1/rerank", body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert encoded == ["word " * 80, "0"]


async def test_a_cross_encoder_makes_no_vectors(api: Api) -> None:
    await ready(api, scores_pairs=True)
    status, reply = await api.post("/v1/embeddings", {"input": "a"})
    assert (status, reply["error"]["code"]) == (400, "unsupported_task")
    assert "cross-encoder" in reply["error"]["message"]
