"""Large replies are encoded in parts, to the same bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxserve.apis.openai.chat_schema import ChoiceLogprobs, ContentLogprob, TopLogprob
from jaxserve.apis.openai.embeddings import Embedding, EmbeddingReply, EmbeddingUsage
from jaxserve.apis.schema import encode

TOP = TopLogprob("é", -1.5, [195, 169])


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"a": [], "b": None, "c": [[1, 2], [], [3]]},
        list(range(1000)),
        [[0.1 * i for i in range(300)] for _ in range(600)],
        ChoiceLogprobs([ContentLogprob("é", -1.5, [195, 169], [TOP] * 20) for _ in range(700)]),
        EmbeddingReply(
            data=[Embedding(index=i, embedding=[0.5] * 257) for i in range(300)],
            model="m",
            usage=EmbeddingUsage(1, 1),
        ),
        {"tops": [{"a": 1.0, "b": 2.0}, None] * 300, "text": "x" * 100_000},
        ['é\n"😀' * 50_000, "x"],
    ],
)
def test_parts_give_the_same_bytes(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sizes = msgspec.json.encode(value), []

    def counted(part: Any) -> bytes:
        data = msgspec.json.encode(part)
        sizes.append(len(part) if isinstance(part, list) else 0)
        assert not isinstance(part, str) or len(part) <= 64 << 10
        return data

    monkeypatch.setattr(encode, "_encode", counted)
    assert encode.encode_in_parts(value) == whole
    assert max(sizes) <= 256


def test_only_large_replies_leave_the_event_loop() -> None:
    assert not encode.is_large(EmbeddingUsage(1, 1))
    assert not encode.is_large({"text": "x" * 100_000, "ids": list(range(1000))})
    assert encode.is_large({"ids": list(range(100_000))})
    assert encode.is_large({"text": "x" * 1_000_000})
    assert encode.is_large(ChoiceLogprobs([ContentLogprob("é", -1.5, [195, 169], [TOP] * 20) for _ in range(100)]))
