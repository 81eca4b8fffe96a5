"""How close texts are to each other, pair by pair.

A cross-encoder reads both texts of a pair at once and says so itself. Any other model makes a vector of each text, once
however many pairs it stands in, and the score is the cosine of the angle between two vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from jaxserve.apis.openai.embeddings_schema import EmbeddingUsage, InputFields
from jaxserve.frontend.embedding import (
    check_length,
    check_total,
    check_truncation,
    encode_inputs,
    finished,
    noting_departure,
    vectors_of,
)
from jaxserve.http.state import STATE, ServerState
from jaxserve.ipc.messages import EmbeddingInfo, ModelInfo


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the engine is given for pairs of texts."""

    texts: list[list[int]]
    """Of a cross-encoder the pairs; else the first texts of all pairs, or the only one, and then the second ones."""
    text_pair_starts: list[int | None] | None
    """Of a cross-encoder, where the second text of each pair begins."""
    num_first: int
    """How many of the texts are first ones; 0 of a cross-encoder."""

    @property
    def token_ids(self) -> list[list[int]]:
        """Of each pair, both texts one behind the other."""
        if self.num_first == 0:
            return self.texts
        first, second = self.texts[: self.num_first], self.texts[self.num_first :]
        partners = first if len(first) == len(second) else first * len(second)
        return [[*one, *other] for one, other in zip(partners, second, strict=True)]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of pairs of texts."""

    values: list[float]
    usage: EmbeddingUsage


async def answer_scores(
    http: web.Request, request: InputFields, first: Sequence[str], second: Sequence[str], params: tuple[str, str]
) -> Scores:
    """Of each of `second` with its partner in `first`, or with the only one there. params: the fields they stand in."""
    state = http.app[STATE]
    model_info, model = state.client.require_embedding()
    pairs = await encode_pairs(
        state, model_info, model, first, second, truncate=request.truncate_prompt_tokens, params=params
    )
    check_total(state, pairs.texts, params[1])
    with noting_departure(state):
        values = await scores_of(state, model_info, pairs, request.priority or 0)
    num_tokens = sum(map(len, pairs.texts))
    return Scores(values, EmbeddingUsage(num_tokens, num_tokens))


async def encode_pairs(
    state: ServerState,
    model_info: ModelInfo,
    model: EmbeddingInfo,
    first: Sequence[str],
    second: Sequence[str],
    *,
    truncate: int | None,
    params: tuple[str, str],
) -> Pairs:
    """Token ids of each text, or of each pair. Raises InvalidRequestError, or ContextLengthError for what is too long."""
    if not model.scores_pairs:
        sides = [
            await encode_inputs(state, model_info, side, truncate=truncate, param=param)
            for side, param in zip((first, second), params, strict=True)
        ]
        return Pairs([ids for side in sides for ids in side], None, len(first))
    limit = model_info.max_model_len
    most = check_truncation(truncate, limit)
    partners = first if len(first) == len(second) else [*first] * len(second)
    encoded = await state.tokenization.encode_pairs(list(zip(partners, second, strict=True)), most)
    for place, (ids, _) in enumerate(encoded):
        check_length(len(ids), limit, params[1], place)
    return Pairs([ids for ids, _ in encoded], [start for _, start in encoded], 0)


async def scores_of(
    state: ServerState,
    model_info: ModelInfo,
    pairs: Pairs,
    priority: int = 0,
    on_done: Callable[[], None] = lambda: None,
) -> list[float]:
    """Of each pair."""
    vectors = await vectors_of(
        state, model_info, pairs.texts, priority, text_pair_starts=pairs.text_pair_starts, on_done=on_done
    )
    if pairs.num_first == 0:
        return [float(vector[0]) for vector in vectors]
    return cosines(vectors[: pairs.num_first], vectors[pairs.num_first :])


def cosines(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[float]:
    """Of each of `second` with its partner in `first`, or with the only one there."""
    one, other = (finished(side, normalizes=True) for side in (first, second))
    values: list[float] = np.clip((one * other).sum(axis=1), -1.0, 1.0).tolist()
    return values
