"""From texts to the vectors, labels and scores of the Python API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.frontend.embedding import (
    activated,
    check_dimensions,
    check_partners,
    encode_inputs,
    encode_pairs,
    finished,
    scores_of,
    vectors_of,
)
from jaxserve.frontend.frontend import Frontend
from jaxserve.llm.results import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)


async def embed_all(
    frontend: Frontend,
    prompts: Sequence[str | list[int]],
    dimensions: int | None,
    normalize: bool | None,
    truncate_prompt_tokens: int | None,
    prompt_name: str | None,
    on_done: Callable[[], None],
) -> list[EmbeddingRequestOutput]:
    """Return vectors in the order of `prompts`, all of which are checked before anything runs. Raises RequestError."""
    model_info, model = frontend.require_vectors()
    check_dimensions(dimensions, model)
    texts = await encode_inputs(
        frontend, model_info, prompts, truncate=truncate_prompt_tokens, param="prompts", prompt_name=prompt_name
    )
    if not texts:
        return []
    vectors = await vectors_of(frontend, model_info, texts, on_done=on_done)
    normalizes = model.normalizes if normalize is None else normalize
    matrix = finished(vectors.arrays, normalizes=normalizes, dimensions=dimensions)
    return [
        EmbeddingRequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=EmbeddingOutput(row.tolist()),
        )
        for prompt, ids, row in zip(prompts, texts, matrix, strict=True)
    ]


async def classify_all(
    frontend: Frontend,
    prompts: Sequence[str | list[int]],
    truncate_prompt_tokens: int | None,
    on_done: Callable[[], None],
) -> list[ClassificationRequestOutput]:
    """Return labels in the order of `prompts`, all of which are checked before anything runs. Raises RequestError."""
    model_info, model = frontend.require_labels()
    texts = await encode_inputs(frontend, model_info, prompts, truncate=truncate_prompt_tokens, param="prompts")
    if not texts:
        return []
    logits = await vectors_of(frontend, model_info, texts, on_done=on_done)
    return [
        ClassificationRequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=ClassificationOutput(model.labels[row.argmax()], row.tolist()),
        )
        for prompt, ids, row in zip(prompts, texts, activated(logits.arrays, model.activation), strict=True)
    ]


async def score_all(
    frontend: Frontend,
    first: Sequence[str],
    second: Sequence[str],
    truncate_prompt_tokens: int | None,
    instruction: str | None,
    on_done: Callable[[], None],
) -> list[ScoringRequestOutput]:
    """Return the score of each of `second` with its partner in `first`, or with the only one there. Raises RequestError."""
    check_partners(first, second)
    if not second:
        return []
    model_info, model = frontend.require_scores()
    fields = "text_1", "text_2"
    options: dict[str, Any] = {"truncate": truncate_prompt_tokens, "instruction": instruction, "params": fields}
    pairs = await encode_pairs(frontend, model_info, model, first, second, **options)
    for _ in first if pairs.num_first == 0 else ():  # the caller counts the texts of both sides
        on_done()
    scores, _ = await scores_of(frontend, model_info, model, pairs, on_done=on_done)
    return [
        ScoringRequestOutput(prompt_token_ids=ids, outputs=ScoringOutput(score))
        for ids, score in zip(pairs.token_ids, scores, strict=True)
    ]
