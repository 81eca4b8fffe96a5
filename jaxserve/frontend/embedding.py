"""From texts to vectors: token ids, one engine request for each, and what the engine gives back."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from jaxserve.errors import ContextLengthError, invalid
from jaxserve.frontend.checks import check_token_ids
from jaxserve.http.errors import first_leaf, request_error
from jaxserve.http.state import ServerState
from jaxserve.ipc.messages import AddRequest, EmbeddingInfo, ModelInfo, RequestOutput
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import RequestId

_LANES: Final = 4
"""Parts of a long list that are under way at the same time, so that no step waits for the last text of a part."""


async def encode_inputs(
    state: ServerState,
    model_info: ModelInfo,
    inputs: Sequence[str | list[Any]],
    *,
    truncate: int | None,
    param: str,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Token ids of each input. Raises InvalidRequestError, or ContextLengthError for one that is too long.

    truncate: `truncate_prompt_tokens`.
    """
    limit = model_info.max_model_len
    most = check_truncation(truncate, limit)
    texts = [one for one in inputs if isinstance(one, str)]
    encoded = iter(
        await state.tokenization.encode_inputs(
            texts, add_special_tokens=add_special_tokens, truncate=most, max_tokens=limit, param=param
        )
    )
    found = []
    for place, one in enumerate(inputs):
        if isinstance(one, str):
            ids = next(encoded)
        else:
            ids = one[:most]
            check_token_ids(param, ids, model_info.vocab_size)
        check_length(len(ids), limit, param, place)
        found.append(ids)
    return found


def check_total(state: ServerState, texts: Sequence[list[int]], param: str) -> None:
    """Refuse more tokens than one request may bring. Raises InvalidRequestError."""
    total, allowed = sum(map(len, texts)), state.limits.max_input_tokens
    if total > allowed:
        raise invalid(param, f"all texts together may have {allowed} tokens (--max-input-tokens), got {total}")


def check_truncation(truncate: int | None, limit: int) -> int | None:
    """How many tokens of a text are kept; None: all of them. Raises InvalidRequestError for more than the model takes."""
    if truncate is not None and truncate > limit:
        raise invalid("truncate_prompt_tokens", f"this model takes {limit} tokens, got {truncate}")
    return limit if truncate == -1 else truncate


def check_length(num_tokens: int, limit: int, param: str, place: int) -> None:
    """Raise for a text of no tokens, or of more than the model takes. place: of the text in the list."""
    if num_tokens == 0:
        raise invalid(param, f"number {place} has no tokens")
    if num_tokens > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, number {place} of '{param}' has "
            f"{num_tokens} tokens. Please reduce its length, or set truncate_prompt_tokens.",
            param=param,
        )


def check_dimensions(dimensions: int | None, model: EmbeddingInfo) -> None:
    """Refuse to cut vectors to more numbers than they have, or to none. Raises InvalidRequestError."""
    if dimensions is not None and not 1 <= dimensions <= model.size:
        raise invalid("dimensions", f"this model's vectors have {model.size}, got {dimensions}")


@contextlib.contextmanager
def noting_departure(state: ServerState) -> Iterator[None]:
    """Count a client that leaves before its reply; what it asked for ends within one engine step."""
    try:
        yield
    except (asyncio.CancelledError, ConnectionResetError):
        state.metrics.inc("client_disconnects")
        raise


async def vectors_of(
    state: ServerState,
    model_info: ModelInfo,
    texts: Sequence[list[int]],
    priority: int = 0,
    *,
    text_pair_starts: Sequence[int | None] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """Of each text, float32, as the model makes it. Raises what ends the first text that fails.

    However long the list, no more of it is in the engine than would fill its next steps. text_pair_starts: of pairs.
    on_done: called for each text.
    """
    job_id = uuid.uuid4().hex
    starts = text_pair_starts or [None] * len(texts)
    requests = [
        AddRequest(RequestId(f"{job_id}-{i}"), ids, EngineSamplingParams(), priority, text_pair_start=start)
        for i, (ids, start) in enumerate(zip(texts, starts, strict=True))
    ]
    window = min(len(requests), state.client.max_admitted, 2 * model_info.max_num_seqs)
    size = max(1, window // _LANES)
    parts = iter([requests[start : start + size] for start in range(0, len(requests), size)])
    found: dict[RequestId, np.ndarray] = {}
    with state.client.admission(window):
        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(min(_LANES, window)):
                    lanes.create_task(_run(state, parts, found, on_done))
        except* Exception as group:
            failure = first_leaf(group)
        else:
            return [found[request.request_id] for request in requests]
    raise failure


async def _run(
    state: ServerState,
    parts: Iterator[list[AddRequest]],
    found: dict[RequestId, np.ndarray],
    on_done: Callable[[], None],
) -> None:
    """Take part after part until there are no more."""
    for part in parts:
        submitted = time.monotonic()
        num_tokens = {request.request_id: len(request.prompt_token_ids) for request in part}

        def gather(news: list[RequestOutput], left: dict[RequestId, int] = num_tokens, at: float = submitted) -> bool:
            for output in news:
                _count(state, output, left.pop(output.request_id), at)
                if output.vector is None:
                    raise request_error(output.error)
                found[output.request_id] = np.frombuffer(output.vector, "<f4")
                on_done()
            return True

        try:
            with state.client.submit(part) as generation:
                while not generation.is_finished:
                    await generation.consume(gather)
        finally:
            state.metrics.inc("request_success", len(num_tokens), finished_reason="abort")


def _count(state: ServerState, output: RequestOutput, num_tokens: int, submitted: float) -> None:
    metrics = state.metrics
    metrics.inc("request_success", finished_reason=output.finish_reason or "stop")
    metrics.observe("e2e_request_latency_seconds", time.monotonic() - submitted)
    metrics.observe("request_prompt_tokens", num_tokens)
    if output.queue_seconds is not None:
        metrics.observe("request_queue_time_seconds", output.queue_seconds)


def finished(vectors: Sequence[np.ndarray], *, normalizes: bool, dimensions: int | None = None) -> np.ndarray:
    """The vectors as they leave: cut to their first `dimensions` numbers, and of length 1 if wanted. (texts, D)"""
    matrix = np.stack(vectors)[:, :dimensions]
    if not normalizes:
        return matrix
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    normal: np.ndarray = matrix / np.maximum(lengths, np.finfo(np.float32).tiny)
    return normal
