"""Labels of texts on the HTTP side: probabilities, refusals, and models that give none."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.frontend.embedding import activated
from jaxserve.ipc.messages import EmbeddingInfo, Ready
from jaxserve.types import LabelActivation
from tests.unit.running_api import MODEL_INFO, Api

LABELS = ("sports", "weather", "music")


async def ready(api: Api, activation: LabelActivation = "softmax", labels: tuple[str, ...] = LABELS) -> None:
    model = EmbeddingInfo(len(labels), "cls", normalizes=True, labels=labels, activation=activation)
    api.engine.say(Ready(msgspec.structs.replace(MODEL_INFO, embedding=model)))
    await api.engine.is_heard()


async def classified(api: Api, logits: list[list[float]], **body: Any) -> Any:
    """Return the reply to a request, for whose texts the engine computes these logits."""
    task = asyncio.create_task(api.post("/classify", body))
    for row in logits:
        request = await api.engine.added()
        api.engine.output(request, [], finish_reason="stop", vector=np.array(row, "<f4").tobytes())
    status, reply = await task
    assert status == 200, reply
    return reply


def test_logits_become_probabilities() -> None:
    logits = [np.array([0, np.log(3)], np.float32), np.array([1000, -1000], np.float32)]
    np.testing.assert_allclose(activated(logits, "softmax"), [[0.25, 0.75], [1, 0]], atol=1e-6)
    np.testing.assert_allclose(activated(logits, "sigmoid"), [[0.5, 0.75], [1, 0]], atol=1e-6)
    np.testing.assert_array_equal(activated(logits, "none"), np.stack(logits))


async def test_each_text_has_a_label_and_the_probability_of_all(api: Api) -> None:
    await ready(api)
    reply = await classified(api, [[0.0, np.log(2), 0.0], [5.0, 0.0, 0.0]], input=["a", "b c"])
    assert [(item["index"], item["label"], item["num_classes"]) for item in reply["data"]] == [
        (0, "weather", 3),
        (1, "sports", 3),
    ]
    assert reply["data"][0]["probs"] == pytest.approx([0.25, 0.5, 0.25])
    assert reply["usage"]["prompt_tokens"] == sum(len(api.tokenizer.encode(text)) for text in ("a", "b c"))
    assert (reply["object"], reply["model"]) == ("list", "tiny")


async def test_a_request_may_ask_for_logits_and_give_token_ids(api: Api) -> None:
    await ready(api, "sigmoid")
    reply = await classified(api, [[0.0, -1.0, 2.0]], input=[5, 6], use_activation=False)
    assert (reply["data"][0]["probs"], reply["data"][0]["label"]) == ([0.0, -1.0, 2.0], "music")
    assert reply["usage"]["prompt_tokens"] == 2


async def test_a_cross_encoder_gives_its_score_of_a_text(api: Api) -> None:
    await ready(api, "sigmoid", ("LABEL_0",))
    reply = await classified(api, [[0.0]], input="a")
    assert reply["data"] == [{"index": 0, "label": "LABEL_0", "probs": [0.5], "num_classes": 1}]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/embeddings", {"input": "a"}, "is a classifier: it labels texts (/classify) and makes no vectors"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "is a classifier of 3 labels (/classify): it gives no score"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "is a classifier of 3 labels (/classify)"),
    ],
)
async def test_a_classifier_makes_no_vectors_and_scores(
    api: Api, path: str, body: dict[str, Any], expected: str
) -> None:
    await ready(api)
    status, reply = await api.post(path, body)
    assert (status, reply["error"]["code"]) == (400, "unsupported_task")
    assert expected in reply["error"]["message"]


async def test_a_model_without_labels_classifies_nothing(api: Api) -> None:
    await ready(api, labels=())
    status, reply = await api.post("/classify", {"input": "a"})
    assert (status, reply["error"]["code"]) == (400, "unsupported_task")
    assert "is no classifier: it makes vectors of texts (/v1/embeddings)" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        ({}, "input", "Missing required parameter"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input", "must not be empty"),
        ({"input": ["a", [5]]}, "input", "must be a string, a list of strings"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1, got 0"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "not supported"),
        ({"input": [10**6]}, "input", ""),
    ],
)
async def test_invalid_fields_are_named(api: Api, body: dict[str, Any], field: str, expected: str) -> None:
    await ready(api)
    status, reply = await api.post("/v1/classify", body)
    assert (status, reply["error"]["param"]) == (400, field)
    assert expected in reply["error"]["message"]
