"""`POST /v1/embeddings`: a text, several texts, token ids, or several lists of token ids, to vectors."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from jaxserve.apis.routes import Call, Encoded, Route
from jaxserve.apis.schema.common import ModelName, OwnId, version_header
from jaxserve.apis.schema.encode import encode_in_parts
from jaxserve.apis.schema.inputs import texts_or_ids
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid
from jaxserve.frontend.checks import check_bound
from jaxserve.frontend.embedding import (
    check_dimensions,
    check_total,
    encode_inputs,
    finished,
    noting_departure,
    vectors_of,
)

EncodingFormat = Literal["float", "base64"]


class InputFields(msgspec.Struct, kw_only=True):
    """Options for each text, before the model sees it."""

    model: ModelName = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Meta(
            description="Truncate texts at their ends to this many tokens, special tokens included; -1: to the model's limit."
        ),
    ] = None
    priority: Annotated[
        int | None,
        Bound("value", -(2**31), 2**31 - 1),
        Meta(
            description="Requests with a lower number are computed first. Default: 0, or the lowest number that the API key may use if that is higher."
        ),
    ] = None
    request_id: OwnId = None


class TextFields(InputFields, kw_only=True):
    """A text, or several, each of which the model reads alone."""

    input: Annotated[
        str | list[Any] | None,
        Meta(description="A text, token ids, or a list of either.", extra_json_schema={"minItems": 1}),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="False: texts do not get the model's special tokens, such as [CLS] and [SEP]. Default: true."),
    ] = None


class EmbeddingRequest(TextFields, kw_only=True):
    encoding_format: Annotated[
        EncodingFormat | None,
        Meta(description="`base64`: little-endian 32-bit floats. `float`: JSON numbers. Default: `float`."),
    ] = None
    dimensions: Annotated[
        int | None,
        Bound("value", 1),
        Meta(
            description="Return only this many first numbers of each vector, normalised again if the whole vector was."
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        Meta(
            description="Name of a prompt of the checkpoint (`config_sentence_transformers.json`) to put before texts, such as `query`. Default: the checkpoint's default, if it has one."
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        Meta(description="True: vectors have length 1. Default: as the model's checkpoint says."),
    ] = None
    use_activation: Annotated[bool | None, Meta(description="Newer name of `normalize`.")] = None


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: Annotated[int, Meta(description="Index of the input.")]
    embedding: Annotated[list[float] | str, Meta(description="Numbers or base64.")]


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: Annotated[int, Meta(description="Tokens of all inputs, special tokens included.")]
    total_tokens: int


class EmbeddingReply(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: Annotated[list[Embedding], Meta(description="Results in the order of the inputs.")]
    model: str
    usage: EmbeddingUsage


def check_embedding(request: EmbeddingRequest, limits: LimitsConfig) -> list[str | list[int]]:
    """Check what needs neither model nor tokenizer; returns the inputs."""
    inputs = check_texts(request, limits)
    if request.normalize is not None and request.use_activation not in (None, request.normalize):
        raise invalid("use_activation", "it is another name for 'normalize', which says the opposite")
    return inputs


def check_texts(request: TextFields, limits: LimitsConfig) -> list[str | list[int]]:
    """Check what needs neither model nor tokenizer; returns the inputs."""
    inputs = texts_or_ids("input", request.input)
    check_bound(Bound("items", 1, "max_inputs"), "input", inputs, limits)
    check_fields(request)
    return inputs


def check_fields(request: InputFields) -> None:
    """Raise InvalidRequestError for a cut to no tokens."""
    most = request.truncate_prompt_tokens
    if most is not None and most != -1 and most < 1:
        raise invalid("truncate_prompt_tokens", f"must be -1 or at least 1, got {most}")


@partial(Route, "POST", "/v1/embeddings", tag="OpenAI", reply=EmbeddingReply)
async def embeddings(call: Call, body: EmbeddingRequest) -> Encoded:
    """Make a vector of each text."""
    frontend = call.frontend
    inputs = await call.off_loop(check_embedding, body, frontend.limits)
    frontend.require_model(body.model)
    model_info, model = frontend.require_vectors()
    check_dimensions(body.dimensions, model)
    texts = await encode_inputs(
        frontend,
        model_info,
        inputs,
        truncate=body.truncate_prompt_tokens,
        param="input",
        add_special_tokens=body.add_special_tokens is not False,
        prompt_name=body.prompt_name,
    )
    check_total(frontend, texts, "input")
    with noting_departure(frontend):
        vectors = await vectors_of(frontend, model_info, texts, body.priority)
    normalizes = next((asked for asked in (body.normalize, body.use_activation) if asked is not None), model.normalizes)
    num_tokens = sum(map(len, texts))

    def encode() -> bytes:
        matrix = finished(vectors.arrays, normalizes=normalizes, dimensions=body.dimensions)
        data = [Embedding(index=i, embedding=_numbers(row, body.encoding_format)) for i, row in enumerate(matrix)]
        usage = EmbeddingUsage(num_tokens, num_tokens)
        return encode_in_parts(EmbeddingReply(data=data, model=frontend.model_name, usage=usage))

    # Encoding thousands of vectors takes a second, in which the event loop must serve other requests.
    return Encoded(body=await asyncio.to_thread(encode), headers=version_header(vectors.weight_version))


def _numbers(vector: np.ndarray, encoding_format: EncodingFormat | None) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
