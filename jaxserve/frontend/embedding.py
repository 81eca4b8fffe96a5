"""From texts to vectors and scores: token ids, one engine request for each text, and the engine's vectors.

A cross-encoder reads both texts of a pair at once and scores them itself. Any other model makes a vector of each text,
once however many pairs it is part of, and the score is the cosine of the angle between two vectors.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxserve.errors import ContextLengthError, invalid
from jaxserve.frontend.errors import first_leaf, request_error
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.handle import USAGE
from jaxserve.ipc.messages import AddRequest, EmbeddingInfo, ModelInfo, RequestOutput
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.tenants import HTTP_REQUEST_ID, TENANT
from jaxserve.types import LabelActivation, RequestId

_LANES: Final = 4
"""Number of parts of a long list that run at the same time, so that no step waits for the last text of a part."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of texts as token ids for the engine."""

    texts: list[list[int]]
    """For a cross-encoder the pairs; else the first texts of all pairs, or the only one, and then the second ones."""
    text_pair_starts: list[int | None] | None
    """For a cross-encoder, the start of the second text of each pair."""
    num_first: int
    """Number of first texts; 0 for a cross-encoder."""

    @property
    def token_ids(self) -> list[list[int]]:
        """Both texts of each pair, concatenated."""
        if self.num_first == 0:
            return self.texts
        first, second = self.texts[: self.num_first], self.texts[self.num_first :]
        partners = first if len(first) == len(second) else first * len(second)
        return [[*one, *other] for one, other in zip(partners, second, strict=True)]


async def encode_inputs(
    frontend: Frontend,
    model_info: ModelInfo,
    inputs: Sequence[str | list[Any]],
    *,
    truncate: int | None,
    param: str,
    add_special_tokens: bool = True,
    prompt_name: str | None = None,
) -> list[list[int]]:
    """Return the token ids of each input. Raises InvalidRequestError, or ContextLengthError for one that is too long.

    truncate: `truncate_prompt_tokens`. prompt_name: a prompt of the model to put before texts; None: its default, if it has one.
    """
    limit = model_info.max_model_len
    most = check_truncation(truncate, limit)
    texts = [one for one in inputs if isinstance(one, str)]
    if model_info.embedding is not None:
        texts = with_prompt(model_info.embedding, texts, prompt_name)
    if prompt_name is not None and len(texts) < len(inputs):
        raise invalid("prompt_name", f"needs texts: '{param}' has token ids")
    encoded = iter(
        await frontend.tokenization.encode_inputs(
            texts, add_special_tokens=add_special_tokens, truncate=most, max_tokens=limit, param=param
        )
    )
    given = [one[:most] for one in inputs if not isinstance(one, str)]
    await frontend.tokenization.check_token_ids(param, given, model_info.vocab_size)
    lists, found = iter(given), []
    for place, one in enumerate(inputs):
        ids = next(encoded if isinstance(one, str) else lists)
        check_length(len(ids), limit, param, place)
        found.append(ids)
    return found


def with_prompt(model: EmbeddingInfo, texts: Sequence[str], prompt_name: str | None) -> list[str]:
    """Return texts as the model's tokenizer takes them. Raises InvalidRequestError for a prompt that the model does not have."""
    if prompt_name is not None and prompt_name not in model.prompts:
        names = ", ".join(model.prompts)
        reason = f"must be one of {names}" if names else "this model's checkpoint has no prompts"
        raise invalid("prompt_name", f"{reason}, got {prompt_name[:64]!r}")
    prompt = model.prompts.get(prompt_name or model.default_prompt or "", "")
    made = [prompt + text for text in texts]
    return [text.lower() for text in made] if model.lowers_texts else made


def check_total(frontend: Frontend, texts: Sequence[list[int]], param: str) -> None:
    """Raise InvalidRequestError for more tokens than one request may have."""
    total, allowed = sum(map(len, texts)), frontend.limits.max_input_tokens
    if total > allowed:
        raise invalid(param, f"all texts together may have {allowed} tokens (--max-input-tokens), got {total}")


def check_truncation(truncate: int | None, limit: int) -> int | None:
    """Return the number of tokens of a text to keep; None: all. Raises InvalidRequestError for more than the model takes, or none."""
    if truncate is not None and truncate != -1 and truncate < 1:
        raise invalid("truncate_prompt_tokens", f"must be -1 or at least 1, got {truncate}")
    if truncate is not None and truncate > limit:
        raise invalid("truncate_prompt_tokens", f"this model takes {limit} tokens, got {truncate}")
    return limit if truncate == -1 else truncate


def check_length(num_tokens: int, limit: int, param: str, place: int) -> None:
    """Raise InvalidRequestError for a text of no tokens or of more than the model takes. place: its index in the list."""
    if num_tokens == 0:
        raise invalid(param, f"number {place} has no tokens")
    if num_tokens > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, number {place} of '{param}' has "
            f"{num_tokens} tokens. Please reduce its length, or set truncate_prompt_tokens.",
            param=param,
        )


def check_dimensions(dimensions: int | None, model: EmbeddingInfo) -> None:
    """Raise InvalidRequestError for more dimensions than a vector has, or for none."""
    if dimensions is not None and not 1 <= dimensions <= model.size:
        raise invalid("dimensions", f"this model's vectors have {model.size}, got {dimensions}")


@contextlib.contextmanager
def noting_departure(frontend: Frontend) -> Iterator[None]:
    """Count a client that leaves before its reply; its requests end within one engine step."""
    try:
        yield
    except (asyncio.CancelledError, ConnectionResetError):
        frontend.metrics.inc("client_disconnects")
        raise


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vector of each text, float32, as the model makes it."""

    arrays: list[np.ndarray]
    weight_version: int
    """Version of the weights that computed the last text."""


async def vectors_of(
    frontend: Frontend,
    model_info: ModelInfo,
    texts: Sequence[list[int]],
    priority: int | None = None,
    *,
    text_pair_starts: Sequence[int | None] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Vectors:
    """Return the vector of each text. Raises the error of the first text that fails.

    However long the list, the engine holds no more of it than fills its next steps. text_pair_starts: for pairs, the
    start of each second text. on_done: called for each text.
    """
    tenant = TENANT.get()
    rank = priority or 0 if tenant is None else tenant.priority(priority)
    key_name = "" if tenant is None else tenant.record.name
    request_id = f"{HTTP_REQUEST_ID.get()}:{uuid.uuid4().hex[:12]}"
    starts = text_pair_starts or [None] * len(texts)
    requests = [
        AddRequest(
            RequestId(f"{request_id}-{i}"),
            ids,
            EngineSamplingParams(),
            rank,
            text_pair_start=start,
            key_name=key_name,
        )
        for i, (ids, start) in enumerate(zip(texts, starts, strict=True))
    ]
    window = min(len(requests), frontend.client.admission.max_sequences, 2 * model_info.max_num_seqs)
    size = max(1, window // _LANES)
    parts = iter([requests[start : start + size] for start in range(0, len(requests), size)])
    found: dict[RequestId, RequestOutput] = {}
    with frontend.client.admission.places(window):
        for user in (tenant, USAGE.get()):
            if user is not None:
                user.use(sum(map(len, texts)), 0)
        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(min(_LANES, window)):
                    lanes.create_task(_run(frontend, parts, found, on_done))
        except* Exception as group:
            failure = first_leaf(group)
        else:
            outputs = [found[request.request_id] for request in requests]
            arrays = [np.frombuffer(output.vector or b"", "<f4") for output in outputs]
            return Vectors(arrays, max(output.weight_version for output in outputs))
    raise failure


async def _run(
    frontend: Frontend,
    parts: Iterator[list[AddRequest]],
    found: dict[RequestId, RequestOutput],
    on_done: Callable[[], None],
) -> None:
    """Submit part after part until there are no more."""
    for part in parts:
        submitted = time.monotonic()
        num_tokens = {request.request_id: len(request.prompt_token_ids) for request in part}

        def gather(
            outputs: list[RequestOutput], left: dict[RequestId, int] = num_tokens, at: float = submitted
        ) -> bool:
            for output in outputs:
                _count(frontend, output, left.pop(output.request_id), at)
                if output.vector is None:
                    raise request_error(output.error)
                found[output.request_id] = output
                on_done()
            return True

        try:
            with frontend.client.submit(part) as stream:
                while not stream.is_finished:
                    await stream.consume(gather)
        finally:
            frontend.metrics.inc("request_success", len(num_tokens), finished_reason="abort")


def _count(frontend: Frontend, output: RequestOutput, num_tokens: int, submitted: float) -> None:
    metrics = frontend.metrics
    metrics.inc("request_success", finished_reason=output.finish_reason or "stop")
    if output.error is not None and output.error.is_rate_limit:
        return
    metrics.observe("e2e_request_latency_seconds", time.monotonic() - submitted)
    metrics.observe("request_prompt_tokens", num_tokens)
    if output.queue_seconds is not None:
        metrics.observe("request_queue_time_seconds", output.queue_seconds)


def finished(vectors: Sequence[np.ndarray], *, normalizes: bool, dimensions: int | None = None) -> np.ndarray:
    """Return the vectors cut to their first `dimensions` numbers, and of length 1 if `normalizes`. (texts, D)"""
    matrix = np.stack(vectors)[:, :dimensions]
    if not normalizes:
        return matrix
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    normal: np.ndarray = matrix / np.maximum(lengths, np.finfo(np.float32).tiny)
    return normal


def check_partners(first: Sequence[str], second: Sequence[str]) -> None:
    """Raise InvalidRequestError unless each of `second` has its partner in `first`, or the only one there."""
    if len(first) not in (1, len(second)):
        raise invalid("text_2", f"must be as many texts as 'text_1' ({len(first)}), got {len(second)}")


async def scores_with_counts(
    frontend: Frontend,
    first: Sequence[str],
    second: Sequence[str],
    *,
    truncate: int | None,
    priority: int | None,
    params: tuple[str, str],
    instruction: str | None = None,
) -> tuple[list[float], int, int]:
    """Return the score of each of `second` with its partner in `first`, or with the only one there, the token count, and the
    version of the weights.

    params: the fields of both sides, for errors. instruction: see `encode_score_pairs`. Raises RequestError.
    """
    model_info, model = frontend.require_scores()
    options: dict[str, Any] = {"truncate": truncate, "params": params, "instruction": instruction}
    pairs = await encode_pairs(frontend, model_info, model, first, second, **options)
    check_total(frontend, pairs.texts, params[1])
    with noting_departure(frontend):
        values, weight_version = await scores_of(frontend, model_info, model, pairs, priority)
    return values, sum(map(len, pairs.texts)), weight_version


async def encode_pairs(
    frontend: Frontend,
    model_info: ModelInfo,
    model: EmbeddingInfo,
    first: Sequence[str],
    second: Sequence[str],
    *,
    truncate: int | None,
    params: tuple[str, str],
    instruction: str | None = None,
) -> Pairs:
    """Return the token ids of each text, or of each pair. Raises InvalidRequestError, or ContextLengthError for what is too long."""
    if not model.scores_pairs:
        if instruction is not None:
            raise invalid("instruction", "this model makes a vector of each text: put it before the texts instead")
        sides = [
            await encode_inputs(frontend, model_info, side, truncate=truncate, param=param)
            for side, param in zip((first, second), params, strict=True)
        ]
        return Pairs([ids for side in sides for ids in side], None, len(first))
    limit = model_info.max_model_len
    most = check_truncation(truncate, limit)
    prompt = model.prompts.get(model.default_prompt or "", "")
    if model.lowers_texts:
        prompt = prompt.lower()
        first, second = ([text.lower() for text in side] for side in (first, second))
    partners = first if len(first) == len(second) else [*first] * len(second)
    encoded = await frontend.tokenization.encode_pairs(
        list(zip(partners, second, strict=True)),
        most,
        lambda num_tokens, place: check_length(num_tokens, limit, params[1], place),
        instruction,
        prompt,
    )
    return Pairs([ids for ids, _ in encoded], [start for _, start in encoded], 0)


async def scores_of(
    frontend: Frontend,
    model_info: ModelInfo,
    model: EmbeddingInfo,
    pairs: Pairs,
    priority: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[list[float], int]:
    """Return the score of each pair, and the version of the weights that computed the last text."""
    found = await vectors_of(
        frontend, model_info, pairs.texts, priority, text_pair_starts=pairs.text_pair_starts, on_done=on_done
    )
    vectors = found.arrays
    if pairs.num_first == 0:
        return activated(vectors, model.activation)[:, 0].tolist(), found.weight_version
    return cosines(vectors[: pairs.num_first], vectors[pairs.num_first :]), found.weight_version


def cosines(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[float]:
    """Return the cosine of each of `second` with its partner in `first`, or with the only one there."""
    one, other = (finished(side, normalizes=True) for side in (first, second))
    values: list[float] = np.clip((one * other).sum(axis=1), -1.0, 1.0).tolist()
    return values


def activated(logits: Sequence[np.ndarray], activation: LabelActivation) -> np.ndarray:
    """Return the scores or probabilities of the labels of each text, float32. (texts, labels)"""
    matrix = np.stack(logits)
    if activation == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-matrix.clip(-80, 80))))
    if activation == "softmax":
        weights = np.exp(matrix - matrix.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))
    return matrix
