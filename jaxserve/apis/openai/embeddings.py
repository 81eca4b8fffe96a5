"""`POST /v1/embeddings`: a text, several texts, token ids, or several lists of token ids, to vectors."""

from __future__ import annotations

import asyncio
import base64
from functools import partial

import msgspec
import numpy as np
from aiohttp import web

from jaxserve.apis.openai.embeddings_schema import (
    Embedding,
    EmbeddingReply,
    EmbeddingRequest,
    EmbeddingUsage,
    EncodingFormat,
    check_embedding,
)
from jaxserve.apis.routes import Route
from jaxserve.frontend.embedding import (
    check_dimensions,
    check_total,
    encode_inputs,
    finished,
    noting_departure,
    vectors_of,
)
from jaxserve.http.body import read_body
from jaxserve.http.state import STATE


@partial(Route, "POST", "/v1/embeddings", tag="OpenAI", request=EmbeddingRequest, reply=EmbeddingReply)
async def embeddings(http: web.Request) -> web.StreamResponse:
    """A vector for each text."""
    state = http.app[STATE]
    request = await read_body(http, EmbeddingRequest)
    inputs = check_embedding(request, state.limits)
    state.require_model(request.model)
    model_info, model = state.client.require_vectors()
    check_dimensions(request.dimensions, model)
    texts = await encode_inputs(
        state,
        model_info,
        inputs,
        truncate=request.truncate_prompt_tokens,
        param="input",
        add_special_tokens=request.add_special_tokens is not False,
    )
    check_total(state, texts, "input")
    with noting_departure(state):
        vectors = await vectors_of(state, model_info, texts, request.priority or 0)
    normalizes = next(
        (asked for asked in (request.normalize, request.use_activation) if asked is not None), model.normalizes
    )
    num_tokens = sum(map(len, texts))

    def spell() -> bytes:
        matrix = finished(vectors, normalizes=normalizes, dimensions=request.dimensions)
        data = [Embedding(index=i, embedding=_spelled(row, request.encoding_format)) for i, row in enumerate(matrix)]
        usage = EmbeddingUsage(num_tokens, num_tokens)
        return msgspec.json.encode(EmbeddingReply(data=data, model=state.model_name, usage=usage))

    # Thousands of vectors take a second to spell, in which others want to be heard.
    return web.Response(body=await asyncio.to_thread(spell), content_type="application/json")


def _spelled(vector: np.ndarray, encoding_format: EncodingFormat | None) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
