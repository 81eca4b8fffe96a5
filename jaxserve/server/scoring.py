"""How close texts are to each other: the cosine of the angle between their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from jaxserve.server.embedding import answer_vectors, check_total, encode_inputs, finished
from jaxserve.server.schema.embeddings import EmbeddingUsage, InputFields
from jaxserve.server.state import STATE


@dataclass(frozen=True, slots=True)
class Scores:
    """Of pairs of texts."""

    values: list[float]
    usage: EmbeddingUsage


async def answer_scores(
    http: web.Request, request: InputFields, first: Sequence[str], second: Sequence[str], params: tuple[str, str]
) -> Scores:
    """Of each of `second` with its partner in `first`, or with the only one there.

    params: the fields that they stand in.
    """
    state = http.app[STATE]
    facts, _ = state.client.require_embedding()
    sides = [
        await encode_inputs(state, facts, side, truncate=request.truncate_prompt_tokens, param=param)
        for side, param in zip((first, second), params, strict=True)
    ]
    texts = [ids for side in sides for ids in side]
    check_total(state, texts, params[1])
    vectors = await answer_vectors(http, facts, texts, request.priority)
    num_tokens = sum(map(len, texts))
    return Scores(cosines(vectors[: len(first)], vectors[len(first) :]), EmbeddingUsage(num_tokens, num_tokens))


def cosines(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[float]:
    """Of each of `second` with its partner in `first`, or with the only one there."""
    one, other = (finished(side, normalizes=True) for side in (first, second))
    values: list[float] = np.clip((one * other).sum(axis=1), -1.0, 1.0).tolist()
    return values
