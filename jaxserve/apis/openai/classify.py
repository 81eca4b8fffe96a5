"""`POST /classify`, in vLLM's format: the label of a text, of several texts, or of token ids."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.apis.openai.embeddings import EmbeddingUsage, TextFields, check_texts
from jaxserve.apis.routes import Call, Encoded, Route
from jaxserve.apis.schema.common import UnixTime, version_header
from jaxserve.apis.schema.encode import encode_in_parts
from jaxserve.frontend.embedding import activated, check_total, encode_inputs, noting_departure, vectors_of


class ClassifyRequest(TextFields, kw_only=True):
    use_activation: Annotated[
        bool | None,
        Meta(
            description="False: `probs` are logits. Default: true, probabilities by a softmax, or by a sigmoid of each label where several may hold (`problem_type` of the checkpoint)."
        ),
    ] = None


class Classification(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Index of the input.")]
    label: Annotated[str, Meta(description="Name of the label with the largest number (`id2label` of the checkpoint).")]
    probs: Annotated[list[float], Meta(description="Probability of each label, in the checkpoint's order.")]
    num_classes: Annotated[int, Meta(description="Number of labels.")]


class ClassifyReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: UnixTime
    model: str
    data: Annotated[list[Classification], Meta(description="Results in the order of the inputs.")]
    usage: EmbeddingUsage


@partial(Route, "POST", "/classify", tag="Scores", reply=ClassifyReply)
async def classify(call: Call, body: ClassifyRequest) -> Encoded:
    """Give each text the probabilities of the model's labels."""
    frontend = call.frontend
    inputs = await call.off_loop(check_texts, body, frontend.limits)
    frontend.require_model(body.model)
    model_info, model = frontend.require_labels()
    texts = await encode_inputs(
        frontend,
        model_info,
        inputs,
        truncate=body.truncate_prompt_tokens,
        param="input",
        add_special_tokens=body.add_special_tokens is not False,
    )
    check_total(frontend, texts, "input")
    with noting_departure(frontend):
        logits = await vectors_of(frontend, model_info, texts, body.priority)
    num_tokens = sum(map(len, texts))

    def encode() -> bytes:
        rows = activated(logits.arrays, "none" if body.use_activation is False else model.activation)
        data = [
            Classification(index=i, label=model.labels[row.argmax()], probs=row.tolist(), num_classes=len(row))
            for i, row in enumerate(rows)
        ]
        usage = EmbeddingUsage(num_tokens, num_tokens)
        name = f"classify-{uuid.uuid4().hex}"
        reply = ClassifyReply(id=name, created=int(time.time()), model=frontend.model_name, data=data, usage=usage)
        return encode_in_parts(reply)

    return Encoded(body=await asyncio.to_thread(encode), headers=version_header(logits.weight_version))


classify_versioned = replace(classify, path="/v1/classify", name="classify_versioned", summary="The same as /classify.")
