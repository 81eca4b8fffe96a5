"""Texts to vectors and scores: what the endpoints do with a request, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.apis.openai.score_schema import check_partners
from jaxserve.frontend.embedding import check_dimensions, encode_inputs, finished, vectors_of
from jaxserve.frontend.scoring import encode_pairs, scores_of
from jaxserve.http.state import ServerState
from jaxserve.llm.results import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """As the fields of /v1/embeddings."""

    dimensions: int | None
    normalize: bool | None
    truncate_prompt_tokens: int | None


async def embed_all(
    state: ServerState, prompts: Sequence[str | list[int]], options: EmbeddingOptions, on_done: Callable[[], None]
) -> list[EmbeddingRequestOutput]:
    """In the order of `prompts`, all of which are checked before anything runs. Raises RequestError."""
    model_info, model = state.client.require_vectors()
    check_dimensions(options.dimensions, model)
    texts = await encode_inputs(state, model_info, prompts, truncate=options.truncate_prompt_tokens, param="prompts")
    if not texts:
        return []
    vectors = await vectors_of(state, model_info, texts, on_done=on_done)
    normalizes = model.normalizes if options.normalize is None else options.normalize
    matrix = finished(vectors, normalizes=normalizes, dimensions=options.dimensions)
    return [
        EmbeddingRequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=EmbeddingOutput(row.tolist()),
        )
        for prompt, ids, row in zip(prompts, texts, matrix, strict=True)
    ]


async def score_all(
    state: ServerState,
    first: Sequence[str],
    second: Sequence[str],
    truncate_prompt_tokens: int | None,
    on_done: Callable[[], None],
) -> list[ScoringRequestOutput]:
    """Of each of `second` with its partner in `first`, or with the only one there. Raises RequestError."""
    check_partners(first, second)
    if not second:
        return []
    model_info, model = state.client.require_embedding()
    pairs = await encode_pairs(
        state, model_info, model, first, second, truncate=truncate_prompt_tokens, params=("text_1", "text_2")
    )
    for _ in first if pairs.num_first == 0 else ():  # the caller counts the texts of both sides
        on_done()
    scores = await scores_of(state, model_info, pairs, on_done=on_done)
    return [
        ScoringRequestOutput(prompt_token_ids=ids, outputs=ScoringOutput(score))
        for ids, score in zip(pairs.token_ids, scores, strict=True)
    ]
